"""Pins as bytes: the blocks of a context that is not to be forgotten, and what the user calls it.

A damaged pin holds nothing. Knows bytes and checksums; knows no table.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvchat.cache.block_key import KEY_BYTES

_VERSION = 1
_MAGIC = b"KVpn"
# magic, version, seconds since the epoch, blocks, bytes of the label
_PIN = struct.Struct("<4sIdII")
_CHECKSUM_BYTES = 8
_MAX_LABEL_BYTES = 256


@dataclass(frozen=True, slots=True)
class Pin:
    """`keys` are the chain keys of the context's full blocks; `made_s` is since the epoch."""

    label: str
    keys: tuple[bytes, ...]
    made_s: float


def pin_name(label: str) -> bytes:
    """Return what a pin is found by: one of a label."""
    return xxhash.xxh3_128_digest(label.encode(errors="replace"))


def encode_pin(pin: Pin) -> bytes:
    """Return the pin as bytes."""
    label = pin.label.encode(errors="replace")[:_MAX_LABEL_BYTES]
    fixed = _PIN.pack(_MAGIC, _VERSION, pin.made_s, len(pin.keys), len(label))
    data = b"".join((fixed, *pin.keys, label))
    return data + xxhash.xxh3_64_digest(data)


def decode_pin(data: bytes) -> Pin | None:
    """Return what `encode_pin` was given; None for anything else."""
    if len(data) < _PIN.size + _CHECKSUM_BYTES:
        return None
    magic, version, made_s, num_blocks, num_label = _PIN.unpack_from(data)
    body = data[_PIN.size : -_CHECKSUM_BYTES]
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    if data[-_CHECKSUM_BYTES:] != xxhash.xxh3_64_digest(data[:-_CHECKSUM_BYTES]):
        return None
    end = num_blocks * KEY_BYTES
    if len(body) != end + num_label:
        return None
    keys = tuple(body[start : start + KEY_BYTES] for start in range(0, end, KEY_BYTES))
    return Pin(body[end:].decode(errors="replace"), keys, made_s)
