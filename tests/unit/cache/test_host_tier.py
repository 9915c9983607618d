"""HostTier against its naive twin, a dict of images; its limit, and what goes first."""

import inspect
import random
import zlib
from collections.abc import Callable, Sequence

import pytest
import torch

from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.host_tier import HostMemory, HostTier, Lease
from kvchat.cache.keys import chain_keys, encode_ids
from kvchat.cache.tier import GoneRecord, Tier
from kvchat.core.types import MissReason
from support.memory_tier import MemoryTier
from support.soak_sizes import short_and_long

SIZE = 2
IMAGE_BYTES = 64
STORY = list(range(20))


def new_tier(num_blocks: int) -> HostTier:
    return HostTier(SIZE, IMAGE_BYTES, num_blocks * IMAGE_BYTES, torch.device("cpu"))


def image_of(ids: Sequence[int], num_blocks: int) -> memoryview:
    """Return images of a context's first blocks; each says all that lies before its end."""
    images = [
        zlib.crc32(bytes(ids[: (n + 1) * SIZE])).to_bytes(4, "big") for n in range(num_blocks)
    ]
    return memoryview(b"".join(image * (IMAGE_BYTES // 4) for image in images))


def keys_of(tier: HostTier, ids: Sequence[int]) -> list[bytes]:
    return chain_keys(tier.root, encode_ids(ids), SIZE * 4)


def write(tier: HostTier, ids: Sequence[int], first: int = 0) -> bool:
    """Fill a context's blocks from `first` on; return whether all of them have room."""
    keys = keys_of(tier, ids)
    encoded = encode_ids(ids[first * SIZE : len(keys) * SIZE])
    parent, image = keys[first - 1] if first else tier.root, image_of(ids, len(keys))
    while (lease := tier.acquire_write(parent, keys[first:], encoded)).keys:
        for number, row in enumerate(lease.rows, first + lease.first):
            own = image[number * IMAGE_BYTES : (number + 1) * IMAGE_BYTES]
            row.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        tier.complete(lease, is_filled=True)
    return tier.peek(keys[first:], encoded) == len(keys) - first


def num_found(tier: HostTier, ids: Sequence[int], first: int = 0) -> int:
    """Return how many blocks from `first` on are found, each with its own image."""
    found = tier.find(keys_of(tier, ids)[first:], encode_ids(ids[first * SIZE :]))
    images = b"".join(tier.read(part).numpy().tobytes() for part in found)
    count = sum(part.num_blocks for part in found)
    assert images == bytes(image_of(ids, first + count))[first * IMAGE_BYTES :]
    return count


@pytest.mark.parametrize("store", [HostTier, DiskTier, MemoryTier])
def test_every_store_keeps_the_one_contract(store: type) -> None:
    """The host's had fallen behind: who asked it as a tier is asked got a TypeError."""
    asked = [name for name, each in vars(Tier).items() if inspect.isfunction(each)]
    assert len(asked) > 10
    for name in asked:
        assert parameters(getattr(store, name)) == parameters(getattr(Tier, name)), name


def parameters(function: Callable[..., object]) -> list[tuple[str, object]]:
    return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]


def test_what_is_not_there_had_to_go_or_never_came() -> None:
    tier = new_tier(4)
    assert tier.why(keys_of(tier, STORY)[0], encode_ids(STORY), 0) is MissReason.NEVER_WRITTEN

    write(tier, STORY[:16])
    write(tier, [99, *STORY[1:16]])

    assert tier.status().limit_bytes == 4 * IMAGE_BYTES
    assert tier.why(keys_of(tier, STORY)[0], encode_ids(STORY), 0) is MissReason.EVICTED


def test_what_was_written_is_found_by_prefix_and_nothing_else_is() -> None:
    tier = new_tier(16)
    assert write(tier, STORY)

    assert num_found(tier, STORY) == 10
    assert num_found(tier, [*STORY[:7], 99, 99]) == 3
    assert num_found(tier, [99, *STORY]) == 0
    assert num_found(tier, STORY, first=4) == 6
    tier.check([])


def test_other_ids_under_the_same_key_are_not_found() -> None:
    """Keys are hashes: what they say is not believed without the ids."""
    tier = new_tier(16)
    write(tier, STORY)

    assert tier.find(keys_of(tier, STORY), encode_ids([*STORY[:6], *[77] * 14])) == tier.find(
        keys_of(tier, STORY[:6]), encode_ids(STORY[:6])
    )


def test_the_end_of_what_was_used_longest_ago_goes_first() -> None:
    tier = new_tier(16)
    write(tier, STORY)
    write(tier, [50, *STORY])
    assert (num_found(tier, STORY), num_found(tier, [50, *STORY])) == (6, 10)

    num_found(tier, STORY)
    write(tier, [60, 61, 62, 63])

    assert num_found(tier, STORY) == 6
    assert num_found(tier, [50, *STORY]) == 8
    tier.check([])


def test_a_block_that_came_after_those_that_continue_it_leaves_after_them() -> None:
    """From the device the ends of contexts come first."""
    tier = new_tier(8)
    write(tier, STORY[:12], first=4)
    write(tier, STORY[:8], first=2)
    write(tier, STORY[:4])
    assert num_found(tier, STORY) == 6

    write(tier, [60, 61, 62, 63, 64, 65])

    assert num_found(tier, STORY) == 5
    tier.check([])


def test_nothing_is_forgotten_for_what_continues_it() -> None:
    tier = new_tier(8)

    assert not write(tier, STORY)
    assert num_found(tier, STORY) == 8
    assert not write(tier, STORY, first=8)
    assert num_found(tier, STORY) == 8
    tier.check([])


def test_what_is_being_copied_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = new_tier(4)
    write(tier, STORY[:6])
    up = tier.copies.up

    def write_meanwhile(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        assert not write(tier, [60, 61, 62, 63])
        tier.check([])
        return up(rows)

    monkeypatch.setattr(tier.copies, "up", write_meanwhile)
    assert num_found(tier, STORY[:6]) == 3

    assert write(tier, [60, 61, 62, 63])


def test_what_is_being_filled_is_found_and_read_once_it_is() -> None:
    """A prompt waited for the copies of blocks that were on their way down."""
    tier = new_tier(4)
    keys, encoded = keys_of(tier, STORY[:4]), encode_ids(STORY[:4])
    kept = tier.acquire_write(tier.root, keys[:1], encode_ids(STORY[:2]))
    lost = tier.acquire_write(keys[0], keys[1:], encode_ids(STORY[2:4]))
    [found] = tier.find(keys, encoded)
    assert found.num_blocks == 2

    tier.complete(kept, is_filled=True)
    with pytest.raises(GoneRecord):
        tier.read(found)
    tier.complete(lost, is_filled=False)

    assert tier.peek(keys, encoded) == 1
    with pytest.raises(GoneRecord):
        tier.read(found)
    tier.check([])


def test_what_is_in_quarantine_is_never_found_again_nor_what_continues_it() -> None:
    tier = new_tier(32)
    write(tier, STORY)
    write(tier, [*STORY[:8], 90, 91])
    write(tier, [*STORY[:2], 80, 81])
    keys = keys_of(tier, STORY)
    filling = tier.acquire_write(keys[-1], [b"x" * 16], encode_ids([70, 71]))

    tier.forget(keys[2:4])

    assert num_found(tier, STORY) == 2
    assert num_found(tier, [*STORY[:8], 90, 91]) == 2
    assert num_found(tier, [*STORY[:2], 80, 81]) == 2
    tier.complete(filling, is_filled=True)
    assert tier.peek([b"x" * 16], encode_ids([70, 71])) == 0
    tier.check([])
    write(tier, STORY)
    assert num_found(tier, STORY) == 10


@pytest.mark.parametrize("limit", [0, 1, 63, 64, 100, 1 << 12, 10_000])
@pytest.mark.parametrize("block_bytes", [1, 48, 64, 1000])
def test_memory_is_taken_up_to_the_limit_and_no_further(block_bytes: int, limit: int) -> None:
    memory = HostMemory(block_bytes, limit, is_pinned=False)
    slots = []
    while (slot := memory.take()) is not None:
        slots.append(slot)
        memory.row(slot).fill_(slot % 251)
        assert memory.num_bytes <= limit

    assert len(slots) == memory.num_slots
    assert memory.num_free == 0
    assert all((memory.row(slot) == slot % 251).all() for slot in slots)
    if limit >= 8 * 2 * block_bytes:
        assert len(slots) * block_bytes >= limit * 3 // 8


def test_where_the_system_has_no_more_memory_the_tier_is_smaller(monkeypatch):
    tier = new_tier(64)
    write(tier, STORY[:4])

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("kvchat.cache.host_tier.torch.empty", refuse)
    for start in range(0, 40, 4):
        write(tier, list(range(100 + start, 104 + start)))

    monkeypatch.undo()
    tier.check([])
    assert num_found(tier, list(range(136, 140))) == 2


class Borrower:
    """Borrows, fills and forgets at random, and remembers in a dict what was ever written."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tier = new_tier(rng.choice([3, 8, 24]))
        self.written: dict[bytes, bytes] = {}
        self.filling: list[tuple[Lease, list[bytes]]] = []
        self.num_found = 0
        trunk = list(range(16))
        self.stories = [[*trunk[:cut], *range(20, 36 - cut + 4)] for cut in (0, 3, 8, 9, 16)]

    def act(self) -> None:
        story = self.rng.choice(self.stories)
        ids = story[: SIZE * self.rng.randint(1, len(story) // SIZE)]
        keys, images = keys_of(self.tier, ids), bytes(image_of(ids, len(ids) // SIZE))
        parts = [images[n * IMAGE_BYTES : (n + 1) * IMAGE_BYTES] for n in range(len(keys))]
        first = self.rng.randint(0, len(keys) - 1)
        action = self.rng.random()
        if action < 0.45 and len(self.filling) < 2:
            parent = keys[first - 1] if first else self.tier.root
            lease = self.tier.acquire_write(parent, keys[first:], encode_ids(ids[first * SIZE :]))
            self.filling.append((lease, parts[first + lease.first :]))
        elif action < 0.75 and self.filling:
            self.fill(*self.filling.pop(self.rng.randrange(len(self.filling))))
        else:
            self.read(keys[first:], ids[first * SIZE :])
        self.tier.check([lease for lease, _ in self.filling])

    def read(self, keys: Sequence[bytes], ids: Sequence[int]) -> None:
        for found in self.tier.find(keys, encode_ids(ids)):
            try:
                images = self.tier.read(found)
            except GoneRecord:
                filling = {key for lease, _ in self.filling for key in lease.keys}
                assert filling & set(keys), "what was found is gone"
                continue
            for key, image in zip(keys[found.start_block :], images, strict=False):
                assert bytes(image.tolist()) == self.written[key]
            self.num_found += found.num_blocks

    def fill(self, lease: Lease, parts: list[bytes]) -> None:
        is_filled = self.rng.random() < 0.9
        for key, row, part in zip(lease.keys, lease.rows, parts, strict=False):
            row.copy_(row.new_tensor(list(part)))
            if is_filled:
                self.written[key] = part
        self.tier.complete(lease, is_filled)


@short_and_long(6, 200)
def test_borrowers_only_ever_see_what_was_written(size: int) -> None:
    num_found = 0
    for seed in range(size):
        borrower = Borrower(random.Random(seed))
        for _ in range(300):
            borrower.act()
        num_found += borrower.num_found
    assert num_found > 20 * size
