"""StoreLock: one process at a time changes a store, and the next one learns if it was cut off.

Knows a lock file; knows no packs. Readers take no lock.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private

LOCK_NAME = "lock"
_RETRY_S = 0.005


class StoreLock:
    """A lock between processes on the file `path`, re-entrant within one holder.

    Who holds it longer than `patience_s`, as a process stopped with Ctrl-Z does, is not waited for.
    """

    def __init__(self, path: Path, patience_s: float) -> None:
        self._path = path
        self._patience_s = patience_s
        self._depth = 0
        self.has_leftovers = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; `has_leftovers` then says whether a holder ended before it was done.

        It says so until whoever has tidied up sets it back. Raises StoreError where the lock cannot
        be had.
        """
        if self._depth:
            yield
            return
        descriptor = open_private(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._wait_for(descriptor)
            self.has_leftovers |= os.fstat(descriptor).st_size > 0
            with suppress(OSError):  # a full disk has no room for the mark, and waits to be tidied
                os.pwrite(descriptor, b"!", 0)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _wait_for(self, descriptor: int) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise StoreError("Another process holds the disk cache.") from error
                time.sleep(_RETRY_S)
