"""What goes first: leaves before what they continue, the longest unused first, never one's own."""

import random

from kvchat.cache.retention import KnownPack, eviction_order


def pack(parent: str, keys: str, last_used: float) -> KnownPack:
    return KnownPack(
        parent.encode(), tuple(bytes([k]) for k in keys.encode()), last_used, num_bytes=1
    )


def test_leaves_go_oldest_first_and_then_what_they_continued() -> None:
    packs = {
        b"a": pack("", "ab", 1.0),
        b"c": pack("b", "c", 9.0),
        b"d": pack("a", "d", 5.0),
        b"x": pack("", "x", 7.0),
    }

    assert list(eviction_order(packs, b"")) == [b"d", b"x", b"c", b"a"]


def test_what_a_newcomer_continues_stays_to_the_root() -> None:
    packs = {b"a": pack("", "ab", 1.0), b"c": pack("b", "c", 2.0), b"d": pack("c", "d", 3.0)}

    assert list(eviction_order(packs, b"c")) == [b"d"]
    assert list(eviction_order(packs, b"d")) == []


def test_no_pack_ever_goes_before_one_that_continues_it() -> None:
    rng = random.Random(0)
    for _ in range(50):
        packs: dict[bytes, KnownPack] = {}
        known = [b""]
        for number in range(30):
            keys = tuple(bytes([number, part]) for part in range(rng.randrange(1, 4)))
            packs[keys[0]] = KnownPack(rng.choice(known), keys, rng.random(), 1)
            known.extend(keys)

        order = list(eviction_order(packs, b""))

        assert sorted(order) == sorted(packs)
        gone: set[bytes] = set()
        for name in order:
            assert packs[name].parent not in gone
            gone.update(packs[name].keys)
