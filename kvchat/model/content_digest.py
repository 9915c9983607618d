"""The digest of all of a checkpoint's weights, computed once and remembered by file identity.

Reading every byte takes seconds a large model; a file of the same inode, size and time of change is
taken to be the file it was. Knows files and digests; knows no tensor.
"""

import hashlib
import json
import logging
import mmap
import os
from pathlib import Path

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory
from kvchat.model.source import ModelSource

_CHUNK_BYTES = 1 << 24
_MAX_REMEMBERED = 1000
_MEMORY_NAME = "weights.json"

_log = logging.getLogger(__name__)


def content_digest(source: ModelSource, state_directory: Path | None) -> str:
    """Return 32 hex digits over config and weights, whatever the files are called.

    Digests of files are remembered in `state_directory`; None remembers none. Raises OSError where
    a file cannot be read.
    """
    known = _read_memory(state_directory)
    digests = {}
    for path in source.weight_files:
        mark = remembered_as(path)
        digests[mark] = known.get(mark) or _file_digest(path)
    if digests.keys() - known.keys():
        _write_memory(state_directory, known | digests)
    whole = hashlib.blake2b((source.directory / "config.json").read_bytes(), digest_size=16)
    for digest in digests.values():
        whole.update(digest.encode())
    return whole.hexdigest()


def remembered_as(path: Path) -> str:
    """Return what tells a file from any other, and from what it was before it was written to."""
    info = path.stat()
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"


def _file_digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for start in range(0, len(content), _CHUNK_BYTES):
            digest.update(content[start : start + _CHUNK_BYTES])
    return digest.hexdigest()


def _read_memory(directory: Path | None) -> dict[str, str]:
    if directory is None:
        return {}
    try:
        descriptor = open_private(directory / _MEMORY_NAME, os.O_RDONLY)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            entries = json.load(file)
        return {str(mark): str(digest) for mark, digest in entries.items()}
    except (StoreError, OSError, ValueError, AttributeError):
        return {}


def _write_memory(directory: Path | None, entries: dict[str, str]) -> None:
    """Keep the newest entries; a directory that cannot be written costs time, not the chat."""
    if directory is None:
        return
    fresh = directory / f"{_MEMORY_NAME}.{os.getpid()}"
    try:
        private_directory(directory)
        descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(dict(list(entries.items())[-_MAX_REMEMBERED:]), file)
        fresh.replace(directory / _MEMORY_NAME)
    except (StoreError, OSError) as error:
        _log.warning("digests of weights not kept: %s", error)
