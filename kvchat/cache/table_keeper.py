"""TableKeeper: one identity's table, open, whatever becomes of its files meanwhile.

Others may delete the directory, make it anew, or spoil it. Knows what an error means for a table;
knows no packs.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvchat.cache import own_directory
from kvchat.cache.generations import file_number
from kvchat.cache.own_directory import DATABASE
from kvchat.cache.pack_table import PackTable
from kvchat.cache.raw_disk import is_busy, is_passing
from kvchat.cache.store_lock import StoreHeld, StoreLock
from kvchat.core.errors import StoreError
from kvchat.core.paths import private_directory, private_file

T = TypeVar("T")

_MOST_OPENINGS = 3


def is_held(error: Exception) -> bool:
    """Whether others were at the table, or held the store, all the time they were waited for."""
    return is_busy(error) or isinstance(error, StoreHeld)


class TableKeeper:
    """Owns the table in `own`, a generation of the store in `directory`; one thread at a time uses
    it, and `thread` is the one that did last.

    `note_trouble` hears of every error. A table waits `patience_s` for whoever else writes to it.
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
        self.is_begun_anew = False  # a table that was there could not be used, and another is there
        self._file: tuple[int, int] | None = None
        self.thread = threading.get_ident()
        self.table = self._opened()

    def follow(self) -> PackTable:
        """Return the table, opened again where its file is not the one it was.

        So it is on another thread: SQLite's connections are each thread's own. So it is where a
        pipe or a link stands in the place of a log, which SQLite opens when it first needs it.
        """
        is_the_same = file_number(self._table_path) == self._file
        is_the_same = is_the_same and own_directory.has_only_files(self._own)
        if not is_the_same or threading.get_ident() != self.thread:
            self.table.close_all()
            self.table = self._opened()
        return self.table

    @contextmanager
    def changing(self) -> Iterator[PackTable]:
        """Hold the store's lock; yields the table as it is under the lock.

        Whoever deletes a store holds it too: what was looked at before may be gone.
        """
        with self._lock.held():
            yield self.follow()

    def attempt(self, action: Callable[[], T], otherwise: T) -> T:
        """Do something with the table; where that fails, `otherwise`.

        A table that is no good is begun anew, once.
        """
        try:
            return action()
        except Exception as error:  # a table with damage in it makes diskcache fail in any way
            self._note_trouble(error)
            with suppress(Exception):
                self.table.take_back()
            if self._may_begin_anew and not is_passing(error):
                self._may_begin_anew = False
                self.attempt(self._begin_anew, None)
            return otherwise

    def _begin_anew(self) -> None:
        with self._lock.held():
            if file_number(self._table_path) == self._file:
                self._empty()
            self.follow()

    def _empty(self) -> None:
        self.is_begun_anew = True
        own_directory.empty(self._own)

    def _opened(self) -> PackTable:
        """Open the table; one that cannot be used is begun anew."""
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
            with self._lock.held():
                self._empty()
                return self._open()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock while a table is opened: SQLite opens its log by its name when it first
        needs it, and where somebody deletes the store in between that is another table's.

        Whoever holds the lock for long, as a process stopped with Ctrl-Z does, is not waited for.
        """
        with ExitStack() as stack:
            with suppress(StoreError):
                stack.enter_context(self._lock.held())
            yield

    def _open_patiently(self) -> PackTable:
        """Open the table, once more where somebody was at it all the time: each waits a while."""
        for _ in range(_MOST_OPENINGS - 1):
            try:
                return self._open()
            except Exception as error:
                if not is_busy(error):
                    raise
        return self._open()

    def _open(self) -> PackTable:
        own_directory.make(self._own)
        own_directory.clear_the_way(self._own)
        # SQLite gives its log the mode of its file; both are the user's alone.
        private_file(self._table_path)
        file = file_number(self._table_path)
        table = PackTable(self._own, self._patience_s)
        try:
            with own_directory.held(self._own) as descriptor:
                if not os.path.sameopenfile(descriptor, table.disk.descriptor):
                    raise StoreError(f"{self._own} was exchanged while it was opened.")
        except BaseException:
            table.abandon()
            raise
        # Not before it is open: where that fails, the next one to ask opens it again.
        self._file, self.thread = file, threading.get_ident()
        return table
