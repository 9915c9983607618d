"""Packs as bytes: consecutive blocks of one chain, stored together, with all that identifies them.

A pack is two records. The *head* says which token ids after which block; the *payload* holds the
block images. Either can be damaged in any way and is then refused, never believed. A head may carry
a *canary*: what the model said after the pack's last token, for whoever reads the pack to compare.
Knows bytes and checksums; knows no files. Nothing here is ever unpickled.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvchat.cache.block_key import KEY_BYTES, chain_keys
from kvchat.cache.radix_node import TOKEN_BYTES

FORMAT_VERSION = 3
_HEAD_MAGIC = b"KVhd"
_PAYLOAD_MAGIC = b"KVpl"
# magic, version, identity, parent key, blocks, tokens a block, bytes an image, payload checksum,
# entries of the canary, whether the KV is a draft's
_HEAD = struct.Struct("<4sI16s16sIIQ16sI?")
# a token id and its logit
_CANARY_ENTRY = struct.Struct("<if")
_HEAD_CHECKSUM_BYTES = 8
# magic, version, identity, key of the first block, length, checksum
_PAYLOAD = struct.Struct("<4sI16s16sQ16s")
PREFIX_BYTES = _PAYLOAD.size


class DamagedRecord(Exception):
    """A record that is not what it should be; `str()` of it says how, in a few words."""


class GoneRecord(DamagedRecord):
    """A record that was there a moment ago, and is not any more: others may have removed it."""


class HeldRecord(DamagedRecord):
    """A record that could not be looked at as long as others held the store; it may be sound."""


class OtherGeometry(DamagedRecord):
    """A head that is sound, for blocks of another shape than was asked for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What all packs of a store share: whose KV it is (16 bytes), and the shape of a block.

    `block_size` counts tokens, `block_bytes` the bytes of a block's image.
    """

    identity: bytes
    block_size: int
    block_bytes: int

    @property
    def ids_bytes(self) -> int:
        """Bytes of a block's packed token ids."""
        return self.block_size * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Canary:
    """The largest logits of the forward of a pack's last token: token ids, and their values."""

    token_ids: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.values)


@dataclass(frozen=True, slots=True)
class PackHead:
    """The key of the block before the first, and the packed token ids of whole blocks.

    `is_draft` where the KV was computed to draft for another model.
    """

    parent: bytes
    ids: bytes
    checksum: bytes = bytes(16)
    canary: Canary | None = None
    is_draft: bool = False

    def keys(self, layout: Layout) -> list[bytes]:
        """Return the chain key of each block."""
        return chain_keys(self.parent, self.ids, layout.ids_bytes)

    def num_blocks(self, layout: Layout) -> int:
        return len(self.ids) // layout.ids_bytes

    def num_shared(self, packed: bytes, block: int, layout: Layout) -> int:
        """Return how many of the blocks stand in `packed` token ids from `block` on."""
        size, count, num_blocks = layout.ids_bytes, 0, self.num_blocks(layout)
        if packed.startswith(self.ids, block * size):
            return num_blocks
        while count < num_blocks:
            own = self.ids[count * size : (count + 1) * size]
            if not packed.startswith(own, (block + count) * size):
                break
            count += 1
        return count


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
        len(head.canary.values) if head.canary is not None else 0,
        head.is_draft,
    )
    data = fixed + head.ids + _encode_canary(head.canary)
    return data + _head_checksum(data)


def _encode_canary(canary: Canary | None) -> bytes:
    if canary is None:
        return b""
    entries = zip(canary.token_ids, canary.values, strict=True)
    return b"".join(_CANARY_ENTRY.pack(token, value) for token, value in entries)


def _decode_canary(data: bytes) -> Canary | None:
    if not data:
        return None
    token_ids, values = zip(*_CANARY_ENTRY.iter_unpack(data), strict=True)
    return Canary(token_ids, values)


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
    if not num_blocks or len(rest) != end + num_entries * _CANARY_ENTRY.size:
        raise DamagedRecord("truncated")
    return PackHead(parent, rest[:end], checksum, _decode_canary(rest[end:]), is_draft)


def payload_checksum(image: bytes | bytearray | memoryview) -> bytes:
    """Return the 16 bytes that stand for the images in head and payload."""
    return xxhash.xxh3_128_digest(image)


def payload_prefix(key: bytes, head: PackHead, num_bytes: int, layout: Layout) -> bytes:
    """Return what stands before the images in a payload record; `key` is the first block's."""
    assert len(key) == KEY_BYTES
    return _PAYLOAD.pack(
        _PAYLOAD_MAGIC, FORMAT_VERSION, layout.identity, key, num_bytes, head.checksum
    )


def decode_payload(
    data: bytes | bytearray, key: bytes, head: PackHead, layout: Layout
) -> memoryview:
    """Return the images of a payload record, verified; raises DamagedRecord for anything else."""
    image = memoryview(data)[PREFIX_BYTES:]
    if len(image) != head.num_blocks(layout) * layout.block_bytes:
        raise DamagedRecord("truncated")
    check_payload(bytes(data[:PREFIX_BYTES]), image, key, head.checksum, layout)
    return image


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
    """Return what a stored head says of its payload; nothing where it is damaged."""
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
