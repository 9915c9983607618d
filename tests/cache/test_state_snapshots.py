"""State of recurrent layers beside KV blocks, against recomputing it from the first token.

The recurrent model is a hash of all tokens so far, which is next to nothing but depends on each.
"""

import random
import zlib
from collections.abc import Sequence

import pytest
import torch

from kvchat.cache.block_manager import BlockTable, CacheManager
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from support.cached_contexts import CPU
from support.soak_sizes import short_and_long

BLOCK = 4


def after(state: int, ids: Sequence[int]) -> int:
    """Return the model's state once it has read `ids` in `state`."""
    return zlib.crc32(bytes(ids), state)


class HashState:
    """A snapshot; knows the tokens it stands for, which a real one does not."""

    def __init__(self, ids: Sequence[int], value: int, num_bytes: int = 100) -> None:
        self.ids = tuple(ids)
        self.value = value
        self.num_bytes = num_bytes
        self.is_released = False

    def release(self) -> None:
        assert not self.is_released, "released twice"
        self.is_released = True


class RecurrentModel:
    """Reads contexts in pieces, and has a state kept after each piece that ends with a block."""

    def __init__(self, num_blocks: int, reuse: bool = True) -> None:
        geometry = KvGeometry((LayerGeometry(1, 1, 1),), torch.float32, BLOCK)
        self.manager = CacheManager(KvPool(geometry, num_blocks, CPU), reuse)
        self.made: list[HashState] = []

    @property
    def kept(self) -> list[HashState]:
        return [state for state in self.made if not state.is_released]

    def begin(self, ids: Sequence[int]) -> tuple[BlockTable, int]:
        """Return a table of what is cached of a context, and the state it ends in."""
        table, snapshot = self.manager.match_state(ids)
        if snapshot is None:
            assert table.cached_len == 0
            return table, 0
        assert isinstance(snapshot, HashState)
        assert not snapshot.is_released
        assert snapshot.ids == tuple(ids[: table.cached_len])
        return table, snapshot.value

    def read(self, table: BlockTable, ids: Sequence[int], cuts: Sequence[int], state: int) -> bool:
        """Go on from a table to the end of `ids`, by way of `cuts`; false without room."""
        start = table.cached_len
        for end in cuts:
            if not self.manager.reserve(table, start, end):
                return False
            state = after(state, ids[start:end])
            self.manager.commit(table, ids, end)
            table.cached_len = start = end
            if end and end % BLOCK == 0:
                snapshot = HashState(ids[:end], state, num_bytes=end)
                self.made.append(snapshot)
                self.manager.attach_state(table, snapshot)
        assert state == after(0, ids[:start]), "the state is not that of the tokens"
        return True

    def compute(self, ids: Sequence[int], *cuts: int) -> int:
        """Read a context and leave it cached; return how much of it was."""
        table, state = self.begin(ids)
        cached_len = table.cached_len
        later = [cut for cut in cuts if cut > cached_len]
        assert self.read(table, ids, [*later, len(ids)], state)
        self.manager.release(table, ids[: table.cached_len])
        return cached_len

    def check(self, tables: list[BlockTable]) -> None:
        self.manager.check(tables)
        assert self.manager.state_bytes == sum(state.num_bytes for state in self.kept)


def test_a_context_goes_on_from_the_longest_state_of_its_beginning() -> None:
    model = RecurrentModel(20)
    story = list(range(22))
    assert model.compute(story, 4, 16) == 0

    assert model.compute([*story[:19], 99]) == 16
    assert model.compute([*story[:15], 99]) == 4
    assert model.compute([*story[:3], 99]) == 0
    model.check([])


def test_at_least_one_token_is_left_to_compute() -> None:
    model = RecurrentModel(20)
    model.compute(list(range(8)), 4)

    assert model.compute(list(range(8))) == 4


def test_a_state_goes_with_the_last_of_its_blocks() -> None:
    model = RecurrentModel(20)
    model.compute(list(range(16)), 8)
    early, late = model.made

    model.manager.evict_cold(1)
    assert (early.is_released, late.is_released) == (False, True)
    assert model.manager.state_bytes == early.num_bytes
    model.manager.evict_cold(1)
    assert not early.is_released
    model.manager.evict_cold(1)
    assert early.is_released
    assert model.manager.state_bytes == 0
    model.check([])


def test_a_state_of_known_tokens_is_released_at_once() -> None:
    model = RecurrentModel(20)
    ids = list(range(9))
    tables = [model.begin(ids)[0] for _ in range(2)]
    for table in tables:
        assert model.read(table, ids, [8, 9], 0)

    first, second = model.made
    assert (first.is_released, second.is_released) == (False, True)
    model.check(tables)


def test_what_is_forgotten_takes_its_states_along() -> None:
    model = RecurrentModel(20)
    model.compute(list(range(16)), 4, 8, 12)
    model.compute([*range(8), 99, 99, 99, 99], 8)

    model.manager.forget(list(range(16)), num_kept=8)

    assert {len(state.ids) for state in model.kept} == {4, 8, 12}
    assert model.compute([*range(12), 1]) == 8
    model.check([])


def test_without_reuse_nothing_is_kept() -> None:
    model = RecurrentModel(20, reuse=False)

    assert model.compute(list(range(8)), 4) == 0
    assert model.compute(list(range(8)), 4) == 0
    assert model.kept == []


def test_the_check_finds_a_state_that_lost_its_block() -> None:
    model = RecurrentModel(20)
    model.compute(list(range(8)))
    [leaf] = [node for node in model.manager._tree.nodes() if node.states]
    assert leaf.states is not None
    leaf.states[3] = leaf.states.pop(2)

    with pytest.raises(AssertionError, match="a state without its block"):
        model.check([])


def longest(model: RecurrentModel, ids: Sequence[int]) -> int:
    """The naive way to look for a state: at all of them."""
    return max(
        (len(s.ids) for s in model.kept if s.ids == tuple(ids[:-1][: len(s.ids)])), default=0
    )


@short_and_long(4, 200)
def test_random_actors_agree_with_recomputing_from_scratch(size: int) -> None:
    """Match, read, branch, evict and forget at random."""
    for seed in range(size):
        live(random.Random(seed))


def live(rng: random.Random) -> None:
    model = RecurrentModel(40)
    held: list[tuple[BlockTable, list[int]]] = []
    num_reused = 0
    for _ in range(400):
        ids = [rng.randint(0, 1) for _ in range(rng.randint(1, 40))]
        action = rng.random()
        if action < 0.6:
            expected = longest(model, ids)
            table, state = model.begin(ids)
            assert table.cached_len == expected
            num_reused += expected
            left = range(table.cached_len + 1, len(ids) + 1)
            cuts = sorted(rng.sample(left, min(len(left), rng.randint(1, 4))))
            model.read(table, ids, cuts, state)
            held.append((table, ids))
        elif action < 0.75:
            model.manager.evict_cold(rng.randint(1, 6))
        elif action < 0.85:
            model.manager.forget(ids, rng.randrange(len(ids)))
        while held and (len(held) > 2 or rng.random() < 0.5):
            table, ids = held.pop(rng.randrange(len(held)))
            model.manager.release(table, ids[: table.cached_len])
        model.check([table for table, _ in held])
    assert num_reused, "no state was ever used again"
    for table, ids in held:
        model.manager.release(table, ids[: table.cached_len])
    model.manager.clear()
    assert model.kept == []
    model.check([])
