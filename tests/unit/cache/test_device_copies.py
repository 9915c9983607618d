"""Copies beside a device's computation: slots are never used by two at once, and waiting is rare.

The device is a fake: its copies run when the test says so, or when a thread waits for one.
"""

import random
import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.device_copies import PACK_BYTES, CopyStream, HostCopies, ImageCopies, PinnedRing
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from support.cached_contexts import CPU, compute, images_of
from support.chains import new_chain
from support.memory_tier import MemoryTier

GEOMETRY = KvGeometry((LayerGeometry(2, 8, 8),), torch.float32, block_size=4)


class FakeMark:
    """The end of one copy of a FakeStream."""

    def __init__(self, stream: "FakeStream") -> None:
        self._stream = stream
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        """Let the device copy up to this mark, if it has not, and note which thread waited."""
        if not self.is_over:
            self._stream.waits.append(threading.current_thread().name)
        while not self.is_over:
            self._stream.run_one()


class FakeStream:
    """A device whose copies are queued until they are run, in their order."""

    def __init__(self) -> None:
        self.num_pinned = 0
        self.waits: list[str] = []
        self._queue: deque[tuple[Callable[[], object], FakeMark]] = deque()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.num_pinned += 1
        return torch.full((num_bytes,), 99, dtype=torch.uint8)

    def down(self, images: torch.Tensor, memory: torch.Tensor) -> FakeMark:
        return self._queued(lambda: memory.copy_(images))

    def up(self, memory: torch.Tensor) -> tuple[torch.Tensor, FakeMark]:
        """Computation that waits for a copy sees it at once here, and the copy itself runs later:
        by then the memory must be what it was.
        """
        images = memory.clone()

        def check() -> None:
            assert torch.equal(memory, images), "a slot was written while the device read it"

        return images, self._queued(check)

    def run_one(self) -> None:
        copy, mark = self._queue.popleft()
        copy()
        mark.is_over = True

    def run_all(self) -> None:
        while self._queue:
            self.run_one()

    def _queued(self, copy: Callable[[], object]) -> FakeMark:
        mark = FakeMark(self)
        self._queue.append((copy, mark))
        return mark


def bytes_of(value: int, count: int = 8) -> torch.Tensor:
    return torch.full((2, count // 2), value, dtype=torch.uint8)


def test_an_uploads_memory_may_be_reused_at_once_and_no_slot_is_written_too_early() -> None:
    stream = FakeStream()
    ring = PinnedRing(stream, slot_bytes=8, num_slots=3)
    plain = bytes_of(0)
    for value in range(1, 20):
        plain.fill_(value)
        there = ring.up(plain)
        plain.fill_(0)
        assert there.tolist() == bytes_of(value).tolist()
        if value % 5 == 0:
            stream.run_all()
    stream.run_all()

    assert stream.num_pinned == 3


def test_a_copy_that_fails_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory fails an upload: after four of them no KV was restored any more."""
    stream = FakeStream()
    ring = PinnedRing(stream, slot_bytes=8, num_slots=1)

    def fail(*_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(stream, "up", fail)
        patch.setattr(stream, "down", fail)
        for copy in (ring.up, ring.down):
            with pytest.raises(torch.OutOfMemoryError):
                copy(bytes_of(1))

    assert ring.up(bytes_of(2)).tolist() == bytes_of(2).tolist()


def test_an_upload_waits_only_when_every_slot_is_under_way() -> None:
    stream = FakeStream()
    ring = PinnedRing(stream, slot_bytes=8, num_slots=3)
    for value in range(3):
        ring.up(bytes_of(value))
    assert not stream.waits

    ring.up(bytes_of(3))
    assert len(stream.waits) == 1

    stream.run_all()
    for value in range(3):
        ring.up(bytes_of(value))
    assert len(stream.waits) == 1


def test_what_goes_down_is_not_waited_for_and_is_refused_without_a_slot() -> None:
    stream = FakeStream()
    ring = PinnedRing(stream, slot_bytes=8, num_slots=2)
    one, other = ring.down(bytes_of(1)), ring.down(bytes_of(2, 4))
    assert one is not None
    assert other is not None
    assert ring.down(bytes_of(3)) is None
    assert not stream.waits

    assert bytes(other.read()) == bytes([2] * 4)
    assert bytes(one.read()) == bytes([1] * 8)
    one.release()
    again = ring.down(bytes_of(4))
    assert again is not None
    assert bytes(other.read()) == bytes([2] * 4), "a slot that is held was given away"
    assert bytes(again.read()) == bytes([4] * 8)
    assert stream.num_pinned == 2


def test_a_slot_released_unread_is_not_used_before_its_copy_is_over() -> None:
    stream = FakeStream()
    ring = PinnedRing(stream, slot_bytes=8, num_slots=1)
    images = ring.down(bytes_of(1))
    assert images is not None
    images.release()

    assert ring.down(bytes_of(2)) is None
    assert not stream.waits
    stream.run_all()
    assert ring.down(bytes_of(2)) is not None


def copies_by(downwards: CopyStream, upwards: CopyStream) -> ImageCopies:
    return ImageCopies(downwards, upwards, GEOMETRY.block_bytes)


@pytest.mark.parametrize("image_bytes", [64 << 10, 4 << 20, 5 << 20, 8 << 20, 80 << 20])
def test_large_blocks_pin_no_more_memory_than_small_ones(image_bytes: int) -> None:
    """A block above a pack's 4 MiB once got as many slots: 17 of 80 MiB are 1.3 GiB pinned."""
    copies = ImageCopies(FakeStream(), FakeStream(), image_bytes)

    slot_bytes = copies.downwards.slot_bytes
    assert slot_bytes >= image_bytes
    assert copies.waiting_bytes >= slot_bytes, "one image waits while another is written"
    assert copies.waiting_bytes + slot_bytes <= max(17 * PACK_BYTES, 2 * slot_bytes)


@pytest.mark.parametrize("num_blocks", [1, 5, 40])
def test_blocks_go_through_the_rings_bit_for_bit_however_many(num_blocks, monkeypatch):
    """The blocks are overwritten at once: what leaves is what was there when it was exported."""
    monkeypatch.setattr("kvchat.cache.device_copies.PACK_BYTES", 8 * GEOMETRY.block_bytes)
    plain = KvPool(GEOMETRY, 2 * num_blocks + 1, CPU)
    pool = KvPool(GEOMETRY, 2 * num_blocks + 1, CPU, copies_by(FakeStream(), FakeStream()))
    for tensors in pool.layers:
        for tensor in tensors.tensors:
            tensor.normal_()
    blocks = list(range(1, num_blocks + 1))
    expected = bytes(pool.gather(blocks))

    pool.scatter([block + num_blocks for block in blocks], bytearray(expected))
    assert bytes(pool.gather([block + num_blocks for block in blocks])) == expected
    plain.scatter(blocks, bytearray(expected))
    parts = [pool.export([block]) for block in blocks[:8]]
    for block in blocks:
        pool.zero(block, 0)

    found = b"".join(bytes(part.read()) for part in parts if part is not None)
    assert found == expected[: len(found)]
    assert len(found) == min(8, num_blocks) * GEOMETRY.block_bytes
    assert bytes(plain.gather(blocks)) == expected


def test_contexts_are_written_behind_and_the_thread_that_computes_never_waits(monkeypatch):
    """`export` once copied to plain memory: the host waited for all computation queued so far."""
    monkeypatch.setattr("kvchat.cache.device_copies.PACK_BYTES", 2 * GEOMETRY.block_bytes)
    monkeypatch.setattr("kvchat.cache.write_behind.PACK_BYTES", 2 * GEOMETRY.block_bytes)
    downwards, upwards = FakeStream(), FakeStream()
    pool = KvPool(GEOMETRY, 400, CPU, copies_by(downwards, upwards))
    manager = CacheManager(pool)
    tier = MemoryTier(4, GEOMETRY.block_bytes)
    chain = new_chain(manager, lambda: tier)
    contexts = [tuple(range(number, number + 120)) for number in range(6)]
    for ids in contexts:
        compute(manager, ids)
        chain.slow[0].writer.save(ids)
    while chain.slow[0].writer.has_backlog or chain.slow[0].writer.awaits_outcome:
        chain.slow[0].writer.go_on(1.0)
    assert set(downwards.waits) == {"kvchat-transfer"}
    expected = {ids: images_of(manager, ids, 0, 30) for ids in contexts}
    manager.clear()

    for ids in contexts:
        arrival = chain.arrivals.begin([*ids, 0])
        assert arrival is not None
        while chain.arrivals.settle_one(arrival):
            chain.arrivals.wait_for_news()
        assert images_of(manager, ids, 0, 30) == expected[ids]
    chain.close()

    assert downwards.num_pinned <= 17
    assert upwards.num_pinned <= 4


IMAGE_BYTES, PIECE_BLOCKS = 64, 4


def new_copies() -> HostCopies:
    return HostCopies(CPU, IMAGE_BYTES, PIECE_BLOCKS)


def test_memory_that_was_given_back_is_used_again() -> None:
    """Every piece once took fresh memory from the system, a page fault for each 4 KiB copied."""
    copies = new_copies()
    first = copies.staging(1)
    copies.give_back(first)

    again = copies.staging(PIECE_BLOCKS)

    assert again.shape == (PIECE_BLOCKS, IMAGE_BYTES)
    assert again.data_ptr() == first.data_ptr()


def test_nobody_is_given_what_another_has_and_little_is_kept() -> None:
    rng = random.Random(2)
    copies = new_copies()
    taken: dict[int, torch.Tensor] = {}
    for number in range(300):
        if len(taken) < 12 and rng.random() < 0.6:
            taken[number] = copies.staging(rng.randint(1, PIECE_BLOCKS)).fill_(number % 251)
        elif taken:
            copies.give_back(taken.pop(rng.choice(list(taken))))
        for owner, staging in taken.items():
            assert (staging == owner % 251).all()
        assert len(copies._kept) <= 4


def test_what_came_up_lies_in_staging_of_the_callers_own() -> None:
    copies = new_copies()
    rows = [torch.full((IMAGE_BYTES,), value, dtype=torch.uint8) for value in (3, 5)]

    one, other = copies.up(rows), copies.up(rows[:1])
    copies.down(one, rows[::-1], copies.mark())

    assert [int(row[0]) for row in rows] == [5, 3]
    assert other.tolist() == [[3] * IMAGE_BYTES]
