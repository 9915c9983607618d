"""Snapshots of recurrent state beside KV blocks, against recomputing the state from the start.

The recurrent model is a hash of all tokens so far, which is next to nothing but depends on each.
"""

import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from kvchat.cache.block_table import BlockTable
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from kvchat.cache.state_manager import StateCacheManager
from support.cached_contexts import CPU, images_of
from support.soak_sizes import short_and_long

BLOCK = 4
# A block of the pool holds 32 bytes: a snapshot takes three blocks.
STATE_BYTES = 80


def after(state: int, ids: Sequence[int]) -> int:
    """Return the model's state once it has read `ids` in `state`."""
    return zlib.crc32(bytes(ids), state)


@dataclass
class RecurrentModel:
    """Reads contexts as a stateful runner does, and checks the state at every start."""

    num_blocks: int = 100
    reuse: bool = True
    manager: StateCacheManager = field(init=False)

    def __post_init__(self) -> None:
        geometry = KvGeometry((LayerGeometry(1, 1, 1),), torch.float32, BLOCK)
        pool = KvPool(geometry, self.num_blocks, CPU)
        self.manager = StateCacheManager(pool, STATE_BYTES, self.reuse)

    def begin(self, ids: Sequence[int]) -> BlockTable:
        table = self.manager.start(ids)
        state = self.manager.state_of(table)
        assert state.num_tokens == table.cached_len
        assert self.read_back(state.data) == after(0, ids[: table.cached_len])
        return table

    def read_back(self, data: torch.Tensor) -> int:
        """Return a state; its copies in all places agree."""
        values = set(struct.unpack(f"<{STATE_BYTES // 4}I", bytes(data[:STATE_BYTES].tolist())))
        assert len(values) == 1, "a state made of several"
        return values.pop()

    def read(self, table: BlockTable, ids: Sequence[int], end: int, is_prompt_end: bool) -> bool:
        """Go on from a table to `end`; false without room."""
        state = self.manager.state_of(table)
        start = state.num_tokens
        if not self.manager.reserve(table, start, end):
            return False
        cuts = self.manager.cuts(table, start, end, is_prompt_end)
        for stop in sorted({*cuts, end}):
            value = after(self.read_back(state.data), ids[state.num_tokens : stop])
            packed = struct.pack("<I", value) * (STATE_BYTES // 4)
            state.data[:STATE_BYTES] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            state.num_tokens = stop
            if stop in cuts:
                self.manager.take_snapshot(table)
        self.manager.commit(table, ids, end)
        return True

    def turn(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Read a prompt in one step and an answer token by token; return what was cached."""
        table = self.begin(prompt)
        ids = [*prompt, *answer]
        num_cached = table.cached_len
        assert self.read(table, ids, len(prompt), is_prompt_end=True)
        for end in range(len(prompt) + 1, len(ids) + 1):
            assert self.read(table, ids, end, is_prompt_end=False)
        self.manager.release(table, ids)
        self.manager.check([])
        return num_cached


def test_the_next_turn_starts_at_the_last_block_end_of_the_turn_before() -> None:
    model = RecurrentModel()
    assert model.turn(range(10), range(20, 29)) == 0

    assert model.turn([*range(10), *range(20, 29), 1, 2, 3], [4]) == 16


def test_an_answer_is_tried_again_from_the_end_of_its_prompt() -> None:
    model = RecurrentModel()
    model.turn(range(70), range(3))
    assert model.turn(range(70), range(5, 9)) == 68


def test_a_prompt_that_ends_with_a_block_leaves_that_block_to_compute() -> None:
    model = RecurrentModel()
    model.turn(range(40), [])
    assert model.turn(range(40), []) == 36


def test_where_a_prompt_leaves_a_known_context_it_takes_a_snapshot() -> None:
    model = RecurrentModel()
    story = list(range(60))
    model.turn(story, [])
    first = model.turn([*story[:30], *range(100, 120)], [])
    second = model.turn([*story[:30], *range(150, 170)], [])
    assert first == 0
    assert second == 28


def test_snapshots_close_to_their_neighbours_are_dropped() -> None:
    model = RecurrentModel(400)
    ids: list[int] = []
    for turn in range(20):
        model.turn([*ids, turn, turn, turn], [turn, turn])
        ids += [turn] * 5

    positions = [0, *model.manager.snapshot_positions(ids)]
    pairs = zip(positions, positions[2:], strict=False)
    assert positions[-1] == 100
    assert all(late - early > model.manager._between for early, late in pairs)
    assert all(late - early <= 2 * model.manager._between for early, late in pairwise(positions))


def test_a_snapshot_without_room_is_left_out() -> None:
    model = RecurrentModel(num_blocks=4)
    assert model.turn(range(11), []) == 0
    assert model.turn(range(11), []) == 0


def test_a_context_may_take_the_blocks_of_the_snapshot_that_it_begins_at() -> None:
    """The request held both until its first step, and failed: the cache had no room for it."""
    model, ids = RecurrentModel(num_blocks=7), range(24)
    model.turn(ids[:11], [])
    table = model.manager.start(ids)
    assert table.cached_len == 8

    assert model.manager.has_room(table, len(ids), 0)
    assert model.manager.reserve(table, 8, len(ids))
    assert len(table.blocks) == 6
    assert model.read_back(model.manager.state_of(table).data) == after(0, ids[:8])


def test_an_evicted_part_of_a_snapshot_makes_it_a_miss_until_it_is_taken_again() -> None:
    model = RecurrentModel()
    model.turn(range(11), [])
    model.manager.evict_cold(1)
    assert model.manager.num_reusable_tokens(range(11)) == 0
    assert model.turn(range(11), []) == 0
    assert model.turn(range(11), []) == 8


def test_a_failed_sequence_leaves_no_snapshot() -> None:
    model = RecurrentModel()
    table = model.begin(range(20))
    assert model.read(table, range(20), 20, is_prompt_end=True)
    assert model.manager.snapshot_positions(range(20)) == [16]
    model.manager.drop_states(table, range(20))
    model.manager.release(table, range(20))
    assert model.manager.snapshot_positions(range(20)) == []


def test_a_fork_has_a_state_of_its_own() -> None:
    model = RecurrentModel()
    table = model.begin(range(9))
    assert model.read(table, range(9), 9, is_prompt_end=True)
    fork = model.manager.fork(table, 9)
    assert model.read(table, [*range(9), 1], 10, is_prompt_end=False)
    assert model.read(fork, [*range(9), 2], 10, is_prompt_end=False)
    assert model.read_back(model.manager.state_of(fork).data) == after(0, [*range(9), 2])
    assert model.read_back(model.manager.state_of(table).data) == after(0, [*range(9), 1])
    model.manager.check([table, fork])


def test_what_is_forgotten_takes_its_snapshots_along() -> None:
    model = RecurrentModel()
    model.turn(range(40), [])
    model.manager.forget(range(40), num_kept=20)
    assert model.manager.snapshot_positions(range(40)) == []
    model.manager.check([])


def test_without_reuse_nothing_is_kept() -> None:
    model = RecurrentModel(reuse=False)
    assert model.turn(range(20), [1]) == 0
    assert model.turn(range(20), [1]) == 0
    assert model.manager.status().num_cached == 0


def test_a_snapshot_is_kept_on_slower_tiers_as_a_context_of_its_own() -> None:
    model, other = RecurrentModel(), RecurrentModel()
    model.turn(range(40), [])
    kv, *snapshots = model.manager.contexts_to_keep(range(40))
    assert list(kv) == list(range(40))
    for context in (kv, *snapshots):
        num_known = other.manager.num_cached_tokens(context) // BLOCK
        image = images_of(model.manager, context, num_known, len(context) // BLOCK)
        other.manager.adopt(context, num_known, bytearray(image))
    assert other.turn(range(40), []) == 36


@short_and_long(3, 100)
def test_random_actors_agree_with_recomputing_from_scratch(size: int) -> None:
    """Start, read, branch, fork, evict, fail and forget at random."""
    for seed in range(size):
        assert live(random.Random(seed), RecurrentModel(60)), "no state was ever used again"


def live(rng: random.Random, model: RecurrentModel) -> int:
    """Return how many tokens were not read again."""
    held: list[tuple[BlockTable, list[int]]] = []
    num_reused = 0
    for _ in range(300):
        ids = [rng.randint(0, 1) for _ in range(rng.randint(1, 60))]
        action = rng.random()
        if action < 0.6:
            expected = model.manager.num_reusable_tokens(ids[:-1])
            table = model.begin(ids)
            assert table.cached_len == expected
            num_reused += expected
            ends = sorted({len(ids), *rng.choices(range(1, len(ids) + 1), k=2)})
            for end in (end for end in ends if end > table.cached_len):
                if not model.read(table, ids, end, is_prompt_end=end == len(ids)):
                    break
            held.append((table, ids))
            if rng.random() < 0.2:
                done = model.manager.state_of(table).num_tokens
                held.append((model.manager.fork(table, done), ids))
        elif action < 0.75:
            model.manager.evict_cold(rng.randint(1, 6))
        elif action < 0.85:
            model.manager.forget(ids, rng.randrange(len(ids)))
        while held and (len(held) > 2 or rng.random() < 0.5):
            table, ids = held.pop(rng.randrange(len(held)))
            done = model.manager.state_of(table).num_tokens
            if rng.random() < 0.1:
                model.manager.drop_states(table, ids)
            model.manager.release(table, ids[:done])
        model.manager.check([table for table, _ in held])
    for table, _ in held:
        model.manager.release(table, [])
    model.manager.clear()
    assert model.manager.status().num_cached == 0
    model.manager.check([])
    return num_reused


def test_a_step_whose_drafts_were_all_wrong_at_a_block_end_copies_its_state_once() -> None:
    model = RecurrentModel()
    ids = list(range(BLOCK))
    table = model.begin(ids)
    assert model.read(table, ids, BLOCK, is_prompt_end=False)
    assert table.state is not None
    model.manager.state_of(table).data.fill_(7)  # what a second copy would have

    assert model.manager.settle_drafts(table, BLOCK, 0) == BLOCK
    assert model.read_back(table.state.taken[BLOCK]) == after(0, ids)
