"""CacheManager: what a match returns is what was computed, and no reference is ever lost.

The actors below "compute" the KV of a token by writing a number that depends on the token and all
before it into the token's slot, so a block handed to the wrong sequence shows as a wrong number.
"""

import random
import zlib

import pytest
import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from kvchat_kernels.slot_positions import EMPTY, SlotPositions
from support.soak_sizes import short_and_long

CPU = torch.device("cpu")


def new_manager(num_blocks: int, block_size: int = 4, reuse: bool = True) -> CacheManager:
    geometry = KvGeometry((LayerGeometry(1, 1, 1),), torch.float32, block_size)
    return CacheManager(KvPool(geometry, num_blocks, CPU), reuse)


def expected_kv(token_ids: list[int], position: int) -> float:
    return float(zlib.crc32(bytes(token_ids[: position + 1])) & 0xFFFFF)


class Actor:
    """A sequence that computes its tokens in random strides, as a request does."""

    def __init__(self, manager: CacheManager, token_ids: list[int]) -> None:
        self.manager = manager
        self.token_ids = token_ids
        self.table = manager.match(token_ids)
        self.num_computed = self.table.cached_len
        self.assert_kv_is_right()

    def slots(self, end: int) -> torch.Tensor:
        return torch.tensor(self.table.slots(0, end))

    def assert_kv_is_right(self) -> None:
        keys, values = self.manager.kv_pool.layers[0]
        expected = torch.tensor([expected_kv(self.token_ids, p) for p in range(self.num_computed)])
        for pool in (keys, values):
            found = pool.flatten()[self.slots(self.num_computed).long()]
            assert torch.equal(found, expected)

    def advance(self, num_tokens: int) -> bool:
        end = min(self.num_computed + num_tokens, len(self.token_ids))
        if not self.manager.reserve(self.table, self.num_computed, end):
            return False
        for position in range(self.num_computed, end):
            for pool in self.manager.kv_pool.layers[0]:
                slot = self.table.slots(position, position + 1)[0]
                pool.view(-1)[slot] = expected_kv(self.token_ids, position)
        self.num_computed = end
        self.manager.commit(self.table, self.token_ids, end)
        return True

    def finish(self) -> None:
        self.manager.release(self.table, self.token_ids[: self.num_computed])


def computed(manager: CacheManager, token_ids: list[int]) -> None:
    actor = Actor(manager, token_ids)
    assert actor.advance(len(token_ids))
    actor.finish()


def test_a_second_turn_reads_only_what_is_new() -> None:
    manager = new_manager(num_blocks=20)
    computed(manager, list(range(10)))

    table = manager.match([*range(10), 50, 51])

    assert table.cached_len == 10
    manager.check([table])


def test_a_match_always_leaves_one_token_to_compute() -> None:
    manager = new_manager(num_blocks=20)
    computed(manager, list(range(8)))

    assert manager.match(list(range(8))).cached_len == 7


def test_without_reuse_every_sequence_starts_cold_and_leaves_nothing() -> None:
    manager = new_manager(num_blocks=20, reuse=False)
    computed(manager, list(range(10)))

    assert manager.match(list(range(10))).cached_len == 0
    assert manager.status().num_cached == 0


def test_reserving_evicts_what_nobody_uses_and_refuses_what_does_not_fit() -> None:
    manager = new_manager(num_blocks=5)
    computed(manager, list(range(16)))
    table = manager.match([99] * 20)

    assert manager.reserve(table, 0, 16)
    assert not manager.reserve(table, 16, 17)

    assert manager.status().num_evicted == 4
    manager.check([table])


def test_a_head_is_not_copied_where_there_is_no_room_for_the_copy() -> None:
    """A sole request once waited for ever: the block it needed was the one it was to copy from."""
    manager = new_manager(num_blocks=2)
    computed(manager, [1, 2, 3])

    table = manager.match([1, 2, 9, 9])

    assert table.cached_len == 0
    assert manager.reserve(table, 0, 4)
    manager.check([table])


def test_forks_share_blocks_until_they_write() -> None:
    manager = new_manager(num_blocks=20)
    parent = Actor(manager, list(range(6)))
    parent.advance(6)
    before = manager.status().num_free

    forks = [manager.fork(parent.table, 6) for _ in range(3)]
    assert manager.status().num_free == before

    for fork in forks:
        assert manager.reserve(fork, 6, 7)
    assert manager.status().num_copied == 3
    assert len({fork.blocks[1] for fork in forks} | {parent.table.blocks[1]}) == 4
    assert {fork.blocks[0] for fork in forks} == {parent.table.blocks[0]}
    manager.check([parent.table, *forks])


def test_two_who_computed_the_same_end_up_sharing_it() -> None:
    manager = new_manager(num_blocks=20)
    one, other = Actor(manager, list(range(8))), Actor(manager, list(range(8)))
    one.advance(8)
    other.advance(8)

    assert one.table.blocks == other.table.blocks
    manager.check([one.table, other.table])


def test_clearing_forgets_everything_that_is_not_in_use() -> None:
    manager = new_manager(num_blocks=20)
    computed(manager, list(range(10)))
    running = Actor(manager, [7, 7, 7, 7, 7])
    running.advance(5)

    assert manager.clear() == 3
    running.assert_kv_is_right()
    manager.check([running.table])


@pytest.mark.parametrize("block_size", [1, 2, 8])
@short_and_long(3, 60)
def test_random_actors_only_ever_see_their_own_kv(size: int, block_size: int) -> None:
    for seed in range(size):
        share_a_manager(random.Random(seed), block_size)


def share_a_manager(rng: random.Random, block_size: int) -> None:
    manager = new_manager(num_blocks=2 + 48 // block_size, block_size=block_size)
    running: list[Actor] = []
    forks: list[BlockTable] = []
    num_tokens_hit = 0
    for _ in range(1500):
        action = rng.random()
        if action < 0.3 and len(running) < 4:
            actor = Actor(manager, [rng.randint(0, 1) for _ in range(rng.randint(1, 20))])
            num_tokens_hit += actor.num_computed
            running.append(actor)
        elif action < 0.75 and running:
            actor = rng.choice(running)
            if not actor.advance(rng.randint(1, 7)):
                running.remove(actor)
                actor.finish()
            else:
                actor.assert_kv_is_right()
        elif action < 0.85 and running and len(forks) < 3:
            actor = rng.choice(running)
            forks.append(manager.fork(actor.table, actor.num_computed))
        elif action < 0.9 and forks:
            manager.release(forks.pop(), [])
        elif running:
            actor = running.pop(rng.randrange(len(running)))
            actor.assert_kv_is_right()
            actor.finish()
        manager.check([actor.table for actor in running] + forks)
    assert num_tokens_hit > 100, "the actors never shared anything"


def test_a_private_table_writes_beside_the_shared_one_and_enters_nothing() -> None:
    """A fork drops a block and has a hole; the shared table stays as it is, and all is freed."""
    manager = new_manager(num_blocks=20)
    ids = list(range(10))
    computed(manager, ids)
    shared = manager.match([*ids, 50])
    private = manager.fork(shared, 10)
    before = list(shared.blocks)

    manager.make_private(private, [0, 2], SlotPositions((0, 1, EMPTY, 3, 8, 9), 12))
    assert private.blocks == [before[0], before[2]]
    assert manager.reserve(private, 12, 16)

    assert shared.blocks == before
    assert private.blocks[0] == before[0]
    assert private.blocks[1] not in before, "it was shared, and is written"
    last = private.blocks[1] * 4 + 2
    assert private.slots(12, 14) == [last, last + 1]
    assert private.slots(14, 16) == [private.blocks[2] * 4, private.blocks[2] * 4 + 1]
    manager.check([shared, private])
    fork = manager.fork(private, 14)
    assert fork.blocks == private.blocks[:2]
    manager.rewind(private, 13)
    assert len(private.blocks) == 2
    manager.commit(private, [*range(16)], 16)
    for table in (fork, private):
        manager.release(table, [*range(16)])
    manager.release(shared, ids)
    manager.check([])
    assert manager.num_cached_tokens([*range(16)]) == 8
    manager.clear()
    assert manager.status().num_free == 19
