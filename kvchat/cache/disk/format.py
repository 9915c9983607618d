"""The byte format of the disk tier: packs and pins.

A pack is consecutive blocks of one chain, in two records. The *head* has the key of the block
before and the token ids; the *payload* holds the block images. A damaged record raises
DamagedRecord. A head may have a *fingerprint*: the largest logits after the pack's last token, to
verify restored KV. A pin names the blocks of a context that must not be evicted, for ever or for a
time; a damaged pin is ignored. Nothing here is ever unpickled.
"""

import math
import struct
from dataclasses import dataclass

import xxhash

from kvchat.cache.keys import KEY_BYTES
from kvchat.cache.tier import DamagedRecord, Layout, LogitFingerprint, PackHead

FORMAT_VERSION = 3
_HEAD_MAGIC = b"KVhd"
_PAYLOAD_MAGIC = b"KVpl"
# magic, version, identity, parent key, blocks, tokens a block, bytes an image, payload checksum,
# entries of the fingerprint, whether the KV is a draft's
_HEAD = struct.Struct("<4sI16s16sIIQ16sI?")
# a token id and its logit
_FINGERPRINT_ENTRY = struct.Struct("<if")
_HEAD_CHECKSUM_BYTES = 8
# magic, version, identity, key of the first block, length, checksum
_PAYLOAD = struct.Struct("<4sI16s16sQ16s")
PREFIX_BYTES = _PAYLOAD.size


class OtherGeometry(DamagedRecord):
    """A head that is sound, for blocks of another shape than was asked for."""


def encode_head(head: PackHead, layout: Layout) -> bytes:
    """Return the head as bytes."""
    assert head.ids
    assert len(head.ids) % layout.ids_bytes == 0
    fixed = _HEAD.pack(
        _HEAD_MAGIC,
        FORMAT_VERSION,
        layout.identity,
        head.parent,
        head.num_blocks(layout),
        layout.block_size,
        layout.block_bytes,
        head.checksum,
        len(head.fingerprint.values) if head.fingerprint is not None else 0,
        head.is_draft,
    )
    data = fixed + head.ids + _encode_fingerprint(head.fingerprint)
    return data + _head_checksum(data)


def _encode_fingerprint(fingerprint: LogitFingerprint | None) -> bytes:
    if fingerprint is None:
        return b""
    entries = zip(fingerprint.token_ids, fingerprint.values, strict=True)
    return b"".join(_FINGERPRINT_ENTRY.pack(token, value) for token, value in entries)


def _decode_fingerprint(data: bytes) -> LogitFingerprint | None:
    if not data:
        return None
    token_ids, values = zip(*_FINGERPRINT_ENTRY.iter_unpack(data), strict=True)
    return LogitFingerprint(token_ids, values)


def layout_of(data: bytes) -> Layout:
    """Return the layout that a head claims to be of; `decode_head` says whether to believe it."""
    if len(data) < _HEAD.size:
        raise DamagedRecord("truncated")
    identity, block_size, block_bytes = (_HEAD.unpack_from(data)[field] for field in (2, 5, 6))
    if not block_size or not block_bytes:
        raise DamagedRecord("other geometry")
    return Layout(identity, block_size, block_bytes)


def decode_head(data: bytes, layout: Layout) -> PackHead:
    """Return what `encode_head` was given; raises DamagedRecord for anything else."""
    if len(data) < _HEAD.size + _HEAD_CHECKSUM_BYTES:
        raise DamagedRecord("truncated")
    (magic, version, identity, parent, num_blocks, block_size, block_bytes, *rest_of_head) = (
        _HEAD.unpack_from(data)
    )
    checksum, num_entries, is_draft = rest_of_head
    _require_kind(magic, _HEAD_MAGIC, version, identity, layout)
    if data[-_HEAD_CHECKSUM_BYTES:] != _head_checksum(data[:-_HEAD_CHECKSUM_BYTES]):
        raise DamagedRecord("checksum of the head")
    if (block_size, block_bytes) != (layout.block_size, layout.block_bytes):
        raise OtherGeometry("other geometry")
    rest = data[_HEAD.size : -_HEAD_CHECKSUM_BYTES]
    end = num_blocks * layout.ids_bytes
    if not num_blocks or len(rest) != end + num_entries * _FINGERPRINT_ENTRY.size:
        raise DamagedRecord("truncated")
    return PackHead(parent, rest[:end], checksum, _decode_fingerprint(rest[end:]), is_draft)


def payload_checksum(image: bytes | bytearray | memoryview) -> bytes:
    """Return the 16 bytes that stand for the images in head and payload."""
    return xxhash.xxh3_128_digest(image)


def payload_prefix(key: bytes, head: PackHead, num_bytes: int, layout: Layout) -> bytes:
    """Return what stands before the images in a payload record; `key` is the first block's."""
    assert len(key) == KEY_BYTES
    return _PAYLOAD.pack(
        _PAYLOAD_MAGIC, FORMAT_VERSION, layout.identity, key, num_bytes, head.checksum
    )


def check_payload(
    prefix: bytes, image: memoryview, key: bytes, checksum: bytes, layout: Layout
) -> None:
    """Raise DamagedRecord unless these are the images that `checksum` stands for, of block `key`.

    `prefix` is what stands before them.
    """
    if len(prefix) < PREFIX_BYTES:
        raise DamagedRecord("truncated")
    magic, version, identity, own_key, num_bytes, own_checksum = _PAYLOAD.unpack(prefix)
    _require_kind(magic, _PAYLOAD_MAGIC, version, identity, layout)
    if own_key != key or own_checksum != checksum:
        raise DamagedRecord("another pack's payload")
    if num_bytes != len(image):
        raise DamagedRecord("truncated")
    if payload_checksum(image) != checksum:
        raise DamagedRecord("checksum")


def checksum_of(head: bytes, layout: Layout) -> bytes:
    """Return the payload checksum in a stored head; empty if the head is damaged."""
    try:
        return decode_head(head, layout).checksum
    except DamagedRecord:
        return b""


def _require_kind(
    magic: bytes, expected: bytes, version: int, identity: bytes, layout: Layout
) -> None:
    if magic != expected:
        raise DamagedRecord("wrong magic")
    if version != FORMAT_VERSION:
        raise DamagedRecord(f"version {version}")
    if identity != layout.identity:
        raise DamagedRecord("other identity")


def _head_checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


_VERSION = 1
_VERSION_WITH_END = 2
_MAGIC = b"KVpn"
# magic, version, seconds since the epoch, blocks, bytes of the label
_PIN = struct.Struct("<4sIdII")
# seconds since the epoch
_END = struct.Struct("<d")
_CHECKSUM_BYTES = 8
_MAX_LABEL_BYTES = 256


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

    def covers(self, other: "Pin") -> bool:
        """Return whether all that `other` holds is held by this pin, for as long."""
        return self.keys[: len(other.keys)] == other.keys and self.until_s >= other.until_s


def pin_name(label: str) -> bytes:
    """Return what a pin is found by: one of a label."""
    return xxhash.xxh3_128_digest(label.encode(errors="replace"))


def encode_pin(pin: Pin) -> bytes:
    """Return the pin as bytes."""
    label = pin.label.encode(errors="replace")[:_MAX_LABEL_BYTES]
    version, end = _VERSION, b""
    if pin.is_temporary:
        version, end = _VERSION_WITH_END, _END.pack(pin.until_s)
    fixed = _PIN.pack(_MAGIC, version, pin.made_s, len(pin.keys), len(label))
    data = b"".join((fixed, end, *pin.keys, label))
    return data + xxhash.xxh3_64_digest(data)


def decode_pin(data: bytes) -> Pin | None:
    """Return what `encode_pin` was given; None for anything else."""
    if len(data) < _PIN.size + _CHECKSUM_BYTES:
        return None
    magic, version, made_s, num_blocks, num_label = _PIN.unpack_from(data)
    body, until_s = data[_PIN.size : -_CHECKSUM_BYTES], math.inf
    if magic != _MAGIC or version not in (_VERSION, _VERSION_WITH_END):
        return None
    if data[-_CHECKSUM_BYTES:] != xxhash.xxh3_64_digest(data[:-_CHECKSUM_BYTES]):
        return None
    if version == _VERSION_WITH_END:
        if len(body) < _END.size:
            return None
        (until_s,) = _END.unpack_from(body)
        body = body[_END.size :]
    end = num_blocks * KEY_BYTES
    if len(body) != end + num_label:
        return None
    keys = tuple(body[start : start + KEY_BYTES] for start in range(0, end, KEY_BYTES))
    return Pin(body[end:].decode(errors="replace"), keys, made_s, until_s)
