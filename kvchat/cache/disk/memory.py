"""DiskMemory: facts that outlast a process, in a SQLite table of the state directory (diskcache).

The table is opened at the first use, which takes some milliseconds. If it cannot be used, it counts
as empty until the process ends: its facts are found out again.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.cache.disk import model_dirs
from kvchat.cache.disk.db import LOCK_NAME, StoreLock
from kvchat.cache.disk.table import is_passing
from kvchat.core.errors import StoreError
from kvchat.core.paths import private_database, private_directory
from kvchat.core.types import Fact, Memory

if TYPE_CHECKING:
    from diskcache import Cache

_log = logging.getLogger(__name__)

_PATIENCE_S = 2.0


class DiskMemory(Memory):
    """The memory in `state_directory`; see Memory. It waits up to `patience_s` for other processes.

    The directory of the table is made with mode 0700, its files with 0600. A link in its place, or
    a directory that others have filled, is left alone.
    """

    def __init__(self, state_directory: Path, patience_s: float = _PATIENCE_S) -> None:
        self._directory = state_directory.absolute() / "memory"
        self._path = self._directory / model_dirs.DATABASE
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._is_tried = False
        self._table: Cache | None = None
        self._file: tuple[int, int] | None = None

    def get(self, kind: str, key: str) -> Fact:
        if not self._is_tried and not self._path.exists():
            return None  # who only asks makes no table
        return self._attempt(lambda table: table.get(f"{kind} {key}"))

    def set(self, kind: str, key: str, fact: Fact) -> None:
        self._attempt(lambda table: table.set(f"{kind} {key}", fact))

    def update(self, kind: str, key: str, change: Callable[[Fact], Fact]) -> None:
        def write(table: "Cache") -> None:
            with table.transact():
                table.set(f"{kind} {key}", change(table.get(f"{kind} {key}")))

        self._attempt(write)

    def _attempt(self, action: Callable[["Cache"], Fact]) -> Fact:
        table = self._opened_table()
        if table is None:
            return None
        try:
            return action(table)
        except Exception as error:  # what a damaged table holds can raise anything
            _log.warning("memory: %r", error)
            if not isinstance(error, ValueError | TypeError):  # these are the fault of one fact
                self._give_up(table, error)
            return None

    def _give_up(self, table: "Cache", error: Exception) -> None:
        self._table = None
        with suppress(sqlite3.Error):
            table.close()
        if _is_damage(error):
            with suppress(OSError, StoreError), self._alone():
                self._empty()

    def _opened_table(self) -> "Cache | None":
        with self._lock:
            if not self._is_tried:
                self._is_tried = True
                try:
                    self._table = self._open()
                except Exception as error:
                    _log.warning("memory: %r", error)
            return self._table

    def _open(self) -> "Cache":
        """Open the table; one that is damaged is replaced by an empty one."""
        # Only here: most of the time goes into this import.
        from kvchat.cache.disk.json_disk import open_table

        if os.path.expandvars(self._directory) != str(self._directory):
            raise StoreError(f"{self._directory} has the name of a variable in it.")
        private_directory(self._directory.parent)
        model_dirs.make(self._directory)
        with self._alone():
            self._prepare()
            try:
                return open_table(self._path, self._patience_s)
            except Exception as error:
                if not _is_damage(error):
                    raise
                _log.warning("memory: %r", error)
            self._empty()
            self._prepare()
            return open_table(self._path, self._patience_s)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock, so that no other process makes or deletes a table meanwhile."""
        with StoreLock(self._directory / LOCK_NAME, self._patience_s).hold():
            yield

    def _prepare(self) -> None:
        model_dirs.clear_the_way(self._directory)
        private_database(self._path)
        self._file = model_dirs.file_number(self._path)

    def _empty(self) -> None:
        """Delete the table, unless another process has replaced it."""
        if model_dirs.file_number(self._path) == self._file:
            model_dirs.empty(self._directory)


def _is_damage(error: Exception) -> bool:
    """Whether an error is the fault of what the table holds."""
    return isinstance(error, sqlite3.DatabaseError) and not is_passing(error)
