"""Reads files from users and downloads: regular files only, up to a limit of bytes.

A named pipe, socket, device or directory is refused without waiting. Symbolic links are followed,
because the user chose the path. `paths` opens kvchat's own private files.
"""

import errno
import os
import stat
from pathlib import Path

_PIECE_BYTES = 1 << 20
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
