"""StoreLock: one process at a time changes a store, and the next one learns if it was cut off.

Knows a lock file; knows no packs. Readers take no lock.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvchat.core.errors import StoreError, StoreInUse
from kvchat.core.paths import open_private

# The directory may be any that the user names: others have a file called `lock`.
LOCK_NAME = "kvchat.lock"
_RETRY_S = 0.005
# How many times one holder's patience is had where holders take turns.
_MOST_PATIENCES = 5
_MARK_BYTES = 9


class StoreHeld(StoreInUse):
    """Somebody else holds the store, and does not let go of it."""


class StoreBusy(StoreHeld):
    """Others change the store one after another; nothing is wrong with it."""


class StoreLock:
    """A lock between processes on the file `path`, re-entrant within one holder.

    Who holds it longer than `patience_s`, as a process stopped with Ctrl-Z does, is not waited for;
    others who hold it by turns are, for some times as long. `clock` returns seconds, and `sleep`
    takes some.
    """

    def __init__(
        self,
        path: Path,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = path
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._depth = 0
        self.has_leftovers = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; `has_leftovers` then says whether a holder ended before it was done.

        It says so until whoever has tidied up sets it back. Raises StoreHeld where the lock cannot
        be had, StoreBusy where only too many others want it.
        """
        if self._depth:
            yield
            return
        descriptor = open_private(self._path, os.O_RDWR | os.O_CREAT, has_one_name=True)
        try:
            self._require_ours(descriptor)
            self._wait_for(descriptor)
            self.has_leftovers |= os.fstat(descriptor).st_size > 0
            with suppress(OSError):  # a full disk has no room for the mark, and waits to be tidied
                os.pwrite(descriptor, b"!" + os.urandom(_MARK_BYTES - 1), 0)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _require_ours(self, descriptor: int) -> None:
        """Raise StoreError for a file that is something else than a lock: it would be emptied."""
        info = os.fstat(descriptor)
        is_a_mark = info.st_size <= _MARK_BYTES and os.pread(descriptor, 1, 0) in (b"", b"!")
        if not is_a_mark:
            raise StoreError(
                f"{self._path} was not made by kvchat.",
                "Move it, or choose another directory with --cache-dir.",
            )

    def _wait_for(self, descriptor: int) -> None:
        began_s = since_s = self._clock()
        holder = os.pread(descriptor, _MARK_BYTES, 0)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                now_s = self._clock()
                if (mark := os.pread(descriptor, _MARK_BYTES, 0)) != holder:
                    holder, since_s = mark, now_s
                if now_s > since_s + self._patience_s:
                    raise StoreHeld("Another process holds the disk cache.") from error
                if now_s > began_s + _MOST_PATIENCES * self._patience_s:
                    raise StoreBusy("Other processes are busy with the disk cache.") from error
            self._sleep(_RETRY_S)
