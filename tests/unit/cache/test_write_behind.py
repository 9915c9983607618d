"""WriteBehind: everything gets written once, as it fills, and a tier that refuses is not
pestered.
"""

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from kvchat.cache import write_behind
from kvchat.cache.block_manager import CacheManager
from kvchat.cache.keys import KeyMemo, chain_keys, encode_ids, root_key
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from kvchat.cache.transfer import TransferThread
from kvchat.cache.write_behind import WriteBehind
from support.cached_contexts import CPU, compute
from support.chains import new_chain
from support.memory_tier import MemoryTier

# Blocks of two tokens whose images are a megabyte: four of them, eight tokens, fill a pack.
GEOMETRY = KvGeometry((LayerGeometry(1, 1 << 16, 1 << 16),), torch.float32, block_size=2)
PACK_BLOCKS = 4
STORY = list(range(23))


class Household:
    """A device tier, a slower one, and the saver between them, with a clock set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tier = MemoryTier(GEOMETRY.block_size, GEOMETRY.block_bytes)
        self.manager = CacheManager(KvPool(GEOMETRY, 40, CPU))
        self.transfer = TransferThread(lambda: self.tier, 64 << 20)
        self.write_behind = WriteBehind(
            self.manager, self.transfer, KeyMemo(4 * GEOMETRY.block_size), lambda: self.now_s
        )
        self.num_exported = 0
        self._export = self.manager.export
        self.manager.export = self._counted  # type: ignore[method-assign]

    def _counted(self, ids: list[int], first: int, last: int) -> memoryview | None:
        image = self._export(ids, first, last)
        self.num_exported += last - first if image is not None else 0
        return image

    def save(self, ids: list[int]) -> int:
        """Save a context; return how many blocks were handed over."""
        before = self.num_exported
        self.write_behind.save(ids)
        assert self.transfer.flush(60.0)
        return self.num_exported - before

    def grow(self, ids: list[int]) -> int:
        before = self.num_exported
        self.write_behind.save_packs(ids)
        assert self.transfer.flush(60.0)
        return self.num_exported - before

    def break_down(self) -> None:
        def fail() -> None:
            raise OSError("no space")

        self.tier.before_write = fail

    def mend(self) -> None:
        self.tier.before_write = lambda: None


@pytest.fixture
def house() -> Iterator[Household]:
    made = Household()
    compute(made.manager, STORY)
    yield made
    made.transfer.close(5.0)


def test_a_growing_context_is_written_pack_by_pack_and_nothing_twice(house: Household) -> None:
    """A long document's KV was once written when its first answer was over, and lost until then."""
    handed_over = [house.grow(STORY[:end]) for end in (3, 7, 8, 9, 15, 16, 23)]

    assert handed_over == [0, 0, 4, 0, 0, 4, 0]
    assert house.save(STORY) == 3
    assert house.tier.num_written == len(house.tier.blocks) == 11


def test_what_is_kept_is_not_handed_over_again(house: Household) -> None:
    house.save(STORY[:16])

    assert house.save(STORY[:16]) == 0
    assert house.save(STORY) == 3
    assert house.save([*STORY[:8], 90, 91]) == 0, "the block of another branch is not there"


def test_a_write_that_fails_is_made_up_for(house: Household) -> None:
    house.break_down()
    house.save(STORY)
    assert not house.tier.blocks

    house.mend()
    house.now_s = 2.0
    assert house.save(STORY) == PACK_BLOCKS, "one pack, to see whether it takes anything again"
    assert house.save(STORY) == 11 - PACK_BLOCKS
    assert house.tier.num_written == len(house.tier.blocks) == 11


def test_a_tier_that_rests_hears_of_what_it_is_not_offered(house: Household) -> None:
    """Another chat's KV, computed meanwhile, was called never written where there was no room."""
    other = [90 + token for token in STORY[:7]]
    house.save(STORY[:16])
    house.break_down()
    house.save(STORY)

    assert not house.write_behind.lacks(other)
    assert house.save(other) == 0
    assert not house.write_behind.lacks(STORY[:16]), "that is there"
    assert not house.write_behind.lacks(other[:1]), "no whole block"
    assert house.transfer.flush(60.0)

    first = chain_keys(house.tier.root, encode_ids(other), 8)[0]
    assert house.tier.declined == [first, first]
    house.now_s = 2.0
    assert house.write_behind.lacks(other)
    assert house.tier.declined == [first, first]


def test_a_tier_that_goes_on_refusing_is_asked_ever_more_rarely(house: Household) -> None:
    """The whole context was once gathered again at every turn for a disk that stayed full."""
    house.break_down()
    assert house.write_behind.lacks(STORY)
    house.save(STORY)
    assert not house.write_behind.lacks(STORY), "nothing is to be prepared for it meanwhile"
    asked_at = []
    for second in range(1, 2000):
        house.now_s = float(second)
        if handed_over := house.save(STORY):
            assert handed_over == PACK_BLOCKS
            asked_at.append(second)

    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 5
    assert 300 <= pauses[-1] < 305
    assert len(asked_at) < 20


def test_a_tier_that_has_refused_for_days_is_still_asked(house: Household) -> None:
    """The rest doubled with each refusal: after a thousand no float held it, and a step failed."""
    house.break_down()
    house.write_behind._num_refusals = 1100
    house.save(STORY)

    assert not house.write_behind.lacks(STORY)
    house.now_s = 400.0
    house.mend()
    assert house.write_behind.lacks(STORY)
    assert house.save(STORY) == PACK_BLOCKS


def test_what_there_was_no_room_for_is_written_once_there_is(house: Household) -> None:
    """More than fits in the queue was once left to the next turn, and lost with a kill before."""
    may_write = threading.Event()
    house.tier.before_write = lambda: may_write.wait(60.0) and None
    house.transfer._max_pending_bytes = PACK_BLOCKS * GEOMETRY.block_bytes

    house.write_behind.save(STORY)
    assert house.write_behind.has_backlog
    house.write_behind.go_on(0.0)
    assert house.write_behind.has_backlog
    may_write.set()
    for _ in range(3):
        house.write_behind.go_on(5.0)

    assert not house.write_behind.has_backlog
    assert house.transfer.flush(60.0)
    assert house.tier.num_written == len(house.tier.blocks) == 11


def test_a_tier_that_refuses_has_no_backlog(house: Household) -> None:
    house.break_down()
    house.transfer._max_pending_bytes = PACK_BLOCKS * GEOMETRY.block_bytes
    house.write_behind.save(STORY)
    assert house.transfer.flush(60.0)

    for _ in range(3):
        house.write_behind.go_on(0.0)

    assert not house.write_behind.has_backlog


def test_what_the_tier_lost_is_written_again(house: Household) -> None:
    """Another process has emptied the store: what is missing shows with the next pack.

    It was written again with the turn after that only, and what was pinned before it was nothing.
    """
    house.save(STORY[:16])
    house.tier.blocks.clear()

    house.save(STORY)
    assert not house.tier.blocks, "a pack without its parents could never be found"
    assert house.write_behind.has_backlog
    house.write_behind.go_on(0.0)

    assert house.transfer.flush(60.0)
    assert len(house.tier.blocks) == house.tier.num_written - 8 == 11
    assert not house.write_behind.has_backlog


def test_of_many_packs_whose_beginning_is_gone_the_whole_is_offered_once(house: Household) -> None:
    house.save(STORY[:4])
    house.tier.blocks.clear()

    house.save(STORY)

    assert house.write_behind.has_backlog
    assert len(house.write_behind._backlog) == 1
    house.write_behind.go_on(0.0)
    assert house.transfer.flush(60.0)
    assert len(house.tier.blocks) == 11


def test_what_the_last_write_shows_to_be_lost_is_written_before_the_end(house: Household) -> None:
    """It was not known when the thread ended: the next process computed all of it."""
    chain = new_chain(house.manager, lambda: house.tier)
    chain.save(STORY[:16])
    assert chain.flush(60.0)
    house.tier.blocks.clear()

    chain.save(STORY)
    chain.close()

    assert len(house.tier.blocks) == 11


def test_only_what_is_missing_is_handed_over_again(house: Household) -> None:
    house.save(STORY[:16])
    for key in chain_keys(house.tier.root, encode_ids(STORY), 8)[6:]:
        house.tier.blocks.pop(key, None)

    house.save(STORY)
    assert house.save(STORY) == 11 - 6
    assert len(house.tier.blocks) == 11


def test_a_memo_gives_the_keys_that_hashing_all_gives() -> None:
    root = root_key(b"x")
    memo = KeyMemo(8)
    contexts = [[*range(cut), *range(50, 50 + more)] for cut in range(20) for more in (0, 1, 7)]

    for ids in [*contexts, *reversed(contexts)]:
        assert memo.keys_of(root, encode_ids(ids)) == chain_keys(root, encode_ids(ids), 8)


def test_what_is_known_to_be_kept_stays_bounded(house, monkeypatch):
    """The keys of every block ever written stayed in memory as long as the process lived."""
    monkeypatch.setattr(write_behind, "_MOST_STORED", 15)
    other = [90 + token for token in STORY]
    compute(house.manager, other)
    assert house.save(STORY) == house.save(other) == 11
    assert len(house.write_behind._stored) <= 15

    assert not house.write_behind.lacks(other)
    assert house.write_behind.lacks(STORY), "of that nothing is known any more"
    assert house.save(STORY) > 0
    assert not house.write_behind.lacks(STORY)
    assert house.tier.num_written == 22, "what the tier has is not written again"
