"""Records: a round trip, and refusal of everything else whatever it looks like."""

import random

import pytest

from kvchat.cache.disk.format import (
    PREFIX_BYTES,
    check_payload,
    decode_head,
    encode_head,
    payload_checksum,
    payload_prefix,
)
from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.tier import DamagedRecord, Layout, LogitFingerprint, PackHead

LAYOUT = Layout(identity=b"i" * 16, block_size=4, block_bytes=64)
IMAGE = bytes(range(128))
FINGERPRINT = LogitFingerprint((7, 3, 39), (12.5, 0.25, -3.0))
HEAD = PackHead(
    root_key(LAYOUT.identity), encode_ids(range(8)), payload_checksum(IMAGE), FINGERPRINT
)
KEY = HEAD.keys(LAYOUT)[0]
HEAD_DATA = encode_head(HEAD, LAYOUT)
PAYLOAD_DATA = payload_prefix(KEY, HEAD, len(IMAGE), LAYOUT) + IMAGE


def decode_payload(data: bytes, key: bytes, head: PackHead, layout: Layout) -> bytes:
    """Return the images of a payload record, as a reader of a pack verifies them."""
    image = memoryview(data)[PREFIX_BYTES:]
    check_payload(data[:PREFIX_BYTES], image, key, head.checksum, layout)
    return bytes(image)


def test_a_round_trip_changes_nothing() -> None:
    assert decode_head(HEAD_DATA, LAYOUT) == HEAD
    assert decode_payload(PAYLOAD_DATA, KEY, HEAD, LAYOUT) == IMAGE


def test_a_head_needs_no_fingerprint() -> None:
    silent = PackHead(HEAD.parent, HEAD.ids, HEAD.checksum)

    assert decode_head(encode_head(silent, LAYOUT), LAYOUT) == silent


@pytest.mark.parametrize("length", range(len(HEAD_DATA)))
def test_a_head_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(DamagedRecord):
        decode_head(HEAD_DATA[:length], LAYOUT)


@pytest.mark.parametrize("length", [*range(80), len(PAYLOAD_DATA) - 1])
def test_a_payload_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(DamagedRecord):
        decode_payload(PAYLOAD_DATA[:length], KEY, HEAD, LAYOUT)


def test_a_flipped_bit_anywhere_is_refused() -> None:
    for position in range(len(HEAD_DATA)):
        data = bytearray(HEAD_DATA)
        data[position] ^= 1 << position % 8
        with pytest.raises(DamagedRecord):
            decode_head(bytes(data), LAYOUT)
    for position in range(len(PAYLOAD_DATA)):
        data = bytearray(PAYLOAD_DATA)
        data[position] ^= 1 << position % 8
        with pytest.raises(DamagedRecord):
            decode_payload(data, KEY, HEAD, LAYOUT)


def test_random_bytes_are_refused() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        data = rng.randbytes(rng.randrange(300))
        for start in (b"", HEAD_DATA[:8], PAYLOAD_DATA[:8], HEAD_DATA[:24], PAYLOAD_DATA[:40]):
            with pytest.raises(DamagedRecord):
                decode_head(start + data, LAYOUT)
            with pytest.raises(DamagedRecord):
                decode_payload(start + data, KEY, HEAD, LAYOUT)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(b"j" * 16, 4, 64), "identity"),
        (Layout(b"i" * 16, 8, 64), "geometry"),
        (Layout(b"i" * 16, 4, 128), "geometry"),
    ],
)
def test_another_layouts_records_are_refused(layout: Layout, reason: str) -> None:
    with pytest.raises(DamagedRecord, match=reason):
        decode_head(HEAD_DATA, layout)


def test_a_payload_under_another_packs_name_is_refused() -> None:
    other = PackHead(HEAD.parent, encode_ids(range(1, 9)), HEAD.checksum)

    with pytest.raises(DamagedRecord, match="another pack"):
        decode_payload(PAYLOAD_DATA, other.keys(LAYOUT)[0], other, LAYOUT)


def test_a_key_says_all_that_came_before() -> None:
    ids = encode_ids([1, 2, 3, 4, 5, 6, 7, 8])
    keys = chain_keys(b"r" * 16, ids, 16)

    assert len({*keys, *chain_keys(b"s" * 16, ids, 16), *chain_keys(b"r" * 16, ids[16:], 16)}) == 5
    assert chain_keys(keys[0], ids[16:], 16) == keys[1:]
    assert chain_keys(b"r" * 16, ids[:-1], 16) == keys[:1]
