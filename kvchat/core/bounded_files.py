"""Reads files that users and downloads supply: regular files only, and no more than so many bytes.

A named pipe, a socket, a device or a directory in place of a file is refused, and never waited for.
Symbolic links are followed: the user chose the path. What is private goes through `paths`.
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
    """Open a regular file for reading; return the descriptor, which is the caller's to close.

    Raises OSError, FileNotFoundError where there is no file. Its `strerror` completes the sentence
    "PATH cannot be read: ...".
    """
    # O_NONBLOCK: to open a named pipe would wait for its other end.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise OSError(errno.EINVAL, "its name is not a possible one", str(path)) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return all of a regular file of `max_bytes` or fewer; errors as `open_regular`.

    A larger file raises OSError too, with errno EFBIG. No more than `max_bytes` are held in memory.
    """
    descriptor = open_regular(path)
    try:
        # The size alone is not to be relied on: /proc says 0, and a file may grow meanwhile.
        if os.fstat(descriptor).st_size <= max_bytes:
            content = bytearray()
            while piece := os.read(descriptor, min(_PIECE_BYTES, max_bytes + 1 - len(content))):
                content += piece
            if len(content) <= max_bytes:
                return bytes(content)
    finally:
        os.close(descriptor)
    raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
