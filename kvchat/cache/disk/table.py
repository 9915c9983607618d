"""PackTable: one identity's packs and pins in a SQLite table; large payloads are files beside it.
PackRows reads such a table through any connection.

A pack is one row (`pack_rows.py`), so its head and its payload come and go in one commit. The file
of a payload is written before the row is; a file without a row, as a killed process leaves it, is
removed by `sweep`.

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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvchat.cache.disk.eviction import Use, used_again
from kvchat.cache.disk.model_dirs import CODED, DATABASE, PIN_MARK, PLAIN
from kvchat.cache.disk.pack_rows import PackRow, Pin, fingerprint_bytes, read_fingerprint
from kvchat.cache.disk.payload_files import MAX_FILE_BYTES, PayloadFiles, is_coded
from kvchat.cache.keys import KEY_BYTES
from kvchat.cache.page_memory import ReadBuffers
from kvchat.cache.tier import DamagedRecord, Layout, PackHead
from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private

_log = logging.getLogger(__name__)

# A shorter payload stays in the table.
MIN_FILE_BYTES = 1 << 16
# After so many pages SQLite copies the log into the table and begins the log anew.
LOG_PAGES, PAGE_BYTES = 32, 4096
# While another process copies the log, SQLite waits for nothing.
_LOG_TRIES, _LOG_RETRY_S = 40, 0.025

# SQLite's `user_version` of our tables: 0 of diskcache's, 1 where a head was one blob.
SCHEMA_VERSION = 2
_SCHEMA = (
    # `size` is that of a payload's file, 0 without one. Long columns stand last: SQLite reads all
    # pages of those before the column that it wants.
    "CREATE TABLE Pack (key BLOB PRIMARY KEY, last_s REAL NOT NULL, credit_s REAL NOT NULL,"
    " num_uses INTEGER NOT NULL, num_followed INTEGER NOT NULL, file TEXT,"
    " size INTEGER NOT NULL, parent BLOB NOT NULL, block_size INTEGER NOT NULL,"
    " block_bytes INTEGER NOT NULL, is_draft INTEGER NOT NULL, checksum BLOB NOT NULL,"
    " fingerprint BLOB, ids BLOB NOT NULL, payload BLOB)",
    "CREATE INDEX Pack_size ON Pack (size)",
    "CREATE TABLE Pin (label BLOB PRIMARY KEY, made_s REAL NOT NULL, until_s REAL NOT NULL,"
    " keys BLOB NOT NULL)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
# Before the tables are made: their pages, and that deleted rows make the file shorter.
_FILE_SETTINGS = (f"PRAGMA page_size = {PAGE_BYTES}", "PRAGMA auto_vacuum = FULL")
# If another process truncates a mapped table, the reading process is killed: nothing is mapped.
# A commit is not synced, only the log before it is copied: a power cut can lose the last packs.
_CONNECTION_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    # An evicted pack has text that the user may delete later: no page keeps it.
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


_USE = "last_s, credit_s, num_uses, num_followed"
_PACK = f"""
    SELECT key, {_USE}, file, parent, block_size, block_bytes, is_draft, checksum, fingerprint, ids
    FROM Pack
"""


class PackRows:
    """Reads the table of `identity` through a connection, which is its owner's. Raises what SQLite
    raises, and DamagedRecord for a row that no pack has.
    """

    def __init__(self, identity: bytes, connection: sqlite3.Connection) -> None:
        self._identity = identity
        self._connection = connection

    def _execute(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()

    def row(self, key: bytes) -> PackRow | None:
        """Return the pack that begins with a block; None if there is none."""
        for columns in self._execute(f"{_PACK} WHERE key = ?", (key,)):
            return self._row(columns)
        return None

    def rows(self) -> Iterator[tuple[Any, PackRow | None]]:
        """Yield every pack by its key, the one written first first; None for a damaged row, whose
        key may be anything.
        """
        for columns in self._execute(f"{_PACK} ORDER BY rowid"):
            try:
                yield columns[0], self._row(columns)
            except DamagedRecord:
                yield columns[0], None

    def leading(
        self, keys: Sequence[bytes], encoded: bytes, block_size: int
    ) -> Iterator[tuple[PackRow, int]]:
        """Yield the packs of leading blocks, in order and without a hole, each with how many of its
        blocks are among them.

        `keys` are the chain keys of blocks of `block_size` token ids, `encoded` these ids.
        """
        block = 0
        while block < len(keys):
            row = self.row(keys[block])
            if row is None or row.layout.block_size != block_size:
                return
            if not (shared := row.head.num_shared(encoded, block, row.layout)):
                return
            yield row, shared
            block += shared

    def use(self, key: bytes) -> Use | None:
        """Return a pack's uses, None if there is no such pack."""
        found = self._execute(f"SELECT {_USE} FROM Pack WHERE key = ?", (key,))
        return _use_of(found[0]) if found else None

    def pins(self) -> list[Pin]:
        """Return all pins that can be read, the oldest first."""
        found = self._execute("SELECT label, made_s, until_s, keys FROM Pin ORDER BY rowid")
        return [pin for columns in found if (pin := _pin(*columns)) is not None]

    def _row(self, columns: tuple[Any, ...]) -> PackRow:
        key, *use, file, parent, block_size, block_bytes, is_draft, checksum, fingerprint, ids = (
            columns
        )
        if not all(type(each) is bytes for each in (key, parent, checksum, ids)):
            raise DamagedRecord("no head")
        if not all(type(each) is int and each > 0 for each in (block_size, block_bytes)):
            raise DamagedRecord("no geometry")
        layout = Layout(self._identity, block_size, block_bytes)
        if len(key) != KEY_BYTES or not ids or len(ids) % layout.ids_bytes:
            raise DamagedRecord("truncated")
        head = PackHead(parent, ids, checksum, read_fingerprint(fingerprint), bool(is_draft))
        return PackRow(key, layout, head, _use_of(use), file if isinstance(file, str) else None)


_ENTER = f"INSERT OR REPLACE INTO Pack VALUES ({', '.join(15 * '?')})"
_MOST_REMOVED = 4
_MOST_TEMPORARY = 16  # pins that end by themselves soon, and as many that last for days


class PackTable(PackRows):
    """One identity's packs, in the directory `directory`, which exists and is ours, and has the
    identity for its name.

    It waits up to `patience_s` for other processes that write. One thread at a time uses it. Raises
    what SQLite and the file system raise; if it cannot be opened, it leaves nothing open.
    """

    def __init__(self, directory: Path, patience_s: float) -> None:
        self.files = PayloadFiles(directory)
        try:
            connection = sqlite3.connect(
                directory / DATABASE,
                timeout=patience_s,
                isolation_level=None,
                check_same_thread=False,
            )
        except BaseException:
            self.files.close()
            raise
        super().__init__(bytes.fromhex(directory.name), connection)
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

    def image(self, row: PackRow, buffers: ReadBuffers) -> memoryview:
        """Return a pack's payload, not checked; a file's in memory of `buffers`.

        Raises DamagedRecord where it is coded and its code is damaged.
        """
        if row.file is not None:
            payload = self.files.read(row.file, buffers.take)
            return _decoded(row, payload, buffers) if is_coded(row.file) else payload
        query = "SELECT payload FROM Pack WHERE key = ?"
        for (data,) in self._execute(query, (row.key,)):
            return memoryview(data if isinstance(data, bytes) else b"")
        return memoryview(b"")

    def keep(self, row: PackRow, image: memoryview) -> None:
        """Enter a pack, in place of one of the same key: all of it, or nothing. `row.file` does not
        count.
        """
        file, size, data = None, 0, None
        if len(image) < MIN_FILE_BYTES:
            data = image
        else:
            file, size = self.files.write(image), len(image)
        head, layout = row.head, row.layout
        columns = (
            *(row.key, *_columns(row.use), file, size),
            *(head.parent, layout.block_size, layout.block_bytes, head.is_draft, head.checksum),
            *(fingerprint_bytes(head), head.ids, data),
        )
        try:
            with self._transaction():
                old = self._execute("SELECT file FROM Pack WHERE key = ?", (row.key,))
                self._execute(_ENTER, columns)
        except BaseException:
            self.files.remove(file)
            raise
        for (name,) in old:
            self.files.remove(name)

    def used_least(self, before_s: float) -> bytes | None:
        """Return the key of the pack used least recently before a time whose payload is in a file
        and is not coded; None without one.
        """
        query = "SELECT key FROM Pack WHERE file GLOB ? AND last_s < ? ORDER BY last_s LIMIT 1"
        for (key,) in self._execute(query, (f"*{PLAIN}", before_s)):
            return key if isinstance(key, bytes) else None
        return None

    def replace_payload(self, row: PackRow, coded: memoryview) -> None:
        """Put a coded payload in the place of a pack's file: all of it, or nothing."""
        file = self.files.write(coded, CODED)
        try:
            change = "UPDATE Pack SET file = ?, size = ? WHERE key = ? AND file = ?"
            self._execute(change, (file, len(coded), row.key, row.file))
        except BaseException:
            self.files.remove(file)
            raise
        self.files.remove(row.file)

    def remove(self, *keys: Any) -> None:
        """Forget packs, a few at a time: what one change adds to the log stays small."""
        for start in range(0, len(keys), _MOST_REMOVED):
            self._remove(keys[start : start + _MOST_REMOVED])

    def _remove(self, keys: tuple[Any, ...]) -> None:
        """Forget packs: all of them, or none."""
        files: list[tuple[object]] = []
        with self._transaction():
            for key in keys:
                files += self._execute("SELECT file FROM Pack WHERE key = ?", (key,))
                self._execute("DELETE FROM Pack WHERE key = ?", (key,))
        for (file,) in files:
            self.files.remove(file)

    def num_packs(self) -> int:
        """Return how many packs there are."""
        return self._number("SELECT COUNT(*) FROM Pack")

    def payload_files(self) -> tuple[int, int]:
        """Return how many payloads are files, and the length of all of these."""
        [(count, num_bytes)] = self._execute("SELECT COUNT(*), SUM(size) FROM Pack WHERE size > 0")
        return count, int(num_bytes or 0)

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

    def _set_use(self, key: bytes, use: Use) -> None:
        change = "SET last_s = ?, credit_s = ?, num_uses = ?, num_followed = ? WHERE key = ?"
        self._execute(f"UPDATE Pack {change}", (*_columns(use), key))

    # Pins

    def pin(self, pin: Pin) -> None:
        """Enter a pin, in place of one of the same label.

        A temporary one also takes the place of those that it covers; over the limit those of its
        kind, lasting or not, go that end first.
        """
        columns = (_label_bytes(pin.label), pin.made_s, pin.until_s, b"".join(pin.keys))
        self._execute("INSERT OR REPLACE INTO Pin VALUES (?, ?, ?, ?)", columns)
        if pin.is_temporary:
            others = [p for p in self.pins() if p.is_temporary and p.label != pin.label]
            covered = [other for other in others if pin.covers(other)]
            alike = (p for p in others if p not in covered and p.is_lasting == pin.is_lasting)
            rest = sorted(alike, key=lambda p: p.until_s)
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
        self._execute("DELETE FROM Pin WHERE label = ?", (_label_bytes(label),))


def _decoded(row: PackRow, payload: memoryview, buffers: ReadBuffers) -> memoryview:
    num_bytes = row.head.num_blocks(row.layout) * row.layout.block_bytes
    if num_bytes > MAX_FILE_BYTES:
        raise DamagedRecord("no geometry")
    # numpy takes 0.1 s, and most packs are not coded.
    from kvchat.cache.disk.pack_code import decode

    image = buffers.take(num_bytes)
    decode(payload, image)
    return image


def _label_bytes(label: str) -> bytes:
    """Return a pin's label as the table has it."""
    return label.encode(errors="replace")


def _columns(use: Use) -> tuple[float, float, int, int]:
    return use.last_s, use.credit_s, use.num_uses, use.num_followed


def _use_of(columns: Sequence[Any]) -> Use:
    """Return what the columns of a row say of its uses."""
    last_s, credit_s, num_uses, num_followed = (
        value if isinstance(value, int | float) else 0 for value in columns
    )
    return Use(float(last_s), float(credit_s), int(num_uses) or 1, int(num_followed))


def _pin(label: object, made_s: object, until_s: object, keys: object) -> Pin | None:
    """Return a pin as it was made; None for anything else."""
    if not (isinstance(label, bytes) and isinstance(keys, bytes) and len(keys) % KEY_BYTES == 0):
        return None
    if not (isinstance(made_s, int | float) and isinstance(until_s, int | float)):
        return None
    each = tuple(keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))
    return Pin(label.decode(errors="replace"), each, made_s, until_s)
