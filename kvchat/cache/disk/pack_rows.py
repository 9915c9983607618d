"""PackRow and Pin: what a row of a table says, and the checksum that tells whether a pack is whole.

A pack is consecutive blocks of one chain, in one row: its *head* (the key of the block before, the
token ids, whose KV it is), how it was used, and its payload, the block images, or the name of the
payload's file. A checksum over all of these but the uses tells whether a pack is whole; it has the
key in it, so a pack under the key of another one is damaged. A pin names the blocks of a context
that must not be evicted, for ever or for a time. A damaged table has anything in any column.
Nothing here is ever unpickled.
"""

import math
import struct
from dataclasses import dataclass

import xxhash

from kvchat.cache.disk.eviction import Use
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
