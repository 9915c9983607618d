"""Files: private ones with modes 0700 and 0600, without links; locks; users' files up to a limit.

A *state file* is a small JSON file of the state directory, replaced in one piece. One that is
missing, damaged, of another version or another user's reads as empty. Several processes may write
at once: the last one stands.
"""

import errno
import fcntl
import json
import logging
import os
import pwd
import re
import stat
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

from kvchat.core.errors import StoreError, UnreadableFile, UsageError
from kvchat.core.text import text_of

_log = logging.getLogger(__name__)

MOST_STATE_BYTES = 1 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NO_HOME = "/nonexistent"  # the home that Debian gives to users without one
_LEFT_S = 60.0  # no file takes as long to write


def require_working_directory() -> None:
    """Raise StoreError if the working directory was removed: torch's MKL would end the process."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise StoreError(
            "The working directory has been removed.", "Go to another one: cd ~"
        ) from error


def user_path(text: str) -> Path:
    """Return the path for a user's text, with `~` expanded; UsageError if it is not a path."""
    if "\0" in text:
        raise UsageError("A path cannot hold a NUL character.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text} is in no home directory known here.") from error


def from_anywhere(name: str) -> str:
    """Return a name, where it is a path the one that is the same in every working directory."""
    # os.path.exists is False for a name that no file can have; Path.exists raises.
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.exists(path) else name


def is_same_place(one: str, other: str) -> bool:
    """Whether two names are equal, or paths to the same place."""
    if one == other:
        return True
    with suppress(OSError, ValueError):  # a name that no file has, or can have
        return os.path.samefile(one, other)
    return False


def is_gone(name: str) -> bool:
    """Whether a name is a whole path at which nothing is."""
    return os.path.isabs(name) and not os.path.lexists(name)


def settle_home(environment: MutableMapping[str, str]) -> None:
    """Set HOME to a directory, if it names none: libraries and child processes read it too.

    The user's entry in the system's list takes its place. Without an entry, as in a container that
    runs under any number, HOME is a directory that does not exist: what has to be saved is refused
    in one sentence, and all else works.
    """
    if os.path.isabs(environment.get("HOME", "")):
        return
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = ""
    environment["HOME"] = home if os.path.isabs(home) else _NO_HOME


def close_to_others(path: Path) -> None:
    """Take all rights of other users from a directory of this user, if it is one.

    For the directories that kvchat makes for itself. A link, whose place the user chose, stays as
    it is.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(descriptor)
            if info.st_uid == os.getuid() and info.st_mode & _OTHERS:
                os.fchmod(descriptor, stat.S_IMODE(info.st_mode) & ~_OTHERS)
        finally:
            os.close(descriptor)


def private_directory(path: Path) -> Path:
    """Create `path` and its missing parents with mode 0700; return `path`.

    An existing directory keeps its mode, because the user may share it on purpose;
    `close_to_others` is for kvchat's own. Raises StoreError if it cannot be created or belongs to
    another user.
    """
    try:
        missing = [directory for directory in (path, *path.parents) if not directory.is_dir()]
        for directory in reversed(missing):
            directory.mkdir(mode=0o700, exist_ok=True)
            directory.chmod(0o700)
        if path.stat().st_uid != os.getuid():
            raise StoreError(f"{path} belongs to another user.", "Choose a directory of your own.")
    except OSError as error:
        if path.is_relative_to(_NO_HOME):
            sentence = f"Cannot use the directory {path}: this user has no home directory."
            raise StoreError(sentence, "Set HOME to a directory of yours.") from error
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
    """Open a regular file of this user, with mode 0600; return the descriptor for the caller.

    `flags` are those of os.open. A relative path is relative to the directory `dir_fd`. Raises
    StoreError for a symbolic link, another user's file, or a file that cannot be opened. With
    `has_one_name` or O_TRUNC it also refuses a file with a second hard link, which may be anywhere.
    """
    has_one_name |= bool(flags & os.O_TRUNC)
    # O_NONBLOCK: opening a named pipe would otherwise wait for its other end.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC, 0o600, dir_fd=dir_fd)
    except OSError as error:
        raise StoreError(f"Cannot open {path}: {error.strerror}.") from error
    try:
        _require_own(descriptor, path, has_one_name)
        if flags & os.O_TRUNC:  # only after the checks
            os.ftruncate(descriptor, 0)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(f"Cannot use {path}: {error.strerror}.") from error
    except StoreError:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(descriptor: int, path: Path, has_one_name: bool) -> None:
    """Set mode 0600 on a regular file of this user; raise StoreError for any other file."""
    info = os.fstat(descriptor)
    if info.st_uid != os.getuid() or not stat.S_ISREG(info.st_mode):
        raise StoreError(f"{path} is not a regular file of this user.")
    if has_one_name and info.st_nlink > 1:
        raise StoreError(f"{path} is another file too.")
    if stat.S_IMODE(info.st_mode) != 0o600:
        os.fchmod(descriptor, 0o600)


def private_file(path: Path) -> None:
    """Create a file with mode 0600, or check an existing one without opening it.

    Closing any descriptor of a file releases all POSIX locks of this process on it, and another
    thread may have the file open in SQLite, which relies on these locks. Raises StoreError as
    `open_private` does.
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


def private_database(path: Path) -> None:
    """Make the file of a SQLite database with mode 0600, and take the rights of others from it and
    from its logs.

    Raises StoreError for a link or another user's file, and for a directory that cannot be used.
    """
    private_directory(path.parent)
    private_file(path)
    for end in ("-wal", "-shm"):
        beside = path.with_name(path.name + end)
        if beside.is_symlink() or beside.exists():
            private_file(beside)


def read_state(path: Path | None, version: int, name: str) -> dict[str, object]:
    """Return the object called `name` in a state file of this version, else an empty one."""
    if path is None or not path.exists():  # nothing is kept, or was written yet
        return {}
    try:
        descriptor = open_private(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            found = json.loads(file.read(MOST_STATE_BYTES))
        content = found[name] if found["version"] == version else {}
        return {str(key): value for key, value in content.items()}
    except (StoreError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    except RecursionError:
        return {}


def write_state(path: Path | None, version: int, name: str, content: dict[str, object]) -> bool:
    """Replace a state file; false without one, and with a line in the log if it cannot be."""
    if path is None:
        return False
    try:
        private_directory(path.parent)
        replace_private(path, json.dumps({"version": version, name: content}).encode())
    except (StoreError, OSError) as error:
        _log.warning("%s not written: %s", path.name, error)
        return False
    return True


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file with mode 0600 in one piece: a reader sees the old content or the new.

    Any thread of any process may do it at once; the last one stands. Raises StoreError or OSError,
    and leaves the old file.
    """
    _delete_left(path)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}")
    descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def _delete_left(path: Path) -> None:
    """Delete the files that killed processes left of replacing `path`: they may hold its text."""
    left = re.compile(rf"{re.escape(path.name)}\.\d+\.\d+")
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if left.fullmatch(entry.name):
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_S:
                        os.unlink(entry.path)


# Network and user file systems answer with these if they have no locks, or no lock server.
_NO_LOCKS = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS))
_MOST_TRIES = 10


class Lock(Enum):
    """The outcome of an attempt to lock a file."""

    OURS = auto()
    ANOTHERS = auto()  # another process has it
    NONE = auto()  # the file system has no locks


def try_lock(descriptor: int) -> Lock:
    """Lock an open file for its holder alone, until the descriptor is closed.

    Raises OSError if the disk fails.
    """
    for number in range(1, _MOST_TRIES + 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except InterruptedError:
            if number == _MOST_TRIES:
                raise
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return Lock.ANOTHERS
            if error.errno in _NO_LOCKS:
                return Lock.NONE
            raise
        else:
            break
    return Lock.OURS


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one at its path; if not, writes would be lost."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


# Files of users and downloads: a named pipe, socket, device or directory is refused without
# waiting. Symbolic links are followed, because the user chose the path.

_PIECE_BYTES = 1 << 20
_MOST_TEXT_BYTES = 16 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> int:
    """Open a regular file for reading; return the descriptor, which the caller closes.

    Raises OSError, FileNotFoundError if there is no file. Its `strerror` completes the sentence
    "PATH cannot be read: ...".
    """
    # O_NONBLOCK: opening a named pipe would otherwise wait for its other end.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise OSError(errno.EINVAL, "its name is not a possible one", str(path)) from error
    try:
        require_regular(descriptor, str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(descriptor: int, name: str) -> None:
    """Raise OSError as `open_regular` does if an open file is not a regular one."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", name)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; errors as `open_regular`.

    A larger file raises OSError with errno EFBIG. Memory use is bounded by `max_bytes`.
    """
    descriptor = open_regular(path)
    try:
        return read_descriptor(descriptor, max_bytes, str(path))
    finally:
        os.close(descriptor)


def text_or_file(text: str) -> str:
    """Return a text, or that of the file which `@PATH` names, without space around it.

    Raises UnreadableFile.
    """
    if not text.startswith("@"):
        return text
    return read_text(user_path(text[1:]))


def read_text(path: Path, max_bytes: int = _MOST_TEXT_BYTES) -> str:
    """Return a file's text without space around it; raises UnreadableFile for what is no text."""
    try:
        content, is_whole = text_of(read_bounded(path, max_bytes))
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from error
    if not is_whole or "\0" in content:
        raise UnreadableFile(f"{path} is not a text file.")
    return content.strip()


def as_text(text: str) -> str:
    """Return a text as `text_or_file` returns it: one that begins with @ names no file."""
    return f" {text}" if text.startswith("@") else text


def read_descriptor(descriptor: int, max_bytes: int, name: str) -> bytes:
    """Return the content of an open regular file, as `read_bounded` does."""
    # The size alone is not reliable: it is 0 in /proc, and a file may grow meanwhile.
    if os.fstat(descriptor).st_size <= max_bytes:
        content = bytearray()
        while piece := os.read(descriptor, min(_PIECE_BYTES, max_bytes + 1 - len(content))):
            content += piece
        if len(content) <= max_bytes:
            return bytes(content)
    raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", name)
