"""The block that is set aside: always there, never given to anybody for good."""

import random

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from support.cached_contexts import CPU, assert_kv_is_right, compute, write_kv

STORY = list(range(16))
BLOCK = 4


def new_manager(num_blocks: int) -> CacheManager:
    geometry = KvGeometry((LayerGeometry(1, 2, 2),), torch.float32, BLOCK)
    manager = CacheManager(KvPool(geometry, num_blocks, CPU))
    manager.reserve_spare_block()
    return manager


def test_a_spare_block_is_no_cached_block() -> None:
    manager = new_manager(num_blocks=6)
    manager.reserve_spare_block()

    assert manager.status().num_blocks == manager.status().num_free == 4
    assert manager.max_tokens == 16
    assert manager.clear() == 0
    manager.check([])


def test_a_pool_of_one_block_has_none_to_spare() -> None:
    manager = new_manager(num_blocks=2)
    table = manager.match([1, 2])
    assert manager.reserve(table, 0, 2)

    assert not manager.use_spare_block(table)
    assert manager.max_tokens == BLOCK


def squared_distance(manager: CacheManager, table: BlockTable) -> float:
    kv_error = manager.kv_error(table, STORY, len(STORY) - 1)
    assert kv_error is not None
    return float(kv_error[:, 0].max())


def test_the_spare_block_is_a_copy_of_the_last_where_nothing_is_free() -> None:
    manager = new_manager(num_blocks=6)
    compute(manager, STORY)
    table = manager.match([*STORY, -1])
    assert manager.status().num_free == 0
    assert not manager.reserve(table, 15, 16)

    assert manager.use_spare_block(table)
    assert_kv_is_right(manager, table, STORY)
    manager.kv_pool.zero(table.blocks[-1], 3)
    assert squared_distance(manager, table) > 0.25
    write_kv(manager, table, STORY, 15)
    assert squared_distance(manager, table) == 0.0
    manager.check([table])

    manager.release(table, [])
    manager.check([])
    again = manager.match([*STORY, -1])
    assert_kv_is_right(manager, again, STORY)
    manager.release(again, STORY)


def test_actors_never_meet_the_spare_block() -> None:
    """Beside the same actors on a plain pool of as many blocks that sets none aside."""
    rng = random.Random(5)
    geometry = KvGeometry((LayerGeometry(1, 2, 2),), torch.float32, BLOCK)
    plain = CacheManager(KvPool(geometry, 9, CPU))
    manager = new_manager(num_blocks=10)
    held: list[tuple[BlockTable, BlockTable, list[int]]] = []
    for _ in range(400):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        if held and rng.random() < 0.5:
            one, other, held_ids = held.pop(rng.randrange(len(held)))
            manager.release(one, held_ids)
            plain.release(other, held_ids)
        else:
            one, other = manager.match(ids), plain.match(ids)
            assert one.cached_len == other.cached_len
            fits = manager.reserve(one, one.cached_len, len(ids))
            assert fits == plain.reserve(other, other.cached_len, len(ids))
            if fits:
                write_kv(manager, one, ids, one.cached_len)
                write_kv(plain, other, ids, other.cached_len)
            held.append((one, other, ids if fits else ids[: one.cached_len]))
        probed = [0, *rng.choices(range(2), k=7)]
        table = manager.match([*probed, -1])
        if table.cached_len == len(probed):
            assert manager.use_spare_block(table)
            manager.kv_pool.zero(table.blocks[-1], 0)
        manager.check([table, *(one for one, _, _ in held)])
        manager.release(table, [])
        plain.release(plain.match([*probed, -1]), [])
        assert manager.status() == plain.status()
        for one, _, ids in held:
            assert_kv_is_right(manager, one, ids)
