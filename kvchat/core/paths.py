"""Private directories and files: 0700 and 0600 whatever the umask, symlinks refused.

Knows permissions, ownership and what `~` means. Does not know what is stored, or where the user's
directories are.
"""

import errno
import os
import stat
from pathlib import Path

from kvchat.core.errors import StoreError, UsageError


def user_path(text: str) -> Path:
    """Return the path that a user's text means, `~` expanded; UsageError where it means none."""
    if "\0" in text:
        raise UsageError("A path cannot hold a NUL character.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text} is in no home directory known here.") from error


def private_directory(path: Path) -> Path:
    """Create `path`, and what leads to it, with mode 0700 where they do not exist yet; return it.

    A directory that exists keeps its mode: it may be one the user chose and shares on purpose.
    Raises StoreError if it cannot be created or belongs to somebody else.
    """
    try:
        missing = [directory for directory in (path, *path.parents) if not directory.is_dir()]
        for directory in reversed(missing):
            directory.mkdir(mode=0o700, exist_ok=True)
            directory.chmod(0o700)
        if path.stat().st_uid != os.getuid():
            raise StoreError(f"{path} belongs to another user.", "Choose a directory of your own.")
    except OSError as error:
        raise StoreError(
            f"Cannot use the directory {path}: {error.strerror}.",
            "Free some space."
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Check its permissions or choose another directory.",
        ) from error
    return path


def open_private(
    path: Path, flags: int, dir_fd: int | None = None, has_one_name: bool = False
) -> int:
    """Open a file of the user's own with mode 0600; return the descriptor.

    `flags` are those of os.open. A relative path is one in the directory of `dir_fd`. A symbolic
    link, or a file of another user, raises StoreError, as does anything else that keeps the file
    from being opened; so does a file with another name too, which may be anywhere, where it is to
    have one or is to be emptied.
    """
    has_one_name |= bool(flags & os.O_TRUNC)
    # O_NONBLOCK matters to a named pipe only, whose opening would wait for its other end.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC, 0o600, dir_fd=dir_fd)
    except OSError as error:
        raise StoreError(f"Cannot open {path}: {error.strerror}.") from error
    try:
        _require_own(descriptor, path, has_one_name)
        if flags & os.O_TRUNC:  # not before it is known what it is
            os.ftruncate(descriptor, 0)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(f"Cannot use {path}: {error.strerror}.") from error
    except StoreError:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(descriptor: int, path: Path, has_one_name: bool) -> None:
    """Raise StoreError for what is no regular file of the user's; give one that is mode 0600."""
    info = os.fstat(descriptor)
    if info.st_uid != os.getuid() or not stat.S_ISREG(info.st_mode):
        raise StoreError(f"{path} is not a regular file of this user.")
    if has_one_name and info.st_nlink > 1:
        raise StoreError(f"{path} is another file too.")
    if stat.S_IMODE(info.st_mode) != 0o600:
        os.fchmod(descriptor, 0o600)


def private_file(path: Path) -> None:
    """Make a file of the user's own with mode 0600 where there is none, or check what is there.

    What is there is not opened: closing any descriptor of a file ends every lock that this process
    has on it, and another of its threads may have the file open in SQLite, which lives by such
    locks. Raises StoreError as `open_private` does.
    """
    try:
        os.close(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        return
    except StoreError:
        if not path.is_symlink() and not path.exists():
            raise
    try:
        info = path.lstat()
        if info.st_uid != os.getuid() or not stat.S_ISREG(info.st_mode):
            raise StoreError(f"{path} is not a regular file of this user.")
        if stat.S_IMODE(info.st_mode) != 0o600:
            path.chmod(0o600)
    except OSError as error:
        raise StoreError(f"Cannot use {path}: {error.strerror}.") from error
