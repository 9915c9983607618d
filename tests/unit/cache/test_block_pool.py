"""BlockPool: reference counts and the free list."""

import random

import pytest

from kvchat.cache.block_pool import SCRATCH_BLOCK, BlockPool, OutOfBlocks
from support.soak_sizes import short_and_long


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = BlockPool(5)

    blocks = pool.allocate(4)

    assert SCRATCH_BLOCK not in blocks
    assert pool.num_free == 0
    pool.check()


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)

    with pytest.raises(OutOfBlocks, match="2 cache blocks are needed and 1 are free"):
        pool.allocate(2)

    assert pool.num_free == 1
    pool.check()


def test_blocks_follow_the_one_they_continue() -> None:
    pool = BlockPool(20)
    first = pool.allocate(3)
    pool.allocate(5)

    assert pool.allocate(2, after=first[-1] + 5) == [9, 10]


def test_a_block_is_free_only_when_its_last_user_releases_it() -> None:
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.acquire([block])

    assert pool.release([block]) == 0
    assert pool.release([block]) == 1
    assert pool.references[block] == 0


@short_and_long(1, 100)
def test_random_users_never_disagree_with_a_plain_count(size: int) -> None:
    for seed in range(size):
        share_a_pool(random.Random(seed + 1))


def share_a_pool(rng: random.Random) -> None:
    pool = BlockPool(17)
    users: list[int] = []
    for _ in range(3000):
        action = rng.random()
        if action < 0.4 and pool.num_free:
            users += pool.allocate(rng.randint(1, pool.num_free), after=rng.choice([None, 3]))
        elif action < 0.6 and users:
            block = rng.choice(users)
            pool.acquire([block])
            users.append(block)
        elif users:
            pool.release([users.pop(rng.randrange(len(users)))])
        pool.check()
        assert all(pool.references[block] == users.count(block) for block in range(1, 17))
