"""Two tokenizers are compared by what they write down, however odd that is."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.text_files import same_vocabulary


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
def test_a_draft_without_a_vocabulary_is_refused_in_a_sentence(
    tmp_path: Path, content: Any
) -> None:
    """A KeyError once ended the load as a bug."""
    target = saved(tmp_path / "target", plain({"a": 0}))

    with pytest.raises(ModelError, match="no vocabulary that can be compared"):
        same_vocabulary(target, saved(tmp_path / "draft", content))
