"""The digest of the weights: it changes with what a model computes, and with nothing else."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from kvchat.core.errors import ModelError
from kvchat.core.types import NO_MEMORY, Fact
from kvchat.model.checkpoint.identity import content_digest, sample_digest
from kvchat.model.checkpoint.source import ModelSource, find_model
from support.checkpoints import save_checkpoint, tiny_model
from support.fact_memory import FactMemory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("original"), tiny_model("llama"))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "m"))


def digest(directory: Path, name: str = "m") -> str:
    return sample_digest(ModelSource(name, directory))


def header_of(path: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return length, json.loads(data[8 : 8 + length])


def test_the_same_files_have_the_same_digest_wherever_they_lie(original, checkpoint):
    assert digest(original) == digest(checkpoint, name="other")
    assert digest(original).startswith("s1-")
    assert len(digest(original)) == 35

    os.utime(checkpoint / "model.safetensors", (0, 0))
    (checkpoint / "README.md").write_text("new")

    assert digest(original) == digest(checkpoint)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_changed_byte_at_either_end_or_the_middle_of_any_tensor_changes_it(
    where: str, original: Path, checkpoint: Path
) -> None:
    path = checkpoint / "model.safetensors"
    length, header = header_of(path)
    data = bytearray(path.read_bytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        offset = {"first": start, "middle": (start + end) // 2, "last": end - 1}[where]
        data[8 + length + offset] ^= 1
        path.write_bytes(data)
        assert digest(checkpoint) != digest(original), name
        data[8 + length + offset] ^= 1
    path.write_bytes(data)
    assert digest(checkpoint) == digest(original)


def test_names_shapes_and_configuration_count_too(original: Path, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"up_proj", b"pu_proj"))
    assert digest(checkpoint) != digest(original)

    path.write_bytes(data)
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    assert digest(checkpoint) != digest(original)


def test_a_file_that_is_not_loaded_does_not_count(original: Path, checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "consolidated.safetensors")

    assert digest(checkpoint) == digest(original)


def with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        b"\xff" * 100,
        struct.pack("<Q", 10) + b"not json!!",
        with_header([]),
        with_header({"a": 5}),
        with_header({"a": {}}),
        with_header({"a": {"data_offsets": "xy"}}),
        with_header({"a": {"data_offsets": [0]}}),
        with_header({"a": {"data_offsets": [-99999, 4]}}),
        with_header({"a": {"data_offsets": [None, 4]}}),
    ],
    ids=lambda content: str(content[:40]),
)
def test_what_is_no_safetensors_file_is_told(content: bytes, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)

    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: .* safetensors file"):
        digest(checkpoint)


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
    before = content_digest(source, NO_MEMORY)

    flip_last_byte(source.weight_files[0])

    assert content_digest(source, NO_MEMORY) != before


def test_the_configuration_counts(source: ModelSource) -> None:
    before = content_digest(source, NO_MEMORY)
    path = source.directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5.0}))

    assert content_digest(source, NO_MEMORY) != before


def test_a_copy_elsewhere_is_the_same_model(source, tmp_path, memory):
    source.directory.rename(tmp_path / "moved")

    moved = find_model(str(tmp_path / "moved"))

    assert content_digest(moved, NO_MEMORY) == content_digest(moved, memory)


def test_an_unchanged_file_is_not_read_again(source: ModelSource, memory: FactMemory) -> None:
    """Shown by a forged memory: what is remembered is believed while the file is the same."""
    true = content_digest(source, memory)
    [(kind, mark)] = memory.texts
    memory.set(kind, mark, "0" * 32)

    assert content_digest(source, memory) != true

    flip_last_byte(source.weight_files[0])
    flip_last_byte(source.weight_files[0])

    assert content_digest(source, memory) == true


@pytest.mark.parametrize("fact", [[1], None, 5, {"a": {}}, "", "0" * 31, "G" * 32], ids=str)
def test_a_damaged_memory_is_no_memory(source: ModelSource, memory: FactMemory, fact: Fact) -> None:
    true = content_digest(source, memory)
    for key in memory.texts:
        memory.set(*key, fact)

    assert content_digest(source, memory) == true
    assert content_digest(source, memory) == true
