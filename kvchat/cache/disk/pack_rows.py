"""PackRows: the packs and pins of one table, as any connection to it reads them.

A pack is consecutive blocks of one chain, in one row: its *head* (the key of the block before, the
token ids, whose KV it is), how it was used, and its payload, the block images, or the name of the
payload's file. A checksum over all of these but the uses tells whether a pack is whole; it has the
key in it, so a pack under the key of another one is damaged. A pin names the blocks of a context
that must not be evicted, for ever or for a time. A damaged table has anything in any column.
Nothing here is ever unpickled.
"""

import math
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvchat.cache.disk.eviction import Use
from kvchat.cache.keys import KEY_BYTES
from kvchat.cache.tier import DamagedRecord, Layout, LogitFingerprint, PackHead

# A token id and its logit.
_FINGERPRINT_ENTRY = struct.Struct("<if")


@dataclass(frozen=True, slots=True)
class PackRow:
    """One pack. `file` is the name of its payload's file, None if the payload is in the table."""

    key: bytes
    layout: Layout
    head: PackHead
    use: Use
    file: str | None


def checksum_of(key: bytes, head: PackHead, image: bytes | bytearray | memoryview) -> bytes:
    """Return the 16 bytes that stand for a pack; `key` is the first block's."""
    digest = xxhash.xxh3_128(b"".join((key, head.parent, head.ids, fingerprint_bytes(head) or b"")))
    digest.update(image)
    return digest.digest()


def require_whole(row: PackRow, image: memoryview) -> None:
    """Raise DamagedRecord unless the images are those that the row was written with."""
    if len(image) != row.head.num_blocks(row.layout) * row.layout.block_bytes:
        raise DamagedRecord("truncated")
    if checksum_of(row.key, row.head, image) != row.head.checksum:
        raise DamagedRecord("checksum")


def fingerprint_bytes(head: PackHead) -> bytes | None:
    """Return what the table has for the fingerprint of a head."""
    if head.fingerprint is None:
        return None
    entries = zip(head.fingerprint.token_ids, head.fingerprint.values, strict=True)
    return b"".join(_FINGERPRINT_ENTRY.pack(token, value) for token, value in entries)


def read_fingerprint(data: object) -> LogitFingerprint | None:
    if data is None:
        return None
    if not (isinstance(data, bytes) and data) or len(data) % _FINGERPRINT_ENTRY.size:
        raise DamagedRecord("no fingerprint")
    token_ids, values = zip(*_FINGERPRINT_ENTRY.iter_unpack(data), strict=True)
    return LogitFingerprint(token_ids, values)


_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Pin:
    """`keys` are the chain keys of the context's full blocks.

    made_s, until_s   when it was made and when it ends, in seconds since the epoch; infinity: never
    """

    label: str
    keys: tuple[bytes, ...]
    made_s: float
    until_s: float = math.inf

    @property
    def is_temporary(self) -> bool:
        return self.until_s < math.inf

    @property
    def is_lasting(self) -> bool:
        """Whether it ends by itself, but days later: what all sessions of an agent begin with."""
        return self.is_temporary and self.until_s - self.made_s > _DAY_S

    def covers(self, other: "Pin") -> bool:
        """Return whether all that `other` holds is held by this pin, for as long."""
        return self.keys[: len(other.keys)] == other.keys and self.until_s >= other.until_s


def label_bytes(label: str) -> bytes:
    """Return a pin's label as the table has it."""
    return label.encode(errors="replace")


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
