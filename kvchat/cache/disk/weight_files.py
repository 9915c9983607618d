"""WeightFiles: files of packed weights on the disk, so that a checkpoint is rounded once.

Weights that are rounded are written to a file and used as it is mapped: they are not held beside
it. It has its size from the beginning, and its name only when it is complete. Deletes only files
with names of ours in a directory of ours, and follows no links. Imports no torch.
"""

import errno
import logging
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvchat.cache.disk.model_dirs import WEIGHTS
from kvchat.cache.disk.quota import leaves_free
from kvchat.core.errors import StoreError
from kvchat.core.paths import Lock, open_private, private_directory, try_lock

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.(safetensors|part)")


def weight_directory(store: Path) -> Path:
    """Return where packed weights are, beside the KV in the directory of a store."""
    return store / WEIGHTS


class NewFile:
    """A file that is being written. `memory` is its content, zeros at first."""

    def __init__(self, directory: Path, key: str, descriptor: int, memory: mmap.mmap) -> None:
        self.memory = memory
        self._part, self._path = (directory / f"{key}.{end}" for end in ("part", "safetensors"))
        self._descriptor = descriptor  # open, and so locked, until the file is complete

    def write(self, at: int, data: memoryview) -> None:
        """Write all of `data` at an offset; raises OSError."""
        while data:
            count = os.pwrite(self._descriptor, data, at)
            at, data = at + count, data[count:]

    def finish(self) -> bool:
        """Give the complete file its name; false if that is not possible."""
        try:
            self._part.replace(self._path)
        except OSError as error:  # such as a directory that has taken its name
            _log.warning("packed weights not kept: %s", error)
            self.abandon()
            return False
        os.close(self._descriptor)
        return True

    def abandon(self) -> None:
        """Delete the file; its memory stays as long as it is used."""
        try:
            self._part.unlink(missing_ok=True)
        except OSError as error:
            # It stays locked: another process would empty it, and its memory is in use.
            _log.warning("a part of packed weights stays on the disk: %s", error)
        else:
            os.close(self._descriptor)


class WeightFiles:
    """The files in `directory`, which is made with the first: `limit_bytes` at most in all.

    Several processes may use it. A file of one key is made by one of them, and replaced as a whole.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        self._limit_bytes = limit_bytes

    def find(self, key: str, header: bytes, num_bytes: int) -> mmap.mmap | None:
        """Return a file's content, mapped; changes to it stay in memory. None if there is none.

        One that is not ours, of another size or with another header counts as none.
        """
        path = self.directory / f"{key}.safetensors"
        if not os.path.lexists(path) or not self._is_own_directory():
            return None
        try:
            descriptor = open_private(path, os.O_RDONLY, has_one_name=True)
        except StoreError as error:
            _log.warning("packed weights not used: %s", error)
            return None
        try:
            if os.fstat(descriptor).st_size != num_bytes:
                return None
            with suppress(OSError):
                os.utime(descriptor)  # files are deleted in the order of their last use
            memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            _log.warning("packed weights not used: %s", error)
            return None
        finally:
            os.close(descriptor)
        return memory if memory[: len(header)] == header else None

    def begin(self, key: str, num_bytes: int) -> NewFile | None:
        """Begin a file, for which others are deleted; None where it has no place.

        Also None while another live process makes this file. Deletes leftovers of dead processes
        first.
        """
        if not self._limit_bytes:
            return None
        try:
            private_directory(self.directory)
            if not self._is_own_directory():
                _log.warning("packed weights not kept: %s is a link", self.directory)
                return None
            self._delete_left_parts()
            if num_bytes > self._limit_bytes or not self._make_room(num_bytes):
                _log.info("packed weights not kept: they take %d bytes", num_bytes)
                return None
            return self._open_part(key, num_bytes)
        except (OSError, StoreError) as error:
            _log.warning("packed weights not kept: %s", error)
            return None

    def _open_part(self, key: str, num_bytes: int) -> NewFile | None:
        flags, path = os.O_RDWR | os.O_CREAT, self.directory / f"{key}.part"
        descriptor = open_private(path, flags, has_one_name=True)
        try:
            # Another process may have completed the file meanwhile: then it stays as it is.
            if not (_is_locked_for_us(descriptor) and _is_named(descriptor, path)):
                os.close(descriptor)
                return None
            os.ftruncate(descriptor, 0)  # leftovers of a dead process
            # A disk that is full is found before anything is rounded.
            _allocate(descriptor, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError:  # such as a full disk
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return NewFile(self.directory, key, descriptor, memory)

    def _make_room(self, num_bytes: int) -> bool:
        """Delete the files used longest ago until `num_bytes` more fit; return whether they do."""
        self._shrink(num_bytes)
        fits = self.num_bytes() + num_bytes <= self._limit_bytes
        return fits and leaves_free(self.directory, num_bytes, None)

    def _shrink(self, num_bytes: int) -> int:
        """Delete the files used longest ago while the rest and `num_bytes` more exceed the limit.

        Returns the number of bytes freed.
        """
        found = sorted(self._files(), key=lambda file: file[1].st_mtime)
        excess = sum(info.st_size for _, info in found) + num_bytes - self._limit_bytes
        freed = 0
        for path, info in found:
            if freed >= excess:
                break
            freed += info.st_size if _is_deleted(path) else 0
        return freed

    def collect(self) -> int:
        """Enforce the limit, and delete leftovers of dead processes; return the bytes freed."""
        return self._delete_left_parts() + self._shrink(0)

    def _delete_left_parts(self) -> int:
        """Delete files that no process goes on making; return the bytes freed."""
        parts = [(path, info) for path, info in self._files() if path.suffix == ".part"]
        return sum(info.st_size for path, info in parts if _is_deleted(path))

    def num_bytes(self) -> int:
        """Return the bytes that all files take."""
        return sum(info.st_size for _, info in self._files())

    def clear(self) -> int:
        """Delete all files that no process is making; return the number of bytes freed."""
        freed = sum(info.st_size for path, info in self._files() if _is_deleted(path))
        with suppress(OSError):  # where others have put something
            self.directory.rmdir()
        return freed

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files of ours; none where the directory is a link or another user's."""
        with suppress(OSError):
            if not self._is_own_directory():
                return
            for path in list(self.directory.iterdir()):
                with suppress(FileNotFoundError):
                    info = path.lstat()
                    if _NAME.fullmatch(path.name) and stat.S_ISREG(info.st_mode):
                        yield path, info

    def _is_own_directory(self) -> bool:
        """Whether the directory is there, is no link and belongs to this user."""
        with suppress(OSError):
            home = self.directory.lstat()
            return stat.S_ISDIR(home.st_mode) and home.st_uid == os.getuid()
        return False


def _is_deleted(path: Path) -> bool:
    """Delete a file unless a process is making it; return whether it is gone."""
    try:
        descriptor = open_private(path, os.O_RDWR)
    except StoreError:
        return False
    try:
        if path.suffix == ".part" and not (
            _is_locked_for_us(descriptor) and _is_named(descriptor, path)
        ):
            return False
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Give an empty file its length and, where the system can, its place on the disk."""
    os.ftruncate(descriptor, num_bytes)
    if hasattr(os, "posix_fallocate"):  # macOS has none
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # nor have some file systems
                raise


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _is_locked_for_us(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed; return false if another process has, or may have:
    where there are no locks, nothing is kept.
    """
    return try_lock(descriptor) is Lock.OURS
