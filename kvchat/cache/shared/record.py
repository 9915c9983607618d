"""The head of a record as bytes: which blocks it has, whose KV that is, and when it was written."""

import struct
from dataclasses import dataclass

from kvchat.cache.disk.pack_rows import fingerprint_bytes, read_fingerprint
from kvchat.cache.keys import KEY_BYTES
from kvchat.cache.tier import DamagedRecord, Layout, PackHead

# When it was written, in seconds since the epoch, and the bytes of the ids and of the fingerprint.
_FORM = struct.Struct("<dII")
_CHECKSUM_BYTES = 16
_START = _FORM.size + KEY_BYTES + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The head of a pack in a shared store; `written_s` is in seconds since the epoch."""

    pack: PackHead
    written_s: float

    def encoded(self) -> bytes:
        """Return it as bytes, not sealed."""
        pack = self.pack
        fingerprint = fingerprint_bytes(pack) or b""
        sizes = _FORM.pack(self.written_s, len(pack.ids), len(fingerprint))
        return b"".join((sizes, pack.parent, pack.checksum, pack.ids, fingerprint))

    @classmethod
    def of(cls, encoded: memoryview, layout: Layout) -> "RecordHead":
        """Return the head of opened bytes; raises DamagedRecord if they are none."""
        if len(encoded) < _START:
            raise DamagedRecord("truncated")
        written_s, num_ids, num_fingerprint = _FORM.unpack_from(encoded)
        parent = bytes(encoded[_FORM.size : _FORM.size + KEY_BYTES])
        checksum = bytes(encoded[_FORM.size + KEY_BYTES : _START])
        ids = bytes(encoded[_START : _START + num_ids])
        fingerprint = bytes(encoded[_START + num_ids :])
        is_whole = len(ids) == num_ids and len(fingerprint) == num_fingerprint
        if not is_whole or not ids or num_ids % layout.ids_bytes:
            raise DamagedRecord("truncated")
        known = read_fingerprint(fingerprint or None)
        return cls(PackHead(parent, ids, checksum, known), written_s)
