"""PackTable: diskcache's SQLite table, its rows packs and pins, its values bytes and nothing else.

diskcache pickles what it does not know and creates files everybody may read; RawDisk and RawCache
make either impossible. A pack has two rows under its first block's key: its payload, a file if it
is large, and its head, so that a head vouches for a payload. Columns that diskcache has no use for
here say how a pack was used, without a word of what is in it.
"""

import logging
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diskcache

from kvchat.cache.disk.eviction import Use, used_again
from kvchat.cache.disk.format import Pin, decode_pin, encode_pin, pin_name
from kvchat.cache.disk.model_dirs import DATABASE, PACK_FILE, PIN_MARK, has_only_files
from kvchat.cache.page_memory import ReadBuffers
from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private

_log = logging.getLogger(__name__)

_RAW, FILE_MODE = 1, 2  # diskcache's numbers for a value in the table, and for one in a file
# No pack comes near it. A file that claims to be longer is damaged, and must not fill the memory.
MAX_FILE_BYTES = 1 << 28
# What is smaller stays in the table.
MIN_FILE_BYTES = 1 << 16
# After so many pages of it the log's content goes into the table, and the log begins anew.
LOG_PAGES, PAGE_BYTES = 32, 4096

# What passes, or what emptying the store would not mend. Everything else is the table's fault.
_PASSING = (OSError, diskcache.Timeout, StoreError, MemoryError, sqlite3.ProgrammingError)
_PASSING_CODES = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_INTERRUPT,
}


@dataclass(frozen=True, slots=True)
class Parts:
    """A value in two parts, so that it need not be copied into one buffer."""

    prefix: bytes
    rest: memoryview

    def __len__(self) -> int:
        return len(self.prefix) + len(self.rest)


class RawDisk(diskcache.Disk):
    """Keys and values are bytes; large values are files of mode 0600.

    The directory is held by its descriptor as long as the disk lives: what is put in the place of
    its name meanwhile is neither read nor written. `has_leftovers` says that there may be files
    that the table does not count, as those that could not be removed: until a sweep has removed
    all of them, and before the first, only a search tells what the directory takes.
    """

    def __init__(self, directory: str, **settings: Any) -> None:
        super().__init__(directory, **settings)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(directory, flags)
        self.has_leftovers = True
        # Closes the descriptor: when it is called, or else when the disk is no longer referenced.
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def release(self) -> None:
        """Close the directory, for good: its descriptor's number may soon be another file's."""
        self._close()
        self.descriptor = -1

    def put(self, key: object) -> tuple[Any, bool]:
        if not isinstance(key, bytes):
            raise TypeError("a key is bytes")
        return sqlite3.Binary(key), True

    def get(self, key: Any, raw: bool) -> bytes:
        if not isinstance(key, bytes) or not raw:
            raise TypeError("a key is bytes")
        return key

    def store(
        self, value: object, read: bool, key: object = None
    ) -> tuple[int, int, str | None, Any]:
        if not isinstance(value, bytes | Parts) or read:
            raise TypeError("a value is bytes")
        parts = Parts(value, memoryview(b"")) if isinstance(value, bytes) else value
        if len(parts) < self.min_file_size:
            return 0, _RAW, None, sqlite3.Binary(b"".join((parts.prefix, parts.rest)))
        name = self._new_file(parts)
        return len(parts), FILE_MODE, name, None

    def _new_file(self, parts: Parts) -> str:
        name = f"{os.urandom(16).hex()}.kv"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                _write_all(file, parts.prefix)
                _write_all(file, parts.rest)
        except OSError:
            self.remove(name)
            raise
        return name

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes | bytearray:
        """Return a value; one that diskcache would have to unpickle reads as nothing."""
        _, data = self.read_parts((mode, filename, value), 0, lambda n: memoryview(bytearray(n)))
        return value if isinstance(value, bytes) and mode == _RAW else bytes(data)

    def read_parts(
        self, row: tuple[Any, ...], prefix_bytes: int, take: Callable[[int], memoryview]
    ) -> tuple[bytes, memoryview]:
        """Return the first bytes of a value, and the rest of it in memory that `take` gives.

        `row` is its mode, file name and value. A value that is too long or too short, or in a file
        of another user, has no rest.
        """
        mode, filename, value = row
        if mode == _RAW and isinstance(value, bytes):
            return value[:prefix_bytes], memoryview(value)[prefix_bytes:]
        if mode != FILE_MODE or not is_pack_file(filename):
            return b"", memoryview(b"")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(str(filename), flags, dir_fd=self.descriptor)
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

    def remove(self, file_path: str) -> None:
        if is_pack_file(file_path):
            try:
                os.unlink(file_path, dir_fd=self.descriptor)
            except FileNotFoundError:  # another process has removed it already
                pass
            except OSError as error:
                self.has_leftovers = True
                _log.warning("a file of a pack could not be removed: %s", error.strerror)


class RawCache(diskcache.Cache):
    """diskcache's table over a RawDisk: it evicts nothing by itself and maps no file.

    If another process truncates a mapped table, the reading process is killed. A table that cannot
    be opened leaves nothing open: the error, and with it the table, may be kept for long.
    """

    def __init__(self, directory: Path, patience_s: float) -> None:
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []  # of all threads
        self._connected_in = os.getpid()
        try:
            self._open(directory, patience_s)
        except BaseException:
            self.abandon()
            raise

    def _open(self, directory: Path, patience_s: float) -> None:
        super().__init__(
            str(directory),
            timeout=patience_s,
            disk=RawDisk,
            disk_min_file_size=MIN_FILE_BYTES,
            eviction_policy="none",
            cull_limit=0,
            size_limit=1 << 62,
            statistics=0,
            tag_index=0,
            sqlite_mmap_size=0,
            sqlite_wal_autocheckpoint=LOG_PAGES,
        )

    def abandon(self) -> None:
        """Close all there is, for good: the connections of all threads, of which none may be using
        its own, and the directory.
        """
        connections, self._connections = self._connections, []
        self._local = threading.local()
        for connection in connections:
            connection.close()
        if hasattr(self, "_disk"):
            self._disk.release()

    def take_over(self) -> None:
        """Give a thread without a connection that of the thread that used the table until now.

        In a process that was forked since, diskcache sees so and opens one of its own.
        """
        if self._connections and getattr(self._local, "con", None) is None:
            self._local.con, self._local.pid = self._connections[-1], self._connected_in

    @property
    def _con(self) -> sqlite3.Connection:
        """The thread's connection: where there is none yet, or none any more, one is opened, by
        the table's name. What was put in the place of its directory is not opened.
        """
        disk: RawDisk | None = getattr(self, "_disk", None)
        if disk is not None and getattr(self._local, "con", None) is None:
            held, named = os.fstat(disk.descriptor), os.lstat(self.directory)
            if not os.path.samestat(held, named):
                raise StoreError(f"{self.directory} was exchanged.")
            if not has_only_files(Path(self.directory)):  # SQLite would wait for a named pipe
                raise StoreError(f"In {self.directory} no table can be opened.")
        if getattr(self._local, "con", None) is None:
            self._connect()
        connection: sqlite3.Connection = super()._con
        return connection

    def _connect(self) -> None:
        """Open the thread's connection as diskcache does, but so that every thread can close it.

        One that is only forgotten stays open: it is part of a reference cycle.
        """
        path = os.path.join(self.directory, DATABASE)
        self._local.pid = self._connected_in = os.getpid()
        connection = self._local.con = sqlite3.connect(
            path, timeout=self._timeout, isolation_level=None, check_same_thread=False
        )
        self._connections.append(connection)
        try:
            settings = connection.execute("SELECT key, value FROM Settings").fetchall()
        except sqlite3.OperationalError:  # the table is only about to be made
            return
        for key, value in settings:
            if key.startswith("sqlite_"):
                self.reset(key, value, update=False)

    def read_parts(
        self, row: tuple[Any, ...], prefix_bytes: int, take: Callable[[int], memoryview]
    ) -> tuple[bytes, memoryview]:
        """Return a value in two parts, as `RawDisk.read_parts` does."""
        disk: RawDisk = self.disk
        return disk.read_parts(row, prefix_bytes, take)

    def take_back(self) -> None:
        """Roll back a failed transaction: while it is open, no other process can write."""
        if self._con.in_transaction:
            self._con.rollback()

    def sweep(self) -> None:
        """Remove files that the table does not have with this name and size, under the lock.

        If one cannot be removed, the disk still has leftovers.
        """
        rows = self._sql("SELECT filename, size FROM Cache WHERE filename IS NOT NULL")
        known = dict(rows.fetchall())
        if sum(known.values()) != self.reset("size"):
            raise ValueError("the table has lost count of its files")
        names = list(filter(is_pack_file, os.listdir(self.disk.descriptor)))
        unknown = [name for name in names if self._is_unknown(name, known.get(name))]
        self.disk.has_leftovers = False
        for name in unknown:
            self.disk.remove(name)

    def _is_unknown(self, name: str, known_bytes: int | None) -> bool:
        """Whether a file is not one of `known_bytes`; what is no file is not ours."""
        with suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=self.disk.descriptor, follow_symlinks=False)
            return info.st_size != known_bytes and not stat.S_ISDIR(info.st_mode)
        return False


def is_pack_file(name: object) -> bool:
    """Whether a table's file name is one that a RawDisk gives."""
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


def is_busy(error: Exception) -> bool:
    """Whether another process kept the table locked until the timeout."""
    if isinstance(error, sqlite3.Error):
        codes = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in codes
    return isinstance(error, diskcache.Timeout)


def is_passing(error: Exception) -> bool:
    """Whether an error is the machine's, and not the fault of what a table holds.

    So is one that came of handling such an error: where the disk is full SQLite takes a change
    back by itself, and diskcache, taking it back again, fails with an error of its own.
    """
    before = error.__context__
    if isinstance(before, Exception) and is_passing(before):
        return True
    if isinstance(error, sqlite3.Error) and not isinstance(error, _PASSING):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING_CODES
    return isinstance(error, _PASSING)


HEAD, PAYLOAD, PIN = b"h", b"p", b"n"
_HEADS = "WHERE key >= x'68' AND key < x'69'"
_HEAD_AND_FILE = (
    "SELECT h.expire_time, h.mode, h.filename, h.value, p.filename FROM Cache h"
    " LEFT JOIN Cache p ON p.key = ? AND p.raw = 1 WHERE h.key = ? AND h.raw = 1"
)
_ROW = "FROM Cache WHERE key = ? AND raw = 1"
_MOST_REMOVED = 4
_MOST_TEMPORARY = 16  # pins that end by themselves
_USE = "store_time, access_time, access_count, tag"


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack as the table has it: its name, its head as stored, and its uses.

    A head that is out of date, or gone, is empty.
    """

    key: bytes
    head: bytes
    use: Use


def use_of(columns: tuple[Any, ...]) -> Use:
    """Return what the columns of a row say of its uses; a damaged table says anything."""
    last_s, credit_s, num_uses, num_followed = (
        value if isinstance(value, int | float) else 0 for value in columns
    )
    return Use(float(last_s), float(credit_s), int(num_uses) or 1, int(num_followed))


class PackTable(RawCache):
    """One identity's packs. Raises what SQLite and the file system raise."""

    # Packs

    def head(self, key: bytes) -> tuple[bytes, str | None] | None:
        """Return a pack's head as it was stored, and the file of its payload, if that is one.

        What is out of date, or whose file is gone, is not there.
        """
        row = self._sql(_HEAD_AND_FILE, (PAYLOAD + key, HEAD + key)).fetchone()
        if row is None:
            return None
        expires, mode, filename, value, payload_file = row
        is_out_of_date = isinstance(expires, int | float) and expires < time.time()
        data = b"" if is_out_of_date else self._value(mode, filename, value)
        return (data, payload_file if isinstance(payload_file, str) else None) if data else None

    def payload(
        self, key: bytes, file: str | None, prefix_bytes: int, buffers: ReadBuffers
    ) -> tuple[bytes, memoryview] | None:
        """Return the beginning of a pack's payload, and the rest of it in memory of `buffers`.

        `file` is the name it had when its head was read, None if the head was not read.
        """
        row = (FILE_MODE, file, None) if file is not None else self._payload_row(key)
        return self.read_parts(row, prefix_bytes, buffers.take) if row is not None else None

    def _payload_row(self, key: bytes) -> tuple[Any, ...] | None:
        query = "SELECT mode, filename, value FROM Cache WHERE key = ? AND raw = 1"
        row: tuple[Any, ...] | None = self._sql(query, (PAYLOAD + key,)).fetchone()
        return row

    def keep(self, key: bytes, head: bytes, payload: Parts, use: Use) -> None:
        """Enter a pack: all of it, or nothing."""
        with self.transact():
            self.set(PAYLOAD + key, payload)
            self.set(HEAD + key, head, tag=0)
            self._set_use(key, use)

    def remove(self, *keys: bytes) -> None:
        """Forget packs, a few at a time: what one change adds to the log stays small."""
        for start in range(0, len(keys), _MOST_REMOVED):
            self._remove(keys[start : start + _MOST_REMOVED])

    def _remove(self, keys: tuple[bytes, ...]) -> None:
        """Forget packs: all of them, or none."""
        files: list[tuple[object]] = []
        with self.transact():
            for name in (kind + key for key in keys for kind in (HEAD, PAYLOAD)):
                files += self._sql(f"SELECT filename {_ROW}", (name,)).fetchall()
                self._sql(f"DELETE {_ROW}", (name,))
        for (file,) in files:
            if isinstance(file, str):
                self.disk.remove(file)

    def rows(self) -> Iterator[PackRow]:
        """Yield every pack."""
        query = f"SELECT key, expire_time, mode, filename, value, {_USE} FROM Cache {_HEADS}"
        for key, expires, mode, filename, value, *use in self._sql(query).fetchall():
            is_out_of_date = isinstance(expires, int | float) and expires < time.time()
            data = b"" if is_out_of_date else self._value(mode, filename, value)
            yield PackRow(bytes(key)[1:], data, use_of(tuple(use)))

    def _value(self, mode: int, filename: str | None, value: Any) -> bytes:
        """Return what a row holds; nothing where its file is gone."""
        try:
            return bytes(self.disk.fetch(mode, filename, value, False))
        except OSError:
            return b""

    def num_packs(self) -> int:
        """Return how many heads there are."""
        [(count,)] = self._sql(f"SELECT COUNT(*) FROM Cache {_HEADS}").fetchall()
        return int(count)

    def num_files(self) -> int:
        """Return how many values are files."""
        query = "SELECT COUNT(*) FROM Cache WHERE filename IS NOT NULL"
        [(count,)] = self._sql(query).fetchall()
        return int(count)

    def num_bytes(self) -> int:
        """Return how long the table is once all that is in the log is in it."""
        [(num_pages,)] = self._sql("PRAGMA page_count").fetchall()
        return int(num_pages) * PAGE_BYTES

    def largest(self) -> int:
        """Return the size of the largest payload that can be one; a damaged table says anything."""
        query = "SELECT MAX(size) FROM Cache WHERE filename IS NOT NULL AND size <= ?"
        [(size,)] = self._sql(query, (MAX_FILE_BYTES,)).fetchall()
        return int(size or 0)

    def drop_payloads(self) -> None:
        """Remove payloads without a head: no eviction would ever meet them."""
        names = list(self)
        heads = {name[1:] for name in names if name[:1] == HEAD}
        for name in names:
            if name[1:] not in heads and name[:1] != PIN:
                self.delete(name)

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """While entered what is removed is overwritten; afterwards the log has nothing of it."""
        self._sql("PRAGMA secure_delete = ON").fetchall()
        try:
            yield
        finally:
            self._sql("PRAGMA secure_delete = OFF").fetchall()
            self.shorten_log()

    def shorten_log(self) -> None:
        """Have all that is in the log in the table alone, unless others are reading it."""
        self._sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # Uses

    def note_uses(self, one_shot_uses: Mapping[bytes, bool], now_s: float) -> None:
        """Record which packs were used, and whether only by one-shot requests."""
        with self.transact():
            for key, is_one_shot in one_shot_uses.items():
                if (use := self.use(key)) is not None:
                    self._set_use(key, used_again(use, now_s, is_one_shot))

    def note_followed(self, key: bytes | None) -> None:
        """Remember that another pack was written behind this one, if there is one."""
        if key is not None and (use := self.use(key)) is not None:
            self._set_use(key, replace(use, num_followed=use.num_followed + 1))

    def use(self, key: bytes) -> Use | None:
        """Return what is known of a pack's uses, None where it is gone."""
        query = f"SELECT {_USE} FROM Cache WHERE key = ? AND raw = 1"
        row = self._sql(query, (HEAD + key,)).fetchone()
        return use_of(row) if row is not None else None

    def _set_use(self, key: bytes, use: Use) -> None:
        self._sql(
            "UPDATE Cache SET store_time = ?, access_time = ?, access_count = ?, tag = ?"
            " WHERE key = ? AND raw = 1",
            (
                *(use.last_s, use.credit_s, use.num_uses, use.num_followed),
                HEAD + key,
            ),
        )

    # Pins

    def pins(self) -> list[Pin]:
        """Return all pins that can be read."""
        names = [name for name in self if name[:1] == PIN]
        records = (self.get(name) for name in names)
        found = (decode_pin(data) for data in records if data is not None)
        return [pin for pin in found if pin is not None]

    def pin(self, pin: Pin) -> None:
        """Enter a pin, in place of one of the same label.

        A temporary one also takes the place of those that it covers; the oldest over the limit go.
        """
        self.set(PIN + pin_name(pin.label), encode_pin(pin))
        if pin.is_temporary:
            others = [p for p in self.pins() if p.is_temporary and p.label != pin.label]
            covered = [other for other in others if pin.covers(other)]
            rest = sorted((p for p in others if p not in covered), key=lambda p: p.made_s)
            old = rest[: max(0, len(rest) + 1 - _MOST_TEMPORARY)]
            for other in (*covered, *old):
                self.delete(PIN + pin_name(other.label))
        else:
            os.close(open_private(Path(PIN_MARK), os.O_WRONLY | os.O_CREAT, self.disk.descriptor))

    def end_pins(self, now_s: float) -> None:
        """Remove the temporary pins whose time is over."""
        for pin in self.pins():
            if pin.until_s <= now_s:
                self.delete(PIN + pin_name(pin.label))

    def unpin(self, label: str) -> None:
        """Remove the pin of a label."""
        self.delete(PIN + pin_name(label))
        if all(pin.is_temporary for pin in self.pins()):
            with suppress(FileNotFoundError):
                os.unlink(PIN_MARK, dir_fd=self.disk.descriptor)
