"""PackDb keeps one identity's table open; StoreLock lets one process at a time change a store.

Other processes may delete the directory, make it again or damage it; PackDb then opens it again. A
process that takes the lock learns whether an earlier holder was killed. Readers take no lock.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvchat.cache.disk import model_dirs
from kvchat.cache.disk.model_dirs import DATABASE, file_number
from kvchat.cache.disk.table import PackTable, is_busy, is_passing
from kvchat.core.errors import StoreError, StoreInUse
from kvchat.core.paths import Lock, open_private, private_directory, private_file, try_lock

# The directory may be any that the user names: others have a file called `lock`.
LOCK_NAME = "kvchat.lock"
_RETRY_S = 0.005
# Several holders one after another are waited for this many times as long as one holder.
_MOST_PATIENCES = 5
_MARK_BYTES = 9


class StoreLocked(StoreInUse):
    """Another process holds the store's lock longer than the timeout."""


class StoreBusy(StoreLocked):
    """Several processes held the store's lock one after another; the store is in order."""


class StoreLock:
    """A lock between processes on the file `path`, re-entrant within one holder.

    It waits at most `patience_s` for one holder, which may be a process stopped with Ctrl-Z, and a
    few times as long for several holders in turn. `clock` returns seconds; `sleep` takes seconds.
    On a file system without locks nothing is waited for: SQLite alone orders what processes write.
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
    def hold(self) -> Iterator[None]:
        """Hold the lock; `has_leftovers` then says whether an earlier holder was killed, or could
        not delete all that it had to delete.

        It stays true, for later holders too, until one that has removed the leftovers resets it.
        Raises StoreLocked if one holder keeps the lock too long, StoreBusy if several do in turn.
        """
        if self._depth:
            yield
            return
        descriptor = open_private(self._path, os.O_RDWR | os.O_CREAT, has_one_name=True)
        try:
            self._require_ours(descriptor)
            self._wait_for(descriptor)
            self.has_leftovers |= os.fstat(descriptor).st_size > 0
            with suppress(OSError):  # a full disk has no room for the mark
                os.pwrite(descriptor, b"!" + os.urandom(_MARK_BYTES - 1), 0)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self.has_leftovers:
                    with suppress(OSError):
                        os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _require_ours(self, descriptor: int) -> None:
        """Raise StoreError if the file is no lock file: to take the lock empties the file."""
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
        while try_lock(descriptor) is Lock.ANOTHERS:
            now_s = self._clock()
            if (mark := os.pread(descriptor, _MARK_BYTES, 0)) != holder:
                holder, since_s = mark, now_s
            if now_s > since_s + self._patience_s:
                raise StoreLocked("Another process holds the disk cache.")
            if now_s > began_s + _MOST_PATIENCES * self._patience_s:
                raise StoreBusy("Other processes are busy with the disk cache.")
            self._sleep(_RETRY_S)


T = TypeVar("T")

_MOST_OPENINGS = 3


def is_locked(error: Exception) -> bool:
    """Whether another process locked the table, or held the store, until the timeout."""
    return is_busy(error) or isinstance(error, StoreLocked)


class PackDb:
    """Owns the table in `own`, a model directory of the store in `directory`.

    One thread at a time uses it; `thread` is the last one that did, None while the table is closed.

    `note_trouble` is called with every error. A table waits up to `patience_s` for other writers.
    """

    def __init__(
        self,
        directory: Path,
        own: Path,
        lock: StoreLock,
        patience_s: float,
        note_trouble: Callable[[Exception], None],
    ) -> None:
        self._directory = directory
        self._own = own
        self._table_path = own / DATABASE
        self._lock = lock
        self._patience_s = patience_s
        self._note_trouble = note_trouble
        self._may_begin_anew = True
        self.is_begun_anew = False  # an unusable table was replaced by an empty one
        self._file: tuple[int, int] | None = None
        self.thread: int | None = None
        self.table = self._open_or_replace()

    def close(self) -> None:
        """Close the table and its directory. Idempotent; `follow` opens them again."""
        self.table.close()
        self.thread = None

    def follow(self) -> PackTable:
        """Return the table; open it again if its file is another one than before.

        Also if a pipe or a link stands in the place of its log: SQLite opens the log by name, at
        the first statement that needs it.
        """
        is_the_same = self.thread is not None and file_number(self._table_path) == self._file
        if not (is_the_same and model_dirs.has_only_files(self._own)):
            self.close()
            self.table = self._open_or_replace()
        self.thread = threading.get_ident()
        return self.table

    @contextmanager
    def changing(self) -> Iterator[PackTable]:
        """Hold the store's lock; yields the table.

        A process that deletes a store holds the lock too, so rows that were read before may be
        gone. `has_leftovers` of the lock is copied to the table's files, and back afterwards.
        """
        with self._lock.hold():
            table = self.follow()
            table.files.has_leftovers |= self._lock.has_leftovers
            try:
                yield table
            finally:
                self._lock.has_leftovers |= table.files.has_leftovers

    def attempt(self, action: Callable[[], T], otherwise: T) -> T:
        """Return what `action` returns, which uses the table; `otherwise` if it fails.

        A damaged table is replaced by an empty one, once.
        """
        try:
            return action()
        except Exception as error:  # what a damaged table holds can raise anything
            self._note_trouble(error)
            if self._may_begin_anew and not is_passing(error):
                self._may_begin_anew = False
                self.attempt(self._begin_anew, None)
            return otherwise

    def _begin_anew(self) -> None:
        with self._lock.hold():
            if file_number(self._table_path) == self._file:
                self._empty()
            self.follow()

    def _empty(self) -> None:
        self.is_begun_anew = True
        model_dirs.empty(self._own)

    def _open_or_replace(self) -> PackTable:
        """Open the table; one that cannot be used is replaced by an empty one."""
        if self._directory.is_symlink():
            raise StoreError(f"{self._directory} is a symbolic link.", "Remove it.")
        private_directory(self._directory)
        with self._alone():
            try:
                return self._open_patiently()
            except Exception as error:
                self._note_trouble(error)
                if is_passing(error):
                    raise
            with self._lock.hold():
                self._empty()
                return self._open()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock while a table is opened, so that no process deletes the store meanwhile.

        SQLite opens the table and then its log, each by name: both must be of the same table. If
        another process holds the lock too long, such as one stopped with Ctrl-Z, go on without it.
        """
        with ExitStack() as stack:
            with suppress(StoreError):
                stack.enter_context(self._lock.hold())
            yield

    def _open_patiently(self) -> PackTable:
        """Open the table; try again while other processes keep it busy. Each try waits a while."""
        for _ in range(_MOST_OPENINGS - 1):
            try:
                return self._open()
            except Exception as error:
                if not is_busy(error):
                    raise
        return self._open()

    def _open(self) -> PackTable:
        model_dirs.make(self._own)
        model_dirs.clear_the_way(self._own)
        # SQLite gives its log the mode of its file; both are the user's alone.
        private_file(self._table_path)
        file = file_number(self._table_path)
        table = PackTable(self._own, self._patience_s)
        try:
            with model_dirs.hold(self._own) as descriptor:
                if not os.path.sameopenfile(descriptor, table.files.descriptor):
                    raise StoreError(f"{self._own} was exchanged while it was opened.")
        except BaseException:
            table.close()
            raise
        # Set only now: if opening failed, the next `follow` opens it again.
        self._file, self.thread = file, threading.get_ident()
        return table
