"""tokenizer.model alone gives the ids that the package sentencepiece gives.

The vocabularies in the directory sentencepiece, and the ids of the golden texts, were made by the
package itself (0.2.3), of this repository's README and the texts: a BPE with bytes, one with
pieces of the user's own and no space before a text, and a unigram with a map of characters.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.text_files import TextFiles, read_text_files
from kvchat.model.files.sentencepiece_file import read_pieces, sentencepiece_tokenizer
from support.checkpoints import save_checkpoint, tiny_model

_HERE = Path(__file__).parent / "sentencepiece"
_GOLDEN = json.loads((_HERE / "golden.json").read_text())
_MODELS = ["bpe", "bpe_own", "unigram"]


def text_files(tmp_path: Path, model: str, **files: Any) -> TextFiles:
    """Read a checkpoint that has the vocabulary `model`, and JSON files by their stems."""
    directory = tmp_path / model
    save_checkpoint(directory, tiny_model("llama", vocab_size=710))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    shutil.copy(_HERE / f"{model}.model", directory / "tokenizer.model")
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(json.dumps(content))
    return read_text_files(find_model(str(directory)))


@pytest.mark.parametrize("model", _MODELS)
def test_ids_are_those_of_sentencepiece(model: str) -> None:
    pieces = read_pieces((_HERE / f"{model}.model").read_bytes())
    tokenizer = sentencepiece_tokenizer(pieces, {}, has_prefix_everywhere=True)
    for text, expected in zip(_GOLDEN["texts"], _GOLDEN["ids"][model], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text


def test_a_checkpoint_needs_no_other_file_of_a_tokenizer(tmp_path: Path) -> None:
    files = text_files(tmp_path, "bpe")

    built = Tokenizer.from_str(files.tokenizer_json)

    assert built.encode(_GOLDEN["texts"][0]).ids == _GOLDEN["ids"]["bpe"][0]
    assert files.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert files.adds_bos
    assert built.encode("<s>one<|start|>").tokens[:2] == ["<s>", "▁one"]


def test_tokens_of_the_configuration_follow_the_vocabulary(tmp_path: Path) -> None:
    decoder = {
        "701": {"content": "<|user|>", "special": True},
        "2": {"content": "</s>", "special": True},
    }
    files = text_files(
        tmp_path,
        "bpe",
        added_tokens={"<|more|>": 700},
        tokenizer_config={"added_tokens_decoder": decoder, "add_bos_token": False, "legacy": False},
    )

    built = Tokenizer.from_str(files.tokenizer_json)

    assert not files.adds_bos
    assert built.encode("<|more|><|user|></s>").ids == [700, 701, 2]
    assert built.encode("<s>one").tokens[1] == "on"  # no space after a control token


def test_what_is_no_vocabulary_gives_one_sentence(tmp_path: Path) -> None:
    whole = (_HERE / "bpe.model").read_bytes()
    files = text_files(tmp_path, "bpe")
    assert files.tokenizer_json
    path = next(tmp_path.rglob("tokenizer.model"))
    source = find_model(str(path.parent))
    for content in (b"", whole[:-3], whole[:5000], b"\xff" * 100, bytes(1000), whole[1:]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"tokenizer\.model cannot be read") as caught:
            read_text_files(source)
        assert "\n" not in caught.value.message


def test_a_vocabulary_in_tiktokens_form_is_refused_by_name(tmp_path: Path) -> None:
    text_files(tmp_path, "bpe")
    path = next(tmp_path.rglob("tokenizer.model"))
    path.write_bytes(b"IQ== 0\nIg== 1\nIw== 2\n")
    with pytest.raises(ModelUnsupported, match="in tiktoken's form"):
        read_text_files(find_model(str(path.parent)))


def test_a_gap_between_ids_is_no_tokenizer() -> None:
    pieces = read_pieces((_HERE / "bpe.model").read_bytes())
    with pytest.raises(ValueError, match="leave a gap"):
        sentencepiece_tokenizer(pieces, {705: AddedToken("<far>")}, has_prefix_everywhere=True)
