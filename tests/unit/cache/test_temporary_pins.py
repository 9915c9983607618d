"""Temporary pins: clients of the server make them; they end, and never fill the store."""

import time
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from support.clock import Clock
from support.pack_chains import LAYOUT, keys_of, num_found, save

LIMIT = 4 << 20
SMALL_TTL_S, LARGE_TTL_S, LASTING_TTL_S = 300.0, 3600.0, 30 * 86400.0


@pytest.fixture
def clock() -> Clock:
    return Clock(time.time())


@pytest.fixture
def tier(tmp_path: Path, clock: Clock) -> DiskTier:
    return DiskTier(tmp_path, LAYOUT, LIMIT, min_free_bytes=0, clock=clock)


def pin(tier: DiskTier, ids: list[int], label: str, ttl_s: float = SMALL_TTL_S) -> int:
    return tier.pin(keys_of(tier, ids), encode_ids(ids), label, ttl_s)


def labels(tier: DiskTier) -> set[str]:
    return {pin.label for pin in tier._db.table.pins()}


def press(tier: DiskTier) -> None:
    """Write more than the store holds."""
    for number in range(1000, 1080):
        save(tier, [number] * 12)


def test_a_temporary_pin_holds_its_context_until_it_ends(tier: DiskTier, clock: Clock) -> None:
    short, long = [7] * 12, [8] * 12
    for ids, label, ttl_s in ((short, "short", SMALL_TTL_S), (long, "long", LARGE_TTL_S)):
        save(tier, ids)
        assert pin(tier, ids, label, ttl_s) == 6
    clock.now_s += SMALL_TTL_S

    press(tier)

    assert num_found(tier, short) == 0
    assert num_found(tier, long) == 6
    tier.gc()
    assert labels(tier) == {"long"}


def test_pinning_again_begins_the_time_anew(tier: DiskTier, clock: Clock) -> None:
    ids = [7] * 12
    save(tier, ids)
    pin(tier, ids, "a")
    clock.now_s += 200
    pin(tier, ids, "a")
    clock.now_s += 200

    tier.gc()

    assert labels(tier) == {"a"}


def test_a_longer_context_takes_the_place_of_its_beginning_unless_that_stays_longer(tier):
    ids = [7] * 12
    save(tier, ids)
    pin(tier, ids[:4], "short")
    pin(tier, ids[:6], "lasting", LARGE_TTL_S)
    pin(tier, [7] * 12, "long")

    assert labels(tier) == {"lasting", "long"}


def test_there_are_sixteen_temporary_pins_at_most(tier: DiskTier) -> None:
    save(tier, [7, 7])
    tier.pin(keys_of(tier, [7, 7]), encode_ids([7, 7]), "of the user")
    for number in range(20):
        ids = [number + 100] * 2
        save(tier, ids)
        pin(tier, ids, str(number))

    assert labels(tier) == {"of the user", *(str(number) for number in range(4, 20))}


def test_those_that_end_first_make_room_for_others(tier: DiskTier) -> None:
    """A dozen marks of one session took the place of what all sessions of an agent begin with."""
    save(tier, [7] * 12)
    pin(tier, [7] * 12, "opening", LARGE_TTL_S)
    for number in range(20):
        save(tier, [number + 100] * 2)
        pin(tier, [number + 100] * 2, str(number))

    assert labels(tier) == {"opening", *(str(number) for number in range(5, 20))}


@pytest.mark.parametrize("ttl_s", [SMALL_TTL_S, LASTING_TTL_S])
def test_pins_for_days_and_for_minutes_leave_each_other_places(tier, ttl_s):
    """After 16 agents a client's own marks were dropped by each other at once."""
    other_s = LASTING_TTL_S if ttl_s == SMALL_TTL_S else SMALL_TTL_S
    for number in range(20):
        save(tier, [number + 100] * 2)
        pin(tier, [number + 100] * 2, f"many {number}", other_s)
    for number in range(3):
        save(tier, [number + 200] * 2)
        pin(tier, [number + 200] * 2, f"few {number}", ttl_s)

    few = {f"few {number}" for number in range(3)}
    assert labels(tier) == few | {f"many {number}" for number in range(4, 20)}


def test_temporary_pins_leave_room_for_what_comes(tmp_path: Path, clock: Clock) -> None:
    tier = DiskTier(tmp_path, LAYOUT, LIMIT, min_free_bytes=0, clock=clock)
    num_blocks = int(LIMIT * 0.5) // LAYOUT.block_bytes // 3
    contexts = [[number] * (2 * num_blocks) for number in range(16)]
    for number, ids in enumerate(contexts):
        save(tier, ids)
        clock.now_s += 1
        pin(tier, ids, str(number))

    press(tier)

    assert save(tier, [99] * 12)
    assert num_found(tier, contexts[-1]) == num_blocks, "the newest pin holds"
    assert num_found(tier, contexts[0]) == 0


def test_what_has_ended_holds_nothing_against_forgetting(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LAYOUT, LIMIT, min_free_bytes=0)
    ids = [7] * 12
    save(tier, ids)
    pin(tier, ids, "over", -1.0)
    tier.close()

    assert StoreAdmin(tmp_path).forget([ids], []) == 6
