"""tokenizer.model alone gives the ids that the package sentencepiece gives.

The vocabularies in the directory sentencepiece, and the ids of the golden texts, were made by the
package itself (0.2.3), of this repository's README and the texts: a BPE with bytes, one with
pieces of the user's own and no space before a text, and a unigram with a map of characters.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.normalizers import NFD
from tokenizers.pre_tokenizers import Whitespace

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.text_files import TextFiles, read_text_files, same_vocabulary
from kvchat.model.files.sentencepiece_file import (
    implied_merges,
    read_pieces,
    sentencepiece_tokenizer,
)
from kvchat.model.files.text_settings import built_tokenizer
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


def merges_by_entries(
    tokens: list[str], scores: list[int], is_mergeable: list[bool]
) -> list[tuple[str, str]]:
    """The plain twin of `implied_merges`: every pair with its score and lengths, sorted."""
    known = {token: index for index, token in enumerate(tokens) if is_mergeable[index]}
    pairs = [
        (scores[index], at, len(token) - at, token)
        for token, index in known.items()
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [(token[:at], token[at:]) for _, at, _, token in pairs]


@pytest.mark.parametrize("num_scores", [5, 10_000])
def test_merges_are_made_by_score_and_of_equal_scores_the_longer_beginning_first(num_scores):
    rng = random.Random(num_scores)
    tokens = list(dict.fromkeys("".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(99)))
    scores = [rng.randrange(num_scores) for _ in tokens]
    is_mergeable = [rng.random() < 0.9 for _ in tokens]

    merges = implied_merges(tokens, scores, is_mergeable)

    assert len(merges) > 50
    assert merges == merges_by_entries(tokens, scores, is_mergeable)


def test_a_tokenizer_that_was_built_is_known_by_all_that_it_was_built_of(tmp_path: Path) -> None:
    files = text_files(tmp_path, "bpe")
    again = text_files(tmp_path / "again", "bpe")
    others = [
        text_files(tmp_path / "vocabulary", "bpe_own"),
        text_files(tmp_path / "setting", "bpe", tokenizer_config={"legacy": False}),
        text_files(tmp_path / "added", "bpe", added_tokens={"<|more|>": 700}),
    ]
    template = {"chat_template": "{{ messages }}"}
    beside = text_files(tmp_path / "template", "bpe", tokenizer_config=template)

    assert files.digest == again.digest == beside.digest
    assert len({files.digest, *(other.digest for other in others)}) == 4
    assert files.tokenizer().to_str() == Tokenizer.from_str(files.tokenizer_json).to_str()


def test_a_tokenizer_that_was_built_otherwise_of_the_same_file_is_another_one(tmp_path):
    """A rule that a later kvchat mends gives other texts for the ids of the same file."""
    parts = (b"the same",)
    digests = set()
    for change in (None, "normalizer", "pre_tokenizer", "decoder", "added"):
        tokenizer = text_files(tmp_path / str(change), "bpe").tokenizer()
        if change == "added":
            tokenizer.add_tokens(["<|more|>"])
        elif change is not None:
            kind = {"normalizer": NFD, "pre_tokenizer": Whitespace, "decoder": Fuse}[change]
            setattr(tokenizer, change, kind())
        digests.add(built_tokenizer(tokenizer, parts).digest)

    assert len(digests) == 5


def test_vocabularies_are_compared_whatever_files_they_are_from(tmp_path: Path) -> None:
    built = text_files(tmp_path, "bpe")
    sources = {name: find_model(str(tmp_path / name)) for name in ("bpe",)}
    for name in ("bpe_own", "unigram"):
        text_files(tmp_path, name)
        sources[name] = find_model(str(tmp_path / name))
    written = tmp_path / "written"
    shutil.copytree(tmp_path / "bpe", written)
    (written / "tokenizer.json").write_text(built.tokenizer_json)

    assert same_vocabulary(sources["bpe"], sources["bpe"])
    assert same_vocabulary(sources["bpe"], find_model(str(written)))
    assert not same_vocabulary(sources["bpe"], sources["bpe_own"])
    assert not same_vocabulary(find_model(str(written)), sources["unigram"])
