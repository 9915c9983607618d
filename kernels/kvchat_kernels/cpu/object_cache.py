"""Compiled kernels on the disk, so that a process compiles none that an earlier one compiled.

Machine code is loaded only from files that are this user's own, in a directory that is closed to
all others, and whose digest is right. Anything else is a miss, and the kernel is compiled.
"""

import hashlib
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

KERNEL_CACHE_VARIABLE = "KVCHAT_KERNEL_CACHE"
_SAVES_NOTHING = "_KVCHAT_SAVES_NO_KERNELS"
_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 20


class ObjectCache:
    """Object files by name in `directory`, which is made when the first is saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, name: str) -> bytes | None:
        """Return what was saved under a name, None if it is not there or not ours or damaged."""
        try:
            if not _is_private(os.lstat(self.directory)):
                return None
            descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                if not _is_private(os.fstat(file.fileno())):
                    return None
                content = file.read(_MOST_BYTES)
        except OSError:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return code if hashlib.sha256(code).digest() == digest else None

    def save(self, name: str, code: bytes) -> None:
        """Save object code; without a place for it, or after `save_nothing`, nothing is saved."""
        if _SAVES_NOTHING in os.environ:
            return
        try:
            _make_private(self.directory)
            if not _is_private(os.lstat(self.directory)):
                return
            descriptor, path = tempfile.mkstemp(dir=self.directory, prefix=".")
        except OSError:
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(path, self.directory / name)
        except OSError:  # a full disk
            Path(path).unlink(missing_ok=True)


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
