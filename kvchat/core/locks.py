"""File locks between processes, without waiting, also on file systems that have none."""

import errno
import fcntl
import os
from enum import Enum, auto
from pathlib import Path

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
