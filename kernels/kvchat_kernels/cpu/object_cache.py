"""Compiled kernels on the disk, so that a process compiles none that an earlier one compiled.

Machine code is loaded only from files that are this user's own, in a directory that is closed to
all others, and whose digest is right. Anything else is a miss, and the kernel is compiled.

A process that saves a file also deletes old ones, once: those that were not used for 30 days, and
those of other sources, another LLVM or another processor after two days. Two versions that are used
by turns keep their files. A verdict on a kernel (`races.py`) is a file here too, because it is
worth as much as the kernel and ends with it.
"""

import errno
import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

KERNEL_CACHE_VARIABLE = "KVCHAT_KERNEL_CACHE"
_SAVES_NOTHING = "_KVCHAT_SAVES_NO_KERNELS"
_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 20
_DAY_S = 86400.0
_UNUSED_S, _UNUSED_OF_OTHERS_S = 30 * _DAY_S, 2 * _DAY_S
# A file that a process is writing has such a name; no process writes one for so long.
_NEW_PREFIX, _LONGEST_WRITE_S = ".kvchat-", 3600.0
_NAME = re.compile(r"(?:([0-9a-f]{16})-)?[\w.+-]+-[0-9a-f]{32}(?:\.o)?")


def file_name(version: str, name: str, digest: str) -> str:
    """Return the name of a file: `version` has 16 hexadecimal digits, `digest` 32."""
    return f"{version}-{name.replace(' ', '-')}-{digest}"


class ObjectCache:
    """Object files by name in `directory`, which is made when the first is saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._is_pruned = False

    def load(self, name: str) -> bytes | None:
        """Return what was saved under a name, None if it is not there or not ours or damaged."""
        try:
            if not _is_private(os.lstat(self.directory)):
                return None
            descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                info = os.fstat(file.fileno())
                if not _is_private(info):
                    return None
                content = file.read(_MOST_BYTES)
                _note_use(file.fileno(), info)
        except OSError:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return code if hashlib.sha256(code).digest() == digest else None

    def save(self, name: str, code: bytes) -> None:
        """Save object code; without a place for it, or after `save_nothing`, nothing is saved.

        Nor is it while another process deletes old files, which is soon over.
        """
        if _SAVES_NOTHING in os.environ:
            return
        with suppress(OSError):
            _make_private(self.directory)
            if not _is_private(os.lstat(self.directory)):
                return
            with self._locked(fcntl.LOCK_SH):
                self._write(name, code)
            if not self._is_pruned:
                self._is_pruned = True
                self.prune(name[:16])

    def prune(self, version: str, now_s: float | None = None) -> None:
        """Delete the files that are old at `now_s` (None: now); those of `version` stay longer.

        Deletes none while another process saves one, and only files of this user that have a name
        and a digest as this class gives them. Raises OSError.
        """
        now_s = time.time() if now_s is None else now_s
        with self._locked(fcntl.LOCK_EX):
            for entry in self._entries():
                match = _NAME.fullmatch(entry.name)
                unused_s = now_s - entry.stat(follow_symlinks=False).st_mtime
                if match is None:
                    is_old = unused_s > _LONGEST_WRITE_S  # of a process that was killed
                else:
                    is_own = match[1] == version
                    is_old = unused_s > (_UNUSED_S if is_own else _UNUSED_OF_OTHERS_S)
                if is_old and (match is None or self.load(entry.name) is not None):
                    os.unlink(entry.path)

    def num_bytes(self) -> int:
        """Return what all files take."""
        with suppress(OSError):
            return sum(entry.stat(follow_symlinks=False).st_size for entry in self._entries())
        return 0

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files of this user that have names of ours; raises OSError."""
        if not _is_private(os.lstat(self.directory)):
            return
        with os.scandir(self.directory) as entries:
            for entry in list(entries):
                if not (_NAME.fullmatch(entry.name) or entry.name.startswith(_NEW_PREFIX)):
                    continue
                with suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid():
                        yield entry

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Lock the directory, for all that save or for one that deletes.

        Raises OSError if another process has locked it otherwise. Where there are no locks, it
        raises for one that deletes.
        """
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except OSError as error:
                is_held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
                if is_held or kind == fcntl.LOCK_EX:
                    raise
            yield
        finally:
            os.close(descriptor)

    def _write(self, name: str, code: bytes) -> None:
        descriptor, path = tempfile.mkstemp(dir=self.directory, prefix=_NEW_PREFIX)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(path, self.directory / name)
        except OSError:  # a full disk
            Path(path).unlink(missing_ok=True)


def _note_use(descriptor: int, info: os.stat_result) -> None:
    """Note that a file is used today, unless this process saves nothing."""
    if time.time() - info.st_mtime > _DAY_S and _SAVES_NOTHING not in os.environ:
        with suppress(OSError):
            os.utime(descriptor)


def save_nothing() -> None:
    """Let this process and those that it starts save no compiled code: it leaves nothing behind."""
    os.environ[_SAVES_NOTHING] = "1"


def _make_private(directory: Path) -> None:
    """Make a directory and its missing parents, closed to all others; raises OSError.

    Python makes missing parents with the rights that the umask leaves to others. An existing
    directory keeps its rights, because the user may have named it.
    """
    for path in reversed((directory, *directory.parents)):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file is this user's and no other user may write it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def object_cache() -> ObjectCache:
    """Return this user's cache: `kvchat/kernels` below the user's directory for caches.

    The variable names another directory.
    """
    chosen = os.environ.get(KERNEL_CACHE_VARIABLE)
    if chosen:
        return ObjectCache(Path(chosen))
    own = os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own and os.path.isabs(own) else Path.home() / ".cache"
    return ObjectCache(root / "kvchat" / "kernels")
