"""The digest of weights: every byte counts, names do not, and files are read once."""

import json
import os
from pathlib import Path

import pytest

from kvchat.model.content_digest import content_digest
from kvchat.model.source import ModelSource, find_model
from support.checkpoints import save_checkpoint, tiny_model


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    save_checkpoint(tmp_path / "model", tiny_model("llama"))
    return find_model(str(tmp_path / "model"))


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def test_one_changed_bit_makes_another_digest(source: ModelSource) -> None:
    before = content_digest(source, None)

    flip_last_byte(source.weight_files[0])

    assert content_digest(source, None) != before


def test_the_configuration_counts(source: ModelSource) -> None:
    before = content_digest(source, None)
    path = source.directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5.0}))

    assert content_digest(source, None) != before


def test_a_copy_elsewhere_is_the_same_model(source: ModelSource, tmp_path: Path) -> None:
    source.directory.rename(tmp_path / "moved")

    moved = find_model(str(tmp_path / "moved"))

    assert content_digest(moved, None) == content_digest(moved, tmp_path / "state")


def test_an_unchanged_file_is_not_read_again(source: ModelSource, tmp_path: Path) -> None:
    """Shown by a forged memory: what is remembered is believed while the file is the same."""
    true = content_digest(source, tmp_path)
    memory = tmp_path / "weights.json"
    [mark] = json.loads(memory.read_text())
    memory.write_text(json.dumps({mark: "0" * 32}))

    assert content_digest(source, tmp_path) != true

    flip_last_byte(source.weight_files[0])
    flip_last_byte(source.weight_files[0])

    assert content_digest(source, tmp_path) == true


@pytest.mark.parametrize("content", ["", "[1]", "{", "null", '{"a": {}}'])
def test_a_damaged_memory_is_no_memory(source: ModelSource, tmp_path: Path, content: str) -> None:
    true = content_digest(source, None)
    (tmp_path / "weights.json").write_text(content)

    assert content_digest(source, tmp_path) == true
    assert content_digest(source, tmp_path) == true


def test_the_memory_is_private_and_a_place_that_cannot_be_written_does_no_harm(
    source: ModelSource, tmp_path: Path
) -> None:
    content_digest(source, tmp_path)

    assert (tmp_path / "weights.json").stat().st_mode & 0o777 == 0o600
    assert content_digest(source, Path("/proc/nowhere")) == content_digest(source, None)
