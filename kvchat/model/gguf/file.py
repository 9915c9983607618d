"""Reads the headers of GGUF files: metadata and the place of every tensor, no weights.

The files are untrusted. Every count and length is checked against the file's size and the limits
here before anything is allocated. The package gguf has a reader too, which takes a length for
granted: an array that claims 2**60 entries keeps it busy for ever. It also makes two arrays of
numpy for each token of a vocabulary. Its table of block formats is used here.
"""

import mmap
import os
import re
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from kvchat.core.paths import open_regular
from kvchat.model.files.checkpoint_files import (
    TensorEntry,
    WeightHeader,
    mark,
    read_header,
    unreadable,
)

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# About ten times what the largest known files have.
_MAX_HEADER_BYTES = 256 << 20
_MAX_FIELDS, _MAX_TENSORS, _MAX_ENTRIES, _MAX_FILES = 1 << 16, 1 << 18, 1 << 24, 1000
_MAX_DIMS = 4
_MAX_SIZE = 1 << 62
_FLOAT32, _MAX_SMALL_BYTES = 0, 1 << 16
_STRING, _ARRAY = 8, 9
# The codes of the format's scalar types, as struct spells them.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its blocks are the bytes [start, start + num_bytes) of the file `path`.

    `shape` is in torch's order. `kind` is the number of its block format in the package gguf.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufModel:
    """The headers of a model's GGUF files. `metadata` is the first file's, by the format's keys.

    Strings are str, arrays of strings lists of str, other arrays `array`. `marks` are the files'
    marks from before they were read, see `checkpoint_files.mark`.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)
    marks: dict[Path, str] = field(repr=False)

    @property
    def architecture(self) -> str:
        """The architecture by llama.cpp's name, "" if the file does not say."""
        name = self.metadata.get("general.architecture")
        return name if isinstance(name, str) else ""

    @property
    def file_type(self) -> str:
        """The mixture of block formats by llama.cpp's name, such as Q4_K_M; "" if it is unknown."""
        from gguf.constants import LlamaFileType

        try:
            name = LlamaFileType(self.metadata.get("general.file_type", -1)).name
        except ValueError:
            return ""
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")

    def floats(self, name: str) -> list[float] | None:
        """Return a small tensor of float32 numbers, such as rope factors; None if it is missing."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.num_bytes > _MAX_SMALL_BYTES:
            return None
        if tensor.kind != _FLOAT32:
            raise unreadable(tensor.path, f"{name} is not in float32")
        try:
            descriptor = open_regular(tensor.path)
            try:
                return array("f", os.pread(descriptor, tensor.num_bytes, tensor.start)).tolist()
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise unreadable(tensor.path, "it changed meanwhile") from error

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata under `key`, after the architecture's name and a full stop."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> GgufModel:
    """Read the header of a GGUF file, and of the other parts if it is one of several.

    Raises ModelError if one is missing, damaged or shorter than its tensors.
    """
    paths = _parts(path)
    parts = [_read_part(part) for part in paths]
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if tensors.keys() & part.tensors.keys():
            raise unreadable(path, "two of its parts hold the same tensor")
        tensors |= part.tensors
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors) or parts[0].metadata.get("split.count", 1) not in (0, len(parts)):
        raise unreadable(path, "it is one of several parts, and they do not belong together")
    marks = {name: value for part in parts for name, value in part.marks.items()}
    return GgufModel(tuple(paths), parts[0].metadata, tensors, marks)


def is_gguf(path: Path) -> bool:
    """Return whether a regular file starts as a GGUF file does; False if it cannot be read."""
    try:
        return _starts_so(path)
    except OSError:
        return False


def _starts_so(path: Path) -> bool:
    descriptor = open_regular(path)
    try:
        return os.pread(descriptor, len(MAGIC), 0) == MAGIC
    finally:
        os.close(descriptor)


def weight_header(path: Path, known: GgufModel | None = None) -> WeightHeader:
    """Return the header of a GGUF or safetensors file; raises ModelError if it is invalid.

    A file that has not changed since `known` was read is not parsed again.
    """
    try:
        if known is not None and known.marks.get(path) == mark(path):
            return _as_weight_header(path, known)
        return _as_weight_header(path, _read_part(path)) if _starts_so(path) else read_header(path)
    except OSError as error:
        raise unreadable(path, error.strerror) from error


def _as_weight_header(path: Path, model: GgufModel) -> WeightHeader:
    """Return the header of one of a model's files in the form that safetensors files have."""
    tensors = [tensor for tensor in model.tensors.values() if tensor.path == path]
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        # The first of several parts may hold no tensor at all, and all of the metadata.
        end = min((t.start for t in tensors), default=min(size, _MAX_HEADER_BYTES))
        raw = os.pread(descriptor, end, 0)
    finally:
        os.close(descriptor)
    entries = (
        TensorEntry(t.name, t.shape, t.start - len(raw), t.start - len(raw) + t.num_bytes)
        for t in tensors
    )
    return WeightHeader(raw, size, tuple(entries))


def _parts(path: Path) -> list[Path]:
    """Return the files of a model in order, by the name of any of them."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    count = int(found[2])
    if not 1 <= int(found[1]) <= count <= _MAX_FILES:
        raise unreadable(path, "its name says that it is a part of no possible number of parts")
    stem = path.name[: found.start()]
    return [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def _read_part(path: Path) -> GgufModel:
    try:
        found = mark(path)
        descriptor = open_regular(path)
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
            metadata, tensors = _Header(content, path).read()
    except (ValueError, KeyError, struct.error) as error:
        # UnicodeDecodeError is a ValueError, and so is an empty file's.
        reason = error.args[0] if type(error) is _Damaged else "it is not a complete GGUF file"
        raise unreadable(path, reason) from error
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    finally:
        os.close(descriptor)
    return GgufModel((path,), metadata, {tensor.name: tensor for tensor in tensors}, {path: found})


class _Damaged(ValueError):
    """What is wrong with a file, to complete "PATH cannot be read: ..."."""


class _Header:
    """Reads one file's header from `content`; raises ValueError, KeyError or struct.error."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content, self._path = content, path
        self._at, self._num_entries = 0, 0
        self._readers: dict[int, Callable[[], Any]] = {
            code: partial(self._scalar, struct.Struct(f"<{spelling}"))
            for code, spelling in _SCALARS.items()
        }
        self._readers[_STRING] = self._string
        self._readers[_ARRAY] = self._array

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        """Return the metadata and the tensors."""
        if self._content[: len(MAGIC)] != MAGIC:
            raise _Damaged("it is not a GGUF file")
        self._at = len(MAGIC)
        version, num_tensors, num_fields = self._numbers("<IQQ")
        if version not in _VERSIONS:
            raise _Damaged(f"its GGUF version is not {_VERSIONS[0]} or {_VERSIONS[1]}")
        if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
            raise _Damaged("it claims an impossible number of tensors or fields")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            (code,) = self._numbers("<I")
            metadata[key] = self._readers[code]()
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise _Damaged("its alignment is no possible one")
        return metadata, self._placed(entries, -(-self._at // alignment) * alignment)

    def _placed(
        self, entries: Sequence[tuple[str, tuple[int, ...], int, int]], data_start: int
    ) -> list[GgufTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        tensors, names = [], set()
        for name, shape, code, offset in entries:
            try:
                block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(code)]
            except (ValueError, KeyError):
                raise _Damaged(f"a tensor has the unknown block format {code}") from None
            num_bytes = prod(shape) // block_size * block_bytes
            is_possible = 0 < prod(shape) < _MAX_SIZE and (shape or (1,))[-1] % block_size == 0
            if name in names or not is_possible:
                raise _Damaged("a tensor has an impossible shape, or is there twice")
            if data_start + offset + num_bytes > len(self._content):
                raise _Damaged("it ends before its last tensor does")
            names.add(name)
            start = data_start + offset
            tensors.append(GgufTensor(name, shape, code, self._path, start, num_bytes))
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._numbers("<I")
        if num_dims > _MAX_DIMS:
            raise _Damaged(f"a tensor has more than {_MAX_DIMS} dimensions")
        *dims, kind, offset = self._numbers(f"<{num_dims}QIQ")
        return name, tuple(reversed(dims)), kind, offset

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._content, self._at)
        self._at += struct.calcsize(layout)
        if self._at > _MAX_HEADER_BYTES:
            raise _Damaged("its header is too long")
        return values

    def _scalar(self, layout: struct.Struct) -> Any:
        return self._numbers(layout.format)[0]

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > min(len(self._content), _MAX_HEADER_BYTES):
            raise _Damaged("a text or array is longer than its file")
        piece = self._content[self._at : end]
        self._at = end
        return piece

    def _string(self) -> str:
        (length,) = self._numbers("<Q")
        # Some vocabularies hold tokens that are no text. They must not make a file unreadable.
        return self._take(length).decode("utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """Return many strings: `_string` in one loop, for vocabularies of half a million."""
        content, at, read_length = self._content, self._at, struct.Struct("<Q").unpack_from
        limit = min(len(content), _MAX_HEADER_BYTES)
        strings = []
        for _ in range(count):
            (length,) = read_length(content, at)
            end = at + 8 + length
            if end > limit:
                raise _Damaged("a text or array is longer than its file")
            strings.append(content[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._at = at
        return strings

    def _array(self) -> Any:
        code, count = self._numbers("<IQ")
        self._num_entries += count
        if self._num_entries > _MAX_ENTRIES:
            raise _Damaged("its arrays have an impossible number of entries")
        if code == _STRING:
            return self._strings(count)
        spelling = _SCALARS[code].replace("?", "B")
        values = array(spelling)
        values.frombytes(self._take(count * values.itemsize))
        return values
