"""Recurrent state beside layers with a window: both are there where a sequence begins, or neither.

The model of `test_state_snapshots.py`, with KV of two layers: of all tokens, and of a window; in
float32, or in 8 bits, which tell all its tokens and positions from each other.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.kv_pool import CodedFormat, KvFormat, KvGeometry, LayerGeometry, PlainFormat
from kvchat.cache.windowed_pool import WindowedKvPool, Windows
from kvchat.cache.windowed_state_manager import WindowedStateManager
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.kv_code import INT8
from kvchat_kernels.kv_layer import KvLayer
from support.cached_contexts import CPU, images_of
from support.soak_sizes import short_and_long
from unit.cache.test_state_snapshots import BLOCK, STATE_BYTES, RecurrentModel, live

WINDOW = 10
PLAIN = PlainFormat()


@dataclass
class Model(RecurrentModel):
    """Checks that each token sees the KV of all tokens before it, and of a window of them."""

    num_window_blocks: int = 40
    windowed: frozenset[int] = frozenset({1})
    kv_format: KvFormat = PLAIN

    def __post_init__(self) -> None:
        geometry = KvGeometry((LayerGeometry(1, 1, 1),) * 2, torch.float32, BLOCK, self.kv_format)
        windows = Windows(self.windowed, WINDOW, -(-STATE_BYTES // geometry.block_bytes))
        self.pool = WindowedKvPool(geometry, windows, self.num_blocks, self.num_window_blocks, CPU)
        self.manager = WindowedStateManager(self.pool, STATE_BYTES, 80, self.reuse)

    def read(self, table: BlockTable, ids: Sequence[int], end: int, is_prompt_end: bool) -> bool:
        start, manager = self.manager.state_of(table).num_tokens, self.manager
        if not manager.reserve(table, start, end):
            return False
        for index, layer in enumerate(self.pool.layers):
            places = self.places(table, range(start, end), index)
            tokens = torch.tensor(ids[start:end]).float()
            positions = torch.arange(start, end).float()
            layer.write(tokens.view(-1, 1, 1), positions.view(-1, 1, 1), places)
        for index, layer in enumerate(self.pool.layers):
            first = max(0, start - WINDOW + 1) if index in self.windowed else 0
            places = self.places(table, range(first, end), index)
            keys, values = (side.view(-1)[places] for side in self.numbers(layer))
            assert keys.tolist() == pytest.approx(list(ids[first:end]), rel=0.01)
            assert values.tolist() == pytest.approx(list(range(first, end)), rel=0.01)
        return super().read(table, ids, end, is_prompt_end)

    def numbers(self, layer: KvLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of a layer, in float32."""
        if isinstance(layer, CodedKv):
            keys, key_scales, values, value_scales = layer.tensors
            code = layer.code
            return code.keys.plain(keys, key_scales), code.values.plain(values, value_scales)
        keys, values = layer.tensors
        return keys, values

    def places(self, table: BlockTable, positions: range, index: int) -> torch.Tensor:
        """Return where a layer has tokens."""
        slots = torch.tensor(table.slots(positions.start, positions.stop), dtype=torch.long)
        if index not in self.pool.windows.layers:
            return slots
        numbers = self.pool.blocks.of_block[slots // BLOCK].long()
        assert bool(numbers.all()), "a token of the window has no window block"
        return numbers * BLOCK + slots % BLOCK


def in_use(model: Model) -> int:
    return model.pool.blocks.num_usable - model.pool.blocks.num_available


def test_a_turn_begins_where_the_turn_before_ended() -> None:
    model = Model()
    assert model.turn(range(60), range(20, 33)) == 0
    assert model.turn([*range(60), *range(20, 33), 1, 2, 3], [4]) == 72
    assert in_use(model) == 0


def test_a_snapshot_without_its_window_is_passed_over() -> None:
    model = Model()
    ids = list(range(60))
    model.turn(ids, [])
    table = model.begin([*ids, 1])
    assert table.cached_len == 60
    last = table.blocks[-1]
    model.manager.release(table, ids[: table.cached_len])

    model.pool.blocks.drop(last)

    assert model.manager.num_reusable_tokens([*ids, 1]) == 56
    assert model.turn([*ids, 1], []) == 56
    assert model.turn([*ids, 1], []) == 60, "its window is there again"


@pytest.mark.parametrize("part", [0, -1])
def test_a_snapshot_of_which_a_window_block_left_is_none(part: int) -> None:
    """Its bytes are in both kinds of layers. It is taken again, and no tier gets what is left."""
    model, lower = Model(), LowerTier()
    model.manager.attach(lower)
    ids = list(range(39))
    model.turn(ids, [])
    context = model.manager.with_state(ids, 36)
    blocks = model.manager._tree.blocks_of(context.tobytes())
    num_state = model.manager.num_state_blocks

    model.pool.blocks.drop(blocks[-num_state:][part])

    assert model.manager.num_cached_tokens(context) == 36
    assert model.manager.snapshot_positions(ids) == []
    assert model.manager.export(context, 9, 9 + num_state) is None
    assert model.turn(ids, []) == 0
    assert model.manager.num_cached_tokens(context) == len(context)
    assert model.turn(ids, []) == 36
    model.pool.blocks.drop(model.manager._tree.blocks_of(context.tobytes())[-num_state:][part])
    model.manager.evict_cold(100)
    model.manager.check([])
    assert lower.num_blocks == 9, "those of tokens"


class LowerTier:
    """Counts what it gets."""

    num_blocks = 0

    def demote(self, encoded: bytes, blocks: list[int]) -> None:
        self.num_blocks += len(blocks)

    def forget(self, encoded: bytes, num_kept: int) -> None:
        raise AssertionError

    def clear(self) -> None:
        raise AssertionError


def test_a_long_prompt_holds_a_window_and_its_ends() -> None:
    """Read in steps of two blocks, eight windows long, in little more than a window."""
    model = Model(num_window_blocks=13)
    ids = [n % 7 for n in range(80)]
    table = model.begin(ids)
    most = 0
    for end in range(8, 81, 8):
        assert model.read(table, ids, end, is_prompt_end=end == 80)
        most = max(most, in_use(model))
    model.manager.release(table, ids)
    model.manager.check([])

    assert most <= 3 + 2 + 1
    assert model.turn([*ids, 9], []) == 80


@pytest.mark.parametrize("size", [100, 3], ids=["in one piece", "block by block"])
def test_images_bring_both_back(size: int) -> None:
    model, other = Model(), Model()
    model.turn(range(60), [])
    context = model.manager.contexts_to_keep(range(60))[-1]

    adopt_all(model.manager, other.manager, context, size)

    assert other.turn(range(70), []) == 60


def test_a_whole_snapshot_takes_the_place_of_one_without_a_window_block() -> None:
    model, other = Model(), Model()
    for each in model, other:
        each.turn(range(60), [])
    context = model.manager.with_state(range(60), 56)
    blocks = other.manager._tree.blocks_of(context.tobytes())
    other.pool.blocks.drop(blocks[-1])
    for layer in other.pool.layers:  # what is left is not to be mixed with what comes
        layer.keys[blocks[-1] if len(layer.keys) > 50 else 0] = 77.0

    adopt_all(model.manager, other.manager, context, 100)

    assert other.turn(range(60), []) == 56


def adopt_all(
    source: CacheManager, target: CacheManager, context: Sequence[int], size: int
) -> None:
    """Bring the images of a context that the target lacks, `size` at a time."""
    first, end = target.num_cached_tokens(context) // BLOCK, len(context) // BLOCK
    while first < end:
        last = min(first + size, end)
        image = bytearray(images_of(source, context, first, last))
        assert target.adopt(context, first, image) == last - first
        target.check([])
        first = last


@short_and_long(4, 100)
def test_random_actors_agree_with_recomputing_from_scratch(size: int) -> None:
    """With room for few windows, for more, and for all; also where every layer has a window."""
    num_reused = 0
    for seed in range(size):
        rng = random.Random(seed)
        windowed = frozenset({1}) if seed % 2 else frozenset({0, 1})
        num_windows = rng.choice([30, 45, 60])
        kv_format = CodedFormat(INT8) if seed // 2 % 2 else PLAIN
        model = Model(60, num_window_blocks=num_windows, windowed=windowed, kv_format=kv_format)
        num_reused += live(rng, model)
    assert num_reused, "no state was ever used again"


def test_a_fault_in_what_is_let_go_shows() -> None:
    """The control: windows that leave a block too early."""
    model = Model()
    model.manager.window_blocks -= 1
    with pytest.raises(AssertionError):
        model.turn(range(20), range(40, 75))
