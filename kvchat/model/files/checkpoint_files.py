"""Reads a checkpoint's files: bounded text files, and the headers of its safetensors files.

The files are untrusted. A text file must be a regular file below a size limit, and each fault
raises a ModelError of one sentence. Only the weight files found here are mapped, hashed and
counted. transformers receives their tensors and opens no weight file itself, so no checkpoint can
make it open a pickle. Imports neither torch nor transformers, so that errors appear fast.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from kvchat.core.errors import ModelError
from kvchat.core.paths import open_regular, read_bounded

# About ten times the largest known files: 12 MB for an index, 40 MB for tokenizer.json.
MAX_CONFIG_BYTES = 8 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 256 << 20


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str | None:
    """Return a UTF-8 file's text, or None if it does not exist.

    Raises ModelError if it is larger than `max_bytes`, is not a regular file or is not UTF-8.
    """
    try:
        return read_bounded(path, max_bytes).decode("utf-8-sig")  # some editors write a mark
    except FileNotFoundError:
        if path.is_symlink():
            raise unreadable(path, "it is a link to nothing") from None
        return None
    except UnicodeDecodeError as error:
        raise unreadable(path, "it is not UTF-8 text") from error
    except OSError as error:
        raise unreadable(path, error.strerror) from error


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if it does not exist; raises ModelError."""
    text = read_text(path, max_bytes)
    return None if text is None else parse_json(path, text)


def parse_json(path: Path, text: str) -> dict[str, Any]:
    """Parse `text`, the content of `path`, as a JSON object; raises ModelError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, "it is not JSON") from error
    if not isinstance(content, dict):
        raise unreadable(path, "it is not a JSON object")
    return content


def unreadable(path: Path, reason: str | None) -> ModelError:
    """Return the error that says why a file of a checkpoint cannot be used."""
    return ModelError(f"{path} cannot be read: {reason}.", "Is the download complete?")


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
# safetensors itself allows 100 MB, which would become about 1 GB of Python objects.
_MAX_HEADER_BYTES = 32 << 20
_MAX_DIMS = 64
_MOST_PER_BYTE = 2  # elements; the smallest dtype of the format has four bits


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file. Its bytes are [start, end), counted from the end of the header."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """The number of elements of the file's dtype; a packed value counts as the file states."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightHeader:
    """A safetensors header: its raw bytes (with the 8-byte length), file size and tensors."""

    raw: bytes
    file_bytes: int
    tensors: tuple[TensorEntry, ...]


def weight_paths(directory: Path, config: dict[str, Any]) -> tuple[Path, ...]:
    """Return the weight files in loading order; () if there are none.

    Looks where transformers looks: the file config.json names, the single file, the index. If two
    files hold a tensor of the same name, the later file wins. Raises ModelError for an unusable
    index, and for a named file that is not a safetensors file inside this directory.
    """
    for name in (config.get("transformers_weights"), SINGLE, INDEX):
        if name is None or (name in (SINGLE, INDEX) and not os.path.lexists(directory / name)):
            continue
        if str(name).endswith(_INDEX_SUFFIX):
            names = _indexed(_inside(directory, name, "config.json", _INDEX_SUFFIX))
            return tuple(_inside(directory, name, INDEX, _SUFFIX) for name in names)
        return (_inside(directory, name, "config.json", _SUFFIX),)
    return ()


def check_weights(paths: tuple[Path, ...]) -> None:
    """Raise ModelError if a file is missing, unreadable or not a regular file."""
    for path in paths:
        with _opened(path):
            pass


def read_header(path: Path) -> WeightHeader:
    """Read a safetensors file's header; raises ModelError if it is invalid or too short.

    `weight_header` of `gguf/file.py` reads the header of any weight file.
    """
    with _opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        try:
            start = os.pread(descriptor, 8, 0)
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("the header is too long")
            raw = os.pread(descriptor, length, 8)
            content = json.loads(raw)
            entries = ((n, entry) for n, entry in content.items() if n != "__metadata__")
            tensors = tuple(_entry(n, entry, size - 8 - length) for n, entry in entries)
        except OSError as error:
            raise unreadable(path, error.strerror) from error
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            struct.error,
        ) as error:
            raise unreadable(path, "it is not a complete safetensors file") from error
    return WeightHeader(start + raw, size, tensors)


def mark(path: Path) -> str:
    """Return device, inode, size and change times of a file: a new value after every write."""
    info = path.stat()
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _indexed(index: Path) -> list[str]:
    """Return the file names in an index, in the order transformers uses (sorted)."""
    weight_map = (read_json(index, MAX_INDEX_BYTES) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise unreadable(index, "it maps no tensor to a file")
    return sorted(set(map(str, weight_map.values())))


def _inside(directory: Path, name: object, origin: str, suffix: str) -> Path:
    """Return the path of `name` inside `directory`; raises ModelError if it is outside.

    The file itself may be a symbolic link, as in the hub's cache. A directory on its path must not
    be a link that leads out of `directory`.
    """
    path = PurePosixPath(str(name))
    if not str(name).endswith(suffix):
        raise ModelError(
            f"{origin} of {directory} names {name}, which is no *{suffix} file.",
            "kvchat opens no weights of another kind.",
        )
    try:
        home = os.path.realpath(directory)
        parent = os.path.realpath(directory / path.parent)
    except ValueError:  # a NUL character, or half of a surrogate pair
        home, parent = "/", ""
    if path.is_absolute() or ".." in path.parts or not PurePosixPath(parent).is_relative_to(home):
        raise ModelError(
            f"{origin} of {directory} names {name}, which is no path inside that directory.",
            "Put all weights into the model's directory.",
        )
    return directory / path


def _entry(name: str, entry: dict[str, Any], num_bytes: int) -> TensorEntry:
    """Return one tensor's entry; raises ValueError if its shape and offsets are impossible."""
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if len(shape) > _MAX_DIMS or any(
        type(number) is not int or not 0 <= number < 1 << 63 for number in (start, end, *shape)
    ):
        raise ValueError("a size is no size")
    if not start <= end <= num_bytes or prod(shape) > _MOST_PER_BYTE * (end - start):
        raise ValueError("a tensor is not in the file")
    return TensorEntry(name, shape, start, end)
