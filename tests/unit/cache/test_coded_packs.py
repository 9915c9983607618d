"""Cold payloads are coded in fewer bytes where that pays, and nothing is lost."""

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path

import numpy as np
import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.cold_coder import COLD_S, ColdCoder
from kvchat.cache.disk.pack_code import decode, encode
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.tier import DamagedRecord
from support.clock import Clock
from support.pack_chains import LAYOUT, find, keys_of, num_found, restored, save

CHAT, OTHER = [1] * 8, [2] * 8
FAST, SLOW = 1e-6, 10.0
LIMIT = 4 << 20


def kv_like(num_numbers: int) -> memoryview:
    """Return bfloat16 numbers of a normal distribution, as bytes."""
    numbers = np.random.default_rng(3).standard_normal(num_numbers, np.float32)
    return memoryview((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())


class Disk:
    """A timer on which the readings take `read_s` at least, and each decoding a millisecond."""

    def __init__(self, read_s: float) -> None:
        readings = (0.0, 3 * read_s, 0.0, read_s, 0.0, 2 * read_s)
        self._steps = cycle((*readings, 0.0, 0.001))
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += next(self._steps)
        return self._now_s


@pytest.fixture
def clock() -> Clock:
    return Clock(time.time())


@pytest.fixture
def tier(tmp_path: Path, clock: Clock) -> Iterator[DiskTier]:
    tier = new_tier(tmp_path, clock)
    yield tier
    tier.close()


def new_tier(directory: Path, clock: Clock, read_s: float = SLOW) -> DiskTier:
    """Return a tier on a disk that takes `read_s` to read a payload."""
    tier = DiskTier(directory, LAYOUT, LIMIT, min_free_bytes=0, clock=clock)
    tier._coder = ColdCoder(tier._quota, clock, Disk(read_s))
    return tier


def coded_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kvz"))


def plain_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kv"))


def test_numbers_are_coded_in_fewer_bytes_and_come_back() -> None:
    image = kv_like(100_000)

    coded = encode(image)

    again = memoryview(bytearray(len(image)))
    decode(memoryview(coded), again)
    assert again == image
    assert len(image) > 1.35 * len(coded)


def test_a_damaged_code_is_one_kind_of_error_or_other_bytes() -> None:
    """Other bytes are found by the pack's checksum."""
    image = kv_like(2_000)
    coded, chance = encode(image), random.Random(0)
    for _ in range(300):
        damaged = bytearray(coded[: chance.choice([len(coded), chance.randrange(len(coded))])])
        for _ in range(chance.randint(1, 8)):
            if damaged:
                damaged[chance.randrange(min(len(damaged), 400))] = chance.randrange(256)
        with suppress(DamagedRecord):
            decode(memoryview(damaged), memoryview(bytearray(len(image))))


def test_a_code_that_says_to_be_longer_is_read_no_further() -> None:
    """A frame of 100 MB of zeros is 10 KB long."""
    coded = memoryview(encode(memoryview(bytes(100 << 20))))
    short = memoryview(coded[: len(coded) - (50 << 20) + 1000])
    image = memoryview(bytearray(2000))

    decode(short, image)

    assert image == bytes(2000)


def test_what_was_not_used_for_an_hour_is_coded_and_found_as_before(tier, tmp_path, clock):
    save(tier, CHAT)
    clock.now_s += COLD_S + 1
    save(tier, OTHER)
    before = tier.status().num_bytes

    assert tier.tidy()
    assert not tier.tidy()

    assert (len(coded_files(tmp_path)), len(plain_files(tmp_path))) == (1, 1)
    assert tier.status().num_bytes < before
    assert restored(tier, CHAT) == restored(tier, OTHER) == 4
    tier.gc()
    assert restored(tier, CHAT) == 4
    again = new_tier(tmp_path, clock)
    assert restored(again, CHAT) == 4
    again.close()


def test_a_pack_that_is_coded_meanwhile_is_read_by_who_found_it_before(tier, tmp_path, clock):
    save(tier, CHAT)
    clock.now_s += COLD_S + 1
    other = new_tier(tmp_path, clock)
    [run] = find(other, CHAT)
    assert tier.tidy()

    assert len(other.read(run)) == 4 * LAYOUT.block_bytes
    other.close()


def test_a_coded_pack_is_forgotten_in_part(tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    save(tier, CHAT)
    clock.now_s += COLD_S + 1
    assert tier.tidy()

    tier.forget(keys_of(tier, CHAT)[3:])

    assert restored(tier, CHAT) == 3
    assert not coded_files(tmp_path)


def test_a_damaged_coded_payload_is_a_miss(tier: DiskTier, tmp_path: Path, clock: Clock) -> None:
    save(tier, CHAT)
    clock.now_s += COLD_S + 1
    tier.tidy()
    [file] = coded_files(tmp_path)
    content = bytearray(file.read_bytes())
    content[30] ^= 255
    file.write_bytes(content)

    [run] = find(tier, CHAT)
    with pytest.raises(DamagedRecord):
        tier.read(run)

    assert num_found(tier, CHAT) == 0
    assert tier.status().num_damaged == 1


def test_a_fast_disk_with_room_keeps_payloads_as_they_are(tmp_path: Path, clock: Clock) -> None:
    tier = new_tier(tmp_path, clock, read_s=FAST)
    save(tier, CHAT)
    clock.now_s += COLD_S + 1

    assert not tier.tidy()

    assert not coded_files(tmp_path)
    tier.close()


def test_a_store_that_is_nearly_full_codes_on_a_fast_disk_too(tmp_path: Path, clock: Clock) -> None:
    tier = new_tier(tmp_path, clock, read_s=FAST)
    for number in count(1):
        save(tier, [number] * 8)
        if tier._quota.used_bytes(tier._db.table) > 0.8 * LIMIT:
            break
    clock.now_s += COLD_S + 1

    assert tier.tidy()

    assert len(coded_files(tmp_path)) == 1
    tier.close()


def test_the_store_says_what_it_takes_and_would_take(tier, tmp_path, clock):
    save(tier, CHAT)
    assert StoreAdmin(tmp_path).status().saved_bytes == 0
    [plain] = [file.stat().st_size for file in plain_files(tmp_path)]
    clock.now_s += COLD_S + 1
    tier.tidy()

    status = StoreAdmin(tmp_path).status()

    [coded] = [file.stat().st_size for file in coded_files(tmp_path)]
    assert status.saved_bytes == plain - coded > 0
