"""PackTable: a table whose rows are packs, and pins.

A pack has two rows under its first block's key: its payload, a file if it is large, and its head,
so that a head vouches for a payload. Columns that diskcache has no use for here say how a pack was
used, without a word of what is in it. Knows rows; knows no bounds and no damage.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvchat.cache.own_directory import PIN_MARK
from kvchat.cache.pin_record import Pin, decode_pin, encode_pin, pin_name
from kvchat.cache.raw_disk import FILE_MODE, MAX_FILE_BYTES, PAGE_BYTES, Parts, RawCache
from kvchat.cache.read_buffers import ReadBuffers
from kvchat.cache.retention import Use, used_again
from kvchat.core.paths import open_private

HEAD, PAYLOAD, PIN = b"h", b"p", b"n"
_HEADS = "WHERE key >= x'68' AND key < x'69'"
_HEAD_AND_FILE = (
    "SELECT h.expire_time, h.mode, h.filename, h.value, p.filename FROM Cache h"
    " LEFT JOIN Cache p ON p.key = ? AND p.raw = 1 WHERE h.key = ? AND h.raw = 1"
)
_ROW = "FROM Cache WHERE key = ? AND raw = 1"
_MOST_REMOVED = 4
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

        `file` is where it was when its head was read, None where nobody has asked.
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
        """Remember which packs were used, and whether only by somebody who asks once and leaves."""
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
        """Enter a pin, in place of one of the same label."""
        self.set(PIN + pin_name(pin.label), encode_pin(pin))
        os.close(open_private(Path(PIN_MARK), os.O_WRONLY | os.O_CREAT, self.disk.descriptor))

    def unpin(self, label: str) -> None:
        """Remove the pin of a label."""
        self.delete(PIN + pin_name(label))
        if not self.pins():
            with suppress(FileNotFoundError):
                os.unlink(PIN_MARK, dir_fd=self.disk.descriptor)
