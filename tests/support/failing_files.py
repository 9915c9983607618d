"""Faults: every operation on files, locks and tables that a disk tier does, counted and failable.

Stands between the tier and the operating system, so that nothing in the product knows of it: the
functions of `os` that open, look at, read and change files, flock, the reads and writes of an open
file, and every statement SQLite is given. A write that fails has written half of what it was given.
"""

import errno
import fcntl
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.table import PackTable

CODES = (errno.ENOSPC, errno.EIO, errno.EROFS)
_SQLITE = {
    errno.ENOSPC: (sqlite3.SQLITE_FULL, "database or disk is full"),
    errno.EIO: (sqlite3.SQLITE_IOERR, "disk I/O error"),
    errno.EROFS: (sqlite3.SQLITE_READONLY, "attempt to write a readonly database"),
}
_FUNCTIONS = (
    *("open", "stat", "lstat", "fstat", "statvfs", "listdir", "scandir"),
    *("mkdir", "rmdir", "unlink", "chmod", "fchmod", "pwrite", "ftruncate", "utime"),
    *("read", "readv", "pread"),
)
# What the session files need beside these.
_CHAT_FUNCTIONS = ("write", "fsync", "replace", "rename", "truncate")


class Faults:
    """Counts calls while it is `armed`, and lets the one numbered `fail_at` fail with `code`.

    `lasting` lets those after it fail too, as a disk does that has become full. Only threads whose
    name begins with `thread` count; the empty name is every thread's. `chats_too` counts what
    session files need as well.
    """

    def __init__(self, thread: str = "", chats_too: bool = False) -> None:
        self.num_calls = 0
        self.num_failed = 0
        self.kinds: Counter[str] = Counter()
        self._thread = thread
        self._functions = (*_FUNCTIONS, *(_CHAT_FUNCTIONS if chats_too else ()))
        self._fail_at: int | None = None
        self._code = errno.EIO
        self._is_lasting = False
        self._is_armed = False

    @contextmanager
    def armed(
        self, fail_at: int | None = None, code: int = errno.EIO, lasting: bool = False
    ) -> Iterator[None]:
        self.num_calls = self.num_failed = 0
        self._fail_at, self._code, self._is_lasting = fail_at, code, lasting
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed = False

    @contextmanager
    def disarmed(self) -> Iterator[None]:
        """What the test itself does with files is not to be counted."""
        before, self._is_armed = self._is_armed, False
        try:
            yield
        finally:
            self._is_armed = before

    def strikes(self, kind: str) -> bool:
        """Count a call; whether it has to fail."""
        if not self._is_armed or not threading.current_thread().name.startswith(self._thread):
            return False
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if self._fail_at is None or number < self._fail_at:
            return False
        if number > self._fail_at and not self._is_lasting:
            return False
        self.num_failed += 1
        self.kinds[kind] += 1
        return True

    def os_error(self) -> OSError:
        return OSError(self._code, os.strerror(self._code))

    def table_error(self) -> sqlite3.OperationalError:
        number, text = _SQLITE[self._code]
        error = sqlite3.OperationalError(text)
        error.sqlite_errorcode = number
        return error

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in self._functions:
            patch.setattr(os, name, partial(self._call, name, getattr(os, name)))
        patch.setattr(fcntl, "flock", partial(self._call, "flock", fcntl.flock))
        fdopen = os.fdopen
        patch.setattr(os, "fdopen", lambda *a, **k: _File(fdopen(*a, **k), self))
        patch.setattr(PackTable, "_execute", self._statements(PackTable._execute))

    def _call(self, kind: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.strikes(kind):
            if kind == "write":
                descriptor, data = args
                function(descriptor, data[: len(data) // 2])
            raise self.os_error()
        return function(*args, **kwargs)

    def _statements(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def run(table: PackTable, statement: str, values: tuple[object, ...] = ()) -> Any:
            if self.strikes(f"sql {statement.split()[0]}"):
                raise self.table_error()
            return execute(table, statement, values)

        return run


class _File:
    """An open file whose reads and writes can fail."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes | memoryview) -> int:
        if self._faults.strikes("write"):
            self._file.write(data[: len(data) // 2])
            raise self._faults.os_error()
        return self._file.write(data)

    def read(self, size: int = -1) -> bytes:
        if self._faults.strikes("read"):
            raise self._faults.os_error()
        return self._file.read(size)


class StuckFiles:
    """A disk that deletes no file whose name ends with one of `endings`, while they are set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.endings: tuple[str, ...] = ()
        self._unlink = os.unlink
        patch.setattr(os, "unlink", self._try)

    def _try(self, name: str | Path, *, dir_fd: int | None = None) -> None:
        if str(name).endswith(self.endings):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._unlink(name, dir_fd=dir_fd)
