"""Reads a checkpoint's files: bounded text files, and the headers of its safetensors files.

Anyone may have written them. Text files are regular files up to a bound, and each fault is a
ModelError of one sentence. Only the weight files named here are mapped, hashed and counted:
transformers is given their tensors and looks for no file itself, so it cannot be led to a pickle.
Imports neither torch nor transformers.
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

from kvchat.core.bounded_files import open_regular, read_bounded
from kvchat.core.errors import ModelError

# The largest known are a tenth of these: 12 MB of index, 40 MB of tokenizer.json.
MAX_CONFIG_BYTES = 8 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 256 << 20


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str | None:
    """Return a UTF-8 file's text, None where there is no file; raises ModelError."""
    try:
        return read_bounded(path, max_bytes).decode()
    except FileNotFoundError:
        if path.is_symlink():
            raise unreadable(path, "it is a link to nothing") from None
        return None
    except UnicodeDecodeError as error:
        raise unreadable(path, "it is not UTF-8 text") from error
    except OSError as error:
        raise unreadable(path, error.strerror) from error


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    """Return the object in a JSON file, None where there is no file; raises ModelError."""
    text = read_text(path, max_bytes)
    return None if text is None else parse_json(path, text)


def parse_json(path: Path, text: str) -> dict[str, Any]:
    """Return the object that `text`, the content of `path`, describes; raises ModelError."""
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
# The library's own bound is 100 MB, of which Python would make a gigabyte of objects.
_MAX_HEADER_BYTES = 32 << 20
_MAX_DIMS = 64
_MOST_PER_BYTE = 2  # the smallest dtype of the format has four bits


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its bytes are `start` to `end`, counted behind the header."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """How many numbers it holds, packed ones counted as the file's dtype counts them."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightHeader:
    """The header of a safetensors file: its bytes, length included, and what they say."""

    raw: bytes
    file_bytes: int
    tensors: tuple[TensorEntry, ...]


def weight_paths(directory: Path, config: dict[str, Any]) -> tuple[Path, ...]:
    """Return the files that hold the weights, in the order they are loaded; () for none.

    Looks where transformers looks: the file config.json names, the single file, the index. Where
    two files hold a tensor of one name, the later counts. Raises ModelError for an index that
    cannot be used, and for anything it names that is no safetensors file of this checkpoint.
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
    """Raise ModelError where one of the files is missing, unreadable or no regular file."""
    for path in paths:
        with _opened(path):
            pass


def read_header(path: Path) -> WeightHeader:
    """Read a safetensors file's header; raises ModelError where the file cannot be what it says."""
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
    """Return what tells a file from any other, and from what it was before it was written to."""
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
    """Return the names an index gives to files, sorted, as transformers sorts them."""
    weight_map = (read_json(index, MAX_INDEX_BYTES) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise unreadable(index, "it maps no tensor to a file")
    return sorted(set(map(str, weight_map.values())))


def _inside(directory: Path, name: object, origin: str, suffix: str) -> Path:
    """Return the path of a file below `directory`; raises ModelError where `name` is anything else.

    The file itself may be a symbolic link, as in the hub's cache; a directory on the way to it may
    not lead out.
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
    """Return what the header says of one tensor; raises ValueError where it cannot be true."""
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if len(shape) > _MAX_DIMS or any(
        type(number) is not int or not 0 <= number < 1 << 63 for number in (start, end, *shape)
    ):
        raise ValueError("a size is no size")
    if not start <= end <= num_bytes or prod(shape) > _MOST_PER_BYTE * (end - start):
        raise ValueError("a tensor is not in the file")
    return TensorEntry(name, shape, start, end)
