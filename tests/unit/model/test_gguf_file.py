"""Headers of GGUF files: read as the package gguf reads them, and never trusted."""

import random
import struct
from contextlib import suppress
from pathlib import Path

import gguf
import pytest

from kvchat.core.errors import ExitCode, ModelError
from kvchat.core.types import NO_MEMORY
from kvchat.model.checkpoint.identity import content_digest, sample_digest
from kvchat.model.checkpoint.local_models import stored_format
from kvchat.model.checkpoint.source import ModelSource, find_model
from kvchat.model.gguf.file import read_gguf, weight_header
from support.checkpoints import tiny_model
from support.gguf_files import write_gguf
from support.soak_sizes import short_and_long

U32, U64 = "<I", "<Q"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny_model("llama"), "Q8_0")


def text(value: str) -> bytes:
    return struct.pack(U64, len(value)) + value.encode()


def header(num_tensors: int, num_fields: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + rest


def array(kind: int, count: int) -> bytes:
    return text("a") + struct.pack("<IIQ", 9, kind, count)


def tensor(dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text("t") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(("number", "name"), [(15, "Q4_K_M"), (0, "F32"), (999, "")])
def test_a_file_says_in_which_mixture_of_formats_it_is(number, name, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(header(0, 1, text("general.file_type") + struct.pack("<II", 4, number)))

    assert stored_format(ModelSource("m", tmp_path, gguf=read_gguf(path))) == name


HOSTILE = {
    "empty": b"",
    "another format": b"PK\x03\x04" + bytes(60),
    "the magic alone": b"GGUF",
    "version 1": header(0, 0, version=1),
    "2**60 tensors": header(1 << 60, 0, bytes(100)),
    "2**60 fields": header(0, 1 << 60, bytes(100)),
    "a text of 2**60 bytes": header(0, 1, struct.pack(U64, 1 << 60) + bytes(100)),
    "an array of 2**60 bytes": header(0, 1, array(0, 1 << 60) + bytes(100)),
    "an array of 2**60 texts": header(0, 1, array(8, 1 << 60) + bytes(100)),
    "an array of 2**23 bytes": header(0, 1, array(0, 1 << 23) + bytes(100)),
    "arrays in an array": header(0, 1, array(9, 1) + bytes(100)),
    "a value of no kind": header(0, 1, text("a") + struct.pack(U32, 99) + bytes(100)),
    "2**31 dimensions": header(1, 0, text("t") + struct.pack(U32, 1 << 31) + bytes(100)),
    "a shape of 2**120": header(1, 0, tensor((1 << 60, 1 << 60)) + bytes(100)),
    "a shape beyond the file": header(1, 0, tensor((1 << 20, 4)) + bytes(1000)),
    "an offset beyond the file": header(1, 0, tensor((4,), offset=1 << 60) + bytes(1000)),
    "half a block": header(1, 0, tensor((33,), kind=8) + bytes(1000)),
    "no rows of blocks": header(1, 0, tensor((32, 0), kind=8) + bytes(1000)),
    "a number in blocks": header(1, 0, tensor((), kind=8) + bytes(1000)),
    "an unknown block format": header(1, 0, tensor((32,), kind=200) + bytes(1000)),
    "a tensor twice": header(2, 0, tensor((4,)) + tensor((4,)) + bytes(1000)),
    "no alignment": header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0) + bytes(100)),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_gives_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    with pytest.raises(
        ModelError, match=r"m\.gguf cannot be read: it|m\.gguf cannot be read: a"
    ) as e:
        find_model(str(path))

    assert e.value.exit_code is ExitCode.MODEL
    assert "\n" not in e.value.message


def test_a_file_cut_off_anywhere_gives_one_sentence(model_file: Path, tmp_path: Path) -> None:
    whole = model_file.read_bytes()
    path = tmp_path / "m.gguf"
    for length in (5, 23, 24, 100, 5000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="cannot be read"):
            find_model(str(path))


@short_and_long(60, 5000)
def test_flipped_bytes_give_a_model_or_one_sentence(size, model_file, tmp_path):
    """Only the header is flipped: what weights are is nothing that could be checked."""
    from kvchat.model.checkpoint.text_files import read_text_files
    from kvchat.model.loader import inspect_model

    whole = model_file.read_bytes()
    end = min(t.start for t in read_gguf(model_file).tensors.values())
    path = tmp_path / "m.gguf"
    generator = random.Random(7)
    for _ in range(size):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(end)] = generator.randrange(256)
        path.write_bytes(content)
        with suppress(ModelError):
            source = find_model(str(path))
            inspect_model(source)
            read_text_files(source)


def test_what_is_read_is_what_the_package_reads(model_file: Path) -> None:
    ours, theirs = read_gguf(model_file), gguf.GGUFReader(model_file)

    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = ours.metadata[name]
            assert (
                list(value) if isinstance(field.contents(), list) else value
            ) == field.contents()
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert (own.start, own.num_bytes, own.kind) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type,
        )
        assert own.shape == tuple(reversed(tensor.shape.tolist()))


def test_a_changed_weight_or_field_is_another_model(model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file.read_bytes())
    source = find_model(str(path))
    before = sample_digest(source), content_digest(source, NO_MEMORY)
    place = max(source.gguf.tensors.values(), key=lambda t: t.num_bytes)
    field_at = model_file.read_bytes().index(b"llama.rope.freq_base") + 26

    for at in (place.start + 3, field_at):
        content = bytearray(model_file.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        changed = find_model(str(path))
        assert sample_digest(changed) != before[0]
        assert content_digest(changed, NO_MEMORY) != before[1]

    path.write_bytes(model_file.read_bytes())
    assert (sample_digest(find_model(str(path))), content_digest(source, NO_MEMORY)) == before


def test_a_known_header_counts_until_its_file_changes(model_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file.read_bytes())
    known = read_gguf(path)
    assert weight_header(path, known) == weight_header(path)

    write_gguf(path, tiny_model("llama", num_hidden_layers=1), lambda name: "F16")

    assert len(weight_header(path).tensors) < len(known.tensors)
    assert weight_header(path, known) == weight_header(path)
