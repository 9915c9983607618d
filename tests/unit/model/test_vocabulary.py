"""Two tokenizers are compared by what they write down, however odd that is."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.text_files import same_vocabulary
from kvchat.model.gguf.file import GgufModel


def saved(directory: Path, content: Any) -> ModelSource:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return ModelSource(directory.name, directory)


def plain(vocab: Any) -> dict[str, Any]:
    return {"model": {"vocab": vocab}, "added_tokens": []}


def test_a_list_of_pieces_and_a_table_of_ids_can_mean_the_same(tmp_path: Path) -> None:
    table = saved(tmp_path / "table", plain({"a": 0, "b": 1}))
    pieces = saved(tmp_path / "pieces", plain([["a", -1.0], ["b", -2.0]]))

    assert same_vocabulary(table, pieces)


@pytest.mark.parametrize(
    "content",
    [{}, {"model": {}}, {"model": []}, plain(3), plain([[]]), {"model": {"vocab": {}}}],
    ids=str,
)
def test_a_draft_without_a_vocabulary_is_refused_in_a_sentence(tmp_path, content):
    """A KeyError once ended the load as a bug."""
    target = saved(tmp_path / "target", plain({"a": 0}))

    with pytest.raises(ModelError, match="no vocabulary that can be compared"):
        same_vocabulary(target, saved(tmp_path / "draft", content))


def test_files_that_have_the_same_tokens_build_no_tokenizer_to_be_compared(tmp_path: Path) -> None:
    """Both tokenizers of a chat's pair were built again: 1.6 s each for Gemma. None can be here."""
    used, unused = [1, 1, 3], [1, 1, 3, 5]

    def file(tokens: list[str], kinds: list[int]) -> ModelSource:
        keys = {"model": "gpt2", "pre": "a rule of tomorrow", "tokens": tokens, "token_type": kinds}
        metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        return ModelSource("m", tmp_path, gguf=GgufModel((), metadata, {}, {}))

    pair = file(["a", "b", "<end>"], used)
    assert same_vocabulary(pair, file(["a", "b", "<end>", "[PAD3]"], unused))
    assert same_vocabulary(pair, saved(tmp_path / "t", plain({"a": 0, "b": 1, "<end>": 2})))
    assert not same_vocabulary(pair, file(["a", "c", "<end>"], used))
    with pytest.raises(ModelError, match="has no vocabulary"):
        same_vocabulary(pair, file([], []))
