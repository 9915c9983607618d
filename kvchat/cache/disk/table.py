"""PackTable: one identity's packs and pins in a SQLite table; large payloads are files beside it.

A pack is one row: how it was used, its head, and its payload or the name of the payload's file. So
a head and its payload come and go in one commit. The file is written before the row is; a file
without a row, as a killed process leaves it, is removed by `sweep`.

Why SQLite and not diskcache, whose table this was: diskcache's public interface gives values by
their keys. It cannot say in one query which packs there are, how they were used and how much they
take, which every write needs; it cannot close the connection of another thread, shorten the log
after /forget, or end a transaction that SQLite has taken back on a full disk (its own rollback
fails then); its `check` deletes files of others. A second database beside it would need a
commit over both.
"""

import logging
import math
import os
import sqlite3
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvchat.cache.disk.eviction import Use, used_again
from kvchat.cache.disk.format import Pin, decode_pin, encode_pin, pin_name
from kvchat.cache.disk.model_dirs import DATABASE, PACK_FILE, PIN_MARK
from kvchat.cache.page_memory import ReadBuffers
from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private

_log = logging.getLogger(__name__)

# No pack is nearly as long. A longer file is damaged, and must not fill the memory.
MAX_FILE_BYTES = 1 << 28
# A shorter payload stays in the table.
MIN_FILE_BYTES = 1 << 16
# After so many pages SQLite copies the log into the table and begins the log anew.
LOG_PAGES, PAGE_BYTES = 32, 4096
# While another process copies the log, SQLite waits for nothing.
_LOG_TRIES, _LOG_RETRY_S = 40, 0.025

# SQLite's `user_version` of our tables. diskcache's tables have 0.
SCHEMA_VERSION = 1
_SCHEMA = (
    "CREATE TABLE Pack (key BLOB PRIMARY KEY, last_s REAL NOT NULL, credit_s REAL NOT NULL,"
    " num_uses INTEGER NOT NULL, num_followed INTEGER NOT NULL, file TEXT,"
    " size INTEGER NOT NULL, head BLOB NOT NULL, payload BLOB)",
    "CREATE INDEX Pack_size ON Pack (size)",
    "CREATE TABLE Pin (name BLOB PRIMARY KEY, record BLOB NOT NULL)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
# Before the tables are made: their pages, and that deleted rows make the file shorter.
_FILE_SETTINGS = (f"PRAGMA page_size = {PAGE_BYTES}", "PRAGMA auto_vacuum = FULL")
# If another process truncates a mapped table, the reading process is killed: nothing is mapped.
# A commit is not synced, only the log before it is copied: a power cut can lose the last packs.
_CONNECTION_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    # What is evicted is text that the user may delete later: no page keeps it.
    "PRAGMA secure_delete = ON",
    "PRAGMA mmap_size = 0",
    f"PRAGMA wal_autocheckpoint = {LOG_PAGES}",
)

# Errors that pass, or that a new table would not mend. All others are the fault of the table.
_PASSING = (OSError, StoreError, MemoryError, sqlite3.ProgrammingError)
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_PASSING_CODES = _BUSY_CODES | {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_INTERRUPT,
}


class OtherSchema(sqlite3.DatabaseError):
    """The table is of another version of kvchat, or is none of ours: a new one takes its place."""


def is_busy(error: Exception) -> bool:
    """Whether another process kept the table locked until the timeout."""
    return isinstance(error, sqlite3.Error) and _code(error) in _BUSY_CODES


def is_passing(error: Exception) -> bool:
    """Whether an error is the machine's, and not the fault of what a table holds."""
    if isinstance(error, sqlite3.Error) and not isinstance(error, _PASSING):
        return _code(error) in _PASSING_CODES
    return isinstance(error, _PASSING)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _held_error() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("others read the log")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


@dataclass(frozen=True, slots=True)
class Parts:
    """A payload in two parts, so that it need not be copied into one buffer."""

    prefix: bytes
    rest: memoryview

    def __len__(self) -> int:
        return len(self.prefix) + len(self.rest)


class PayloadFiles:
    """Files of mode 0600 in a directory, with names of their own.

    The directory is held by its descriptor as long as this lives: if its name is given to something
    else meanwhile, that is neither read nor written. `has_leftovers` says that there may be files
    that the table does not count, such as those that could not be removed: until a sweep has
    removed all of them, and before the first sweep, only a search tells what the directory takes.
    """

    def __init__(self, directory: Path) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(directory, flags)
        self.has_leftovers = True
        # Closes the descriptor: when it is called, or else when `self` is no longer referenced.
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Close the directory, for good: its descriptor's number may soon be another file's."""
        self._close()
        self.descriptor = -1

    def write(self, payload: Parts) -> str:
        """Write a new file; return its name. If that fails, none is left."""
        name = f"{os.urandom(16).hex()}.kv"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                _write_all(file, payload.prefix)
                _write_all(file, payload.rest)
        except OSError:
            self.remove(name)
            raise
        return name

    def read(
        self, name: object, prefix_bytes: int, take: Callable[[int], memoryview]
    ) -> tuple[bytes, memoryview]:
        """Return the first bytes of a file, and the rest of it in memory that `take` gives.

        A file that is too long or too short, of another user, or of no name that `write` gives,
        has no rest. Raises OSError where there is no file.
        """
        if not is_pack_file(name):
            return b"", memoryview(b"")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(str(name), flags, dir_fd=self.descriptor)
        try:
            info = os.fstat(descriptor)
            size = info.st_size - prefix_bytes
            if info.st_uid != os.getuid() or not 0 <= size <= MAX_FILE_BYTES:
                return b"", memoryview(b"")
            prefix = os.read(descriptor, prefix_bytes)
            rest = take(size)
            return prefix, rest[: _read_all(descriptor, rest)]
        finally:
            os.close(descriptor)

    def remove(self, name: object) -> None:
        """Remove a file; if that fails, there are leftovers. Another's file is left alone."""
        if not is_pack_file(name):
            return
        try:
            os.unlink(str(name), dir_fd=self.descriptor)
        except FileNotFoundError:  # another process has removed it already
            pass
        except OSError as error:
            self.has_leftovers = True
            _log.warning("a file of a pack could not be removed: %s", error.strerror)

    def remove_all_but(self, known_bytes: Mapping[object, object]) -> None:
        """Remove the files that are not in `known_bytes`, with this name and of this size."""
        names = list(filter(is_pack_file, os.listdir(self.descriptor)))
        unknown = [name for name in names if self._is_unknown(name, known_bytes.get(name))]
        self.has_leftovers = False
        for name in unknown:
            self.remove(name)

    def _is_unknown(self, name: str, known_bytes: object) -> bool:
        """Whether a file is not one of `known_bytes`; what is no file is not ours."""
        with suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            return info.st_size != known_bytes and not stat.S_ISDIR(info.st_mode)
        return False


def is_pack_file(name: object) -> bool:
    """Whether a table's file name is one that PayloadFiles gives."""
    return isinstance(name, str) and PACK_FILE.fullmatch(name) is not None


def _write_all(file: Any, value: bytes | memoryview) -> None:
    view = memoryview(value)
    while view:
        view = view[file.write(view) :]


def _read_all(descriptor: int, memory: memoryview) -> int:
    """Fill `memory` as far as the file reaches; return how far that is."""
    position = 0
    while position < len(memory) and (count := os.readv(descriptor, [memory[position:]])):
        position += count
    return position


_ENTER = "INSERT OR REPLACE INTO Pack VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_MOST_REMOVED = 4
_MOST_TEMPORARY = 16  # pins that end by themselves


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack as the table has it: its key, its head as stored, and its uses."""

    key: bytes
    head: bytes
    use: Use


def use_of(columns: tuple[Any, ...]) -> Use:
    """Return what the columns of a row say of its uses; a damaged table says anything."""
    last_s, credit_s, num_uses, num_followed = (
        value if isinstance(value, int | float) else 0 for value in columns
    )
    return Use(float(last_s), float(credit_s), int(num_uses) or 1, int(num_followed))


def bytes_of(value: object) -> bytes:
    """Return what a column of bytes holds; a damaged table has anything in it."""
    return value if isinstance(value, bytes) else b""


class PackTable:
    """One identity's packs, in the directory `directory`, which exists and is ours.

    It waits up to `patience_s` for other processes that write. One thread at a time uses it. Raises
    what SQLite and the file system raise; if it cannot be opened, it leaves nothing open.
    """

    def __init__(self, directory: Path, patience_s: float) -> None:
        self.files = PayloadFiles(directory)
        try:
            self._connection = sqlite3.connect(
                directory / DATABASE, patience_s, isolation_level=None, check_same_thread=False
            )
        except BaseException:
            self.files.close()
            raise
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the table and its directory, for good. Idempotent; any thread may do it."""
        self._connection.close()
        self.files.close()

    def _prepare(self) -> None:
        if not self._version():
            for statement in _FILE_SETTINGS:
                self._execute(statement)
        for statement in _CONNECTION_SETTINGS:
            self._execute(statement)
        if self._version() != SCHEMA_VERSION:
            with self._transaction():
                self._create()

    def _create(self) -> None:
        """Make the tables, unless another process has made them meanwhile."""
        if self._version() == SCHEMA_VERSION:
            return
        if self._number("SELECT COUNT(*) FROM sqlite_master") or self._version():
            raise OtherSchema("the table is of another version of kvchat")
        for statement in _SCHEMA:
            self._execute(statement)

    def _version(self) -> int:
        return self._number("PRAGMA user_version")

    def _execute(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()

    def _number(self, query: str, *values: object) -> int:
        """Return the number that a query has for an answer; 0 for no number."""
        [(number,)] = self._execute(query, values)
        return int(number or 0)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all that is done inside, or nothing; no other process writes meanwhile."""
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            # Does nothing where SQLite has rolled back by itself, as it does on a full disk.
            with suppress(sqlite3.Error):
                self._connection.rollback()
            raise

    # Packs

    def head(self, key: bytes) -> tuple[bytes, str | None] | None:
        """Return a pack's head as it was stored, and the file of its payload, if that is one."""
        for head, file in self._execute("SELECT head, file FROM Pack WHERE key = ?", (key,)):
            if data := bytes_of(head):
                return data, file if isinstance(file, str) else None
        return None

    def payload(
        self, key: bytes, file: str | None, prefix_bytes: int, buffers: ReadBuffers
    ) -> tuple[bytes, memoryview] | None:
        """Return the beginning of a pack's payload, and the rest of it in memory of `buffers`.

        `file` is the name it had when its head was read, None if it had none, or if the head was
        not read.
        """
        if file is not None:
            return self.files.read(file, prefix_bytes, buffers.take)
        for name, data in self._execute("SELECT file, payload FROM Pack WHERE key = ?", (key,)):
            if name is not None:
                return self.files.read(name, prefix_bytes, buffers.take)
            return bytes_of(data)[:prefix_bytes], memoryview(bytes_of(data))[prefix_bytes:]
        return None

    def keep(self, key: bytes, head: bytes, payload: Parts, use: Use) -> None:
        """Enter a pack, in place of one of the same key: all of it, or nothing."""
        file, size, data = None, 0, None
        if len(payload) < MIN_FILE_BYTES:
            data = b"".join((payload.prefix, payload.rest))
        else:
            file, size = self.files.write(payload), len(payload)
        columns = (*_columns(use), file, size, head, data)
        try:
            with self._transaction():
                old = self._execute("SELECT file FROM Pack WHERE key = ?", (key,))
                self._execute(_ENTER, (key, *columns))
        except BaseException:
            self.files.remove(file)
            raise
        for (name,) in old:
            self.files.remove(name)

    def remove(self, *keys: bytes) -> None:
        """Forget packs, a few at a time: what one change adds to the log stays small."""
        for start in range(0, len(keys), _MOST_REMOVED):
            self._remove(keys[start : start + _MOST_REMOVED])

    def _remove(self, keys: tuple[bytes, ...]) -> None:
        """Forget packs: all of them, or none."""
        files: list[tuple[object]] = []
        with self._transaction():
            for key in keys:
                files += self._execute("SELECT file FROM Pack WHERE key = ?", (key,))
                self._execute("DELETE FROM Pack WHERE key = ?", (key,))
        for (file,) in files:
            self.files.remove(file)

    def rows(self) -> Iterator[PackRow]:
        """Yield every pack."""
        query = "SELECT key, head, last_s, credit_s, num_uses, num_followed FROM Pack"
        for key, head, *use in self._execute(query):
            yield PackRow(bytes(key), bytes_of(head), use_of(tuple(use)))

    def num_packs(self) -> int:
        """Return how many packs there are."""
        return self._number("SELECT COUNT(*) FROM Pack")

    def num_files(self) -> int:
        """Return how many payloads are files."""
        return self._number("SELECT COUNT(*) FROM Pack WHERE size > 0")

    def file_bytes(self) -> int:
        """Return the length of all payloads that are files."""
        return self._number("SELECT SUM(size) FROM Pack")

    def num_bytes(self) -> int:
        """Return how long the table is once all that is in the log is in it."""
        return self._number("PRAGMA page_count") * PAGE_BYTES

    def largest(self) -> int:
        """Return the size of the largest payload that can be one; a damaged table says anything."""
        return self._number("SELECT MAX(size) FROM Pack WHERE size <= ?", MAX_FILE_BYTES)

    def sweep(self) -> None:
        """Remove files that the table does not have with this name and size, under the lock.

        If one cannot be removed, there are still leftovers. Raises ValueError where the table is
        damaged so that its sizes say nothing of its files.
        """
        is_wrong = "(file IS NULL) <> (size = 0) OR size NOT BETWEEN 0 AND ?"
        if self._number(f"SELECT COUNT(*) FROM Pack WHERE {is_wrong}", MAX_FILE_BYTES):
            raise ValueError("the table has lost count of its files")
        self.files.remove_all_but(
            dict(self._execute("SELECT file, size FROM Pack WHERE file IS NOT NULL"))
        )

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Afterwards the log has nothing of what is removed meanwhile; the table overwrites it.

        Raises an error of a busy table if others read the log until the timeout.
        """
        try:
            yield
        finally:
            self._empty_log()

    def _empty_log(self) -> None:
        for _ in range(_LOG_TRIES):
            if not self.shorten_log():
                return
            time.sleep(_LOG_RETRY_S)
        raise _held_error()

    def shorten_log(self) -> bool:
        """Have all that is in the log in the table alone; return whether others read it."""
        [(is_held, *_)] = self._execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return bool(is_held)

    # Uses

    def note_uses(self, one_shot_uses: Mapping[bytes, bool], now_s: float) -> None:
        """Record which packs were used, and whether only by one-shot requests."""
        with self._transaction():
            for key, is_one_shot in one_shot_uses.items():
                if (use := self.use(key)) is not None:
                    self._set_use(key, used_again(use, now_s, is_one_shot))

    def note_followed(self, key: bytes | None) -> None:
        """Remember that another pack was written behind this one, if there is one."""
        if key is not None and (use := self.use(key)) is not None:
            self._set_use(key, replace(use, num_followed=use.num_followed + 1))

    def newest_use_s(self) -> float:
        """Return when a pack was last used; minus infinity where there is none."""
        [(newest,)] = self._execute("SELECT MAX(last_s) FROM Pack")
        return float(newest) if isinstance(newest, int | float) else -math.inf

    def move_uses(self, seconds: float) -> None:
        """Have all uses later by so many seconds: which is worth more than which stays."""
        change = "SET last_s = last_s + ?, credit_s = credit_s + ?"
        self._execute(f"UPDATE Pack {change}", (seconds, seconds))

    def use(self, key: bytes) -> Use | None:
        """Return a pack's uses, None if there is no such pack."""
        query = "SELECT last_s, credit_s, num_uses, num_followed FROM Pack WHERE key = ?"
        return next(map(use_of, self._execute(query, (key,))), None)

    def _set_use(self, key: bytes, use: Use) -> None:
        change = "SET last_s = ?, credit_s = ?, num_uses = ?, num_followed = ? WHERE key = ?"
        self._execute(f"UPDATE Pack {change}", (*_columns(use), key))

    # Pins

    def pins(self) -> list[Pin]:
        """Return all pins that can be read."""
        records = self._execute("SELECT record FROM Pin")
        found = (decode_pin(bytes_of(record)) for (record,) in records)
        return [pin for pin in found if pin is not None]

    def pin(self, pin: Pin) -> None:
        """Enter a pin, in place of one of the same label.

        A temporary one also takes the place of those that it covers; the oldest over the limit go.
        """
        record = (pin_name(pin.label), encode_pin(pin))
        self._execute("INSERT OR REPLACE INTO Pin VALUES (?, ?)", record)
        if pin.is_temporary:
            others = [p for p in self.pins() if p.is_temporary and p.label != pin.label]
            covered = [other for other in others if pin.covers(other)]
            rest = sorted((p for p in others if p not in covered), key=lambda p: p.made_s)
            old = rest[: max(0, len(rest) + 1 - _MOST_TEMPORARY)]
            for other in (*covered, *old):
                self._drop_pin(other.label)
        else:
            os.close(open_private(Path(PIN_MARK), os.O_WRONLY | os.O_CREAT, self.files.descriptor))

    def end_pins(self, now_s: float) -> None:
        """Remove the temporary pins whose time is over."""
        for pin in self.pins():
            if pin.until_s <= now_s:
                self._drop_pin(pin.label)

    def unpin(self, label: str) -> None:
        """Remove the pin of a label."""
        self._drop_pin(label)
        if all(pin.is_temporary for pin in self.pins()):
            with suppress(FileNotFoundError):
                os.unlink(PIN_MARK, dir_fd=self.files.descriptor)

    def _drop_pin(self, label: str) -> None:
        self._execute("DELETE FROM Pin WHERE name = ?", (pin_name(label),))


def _columns(use: Use) -> tuple[float, float, int, int]:
    return use.last_s, use.credit_s, use.num_uses, use.num_followed
