"""Products of many rows by a processor's tiles are those by vectors, to the bit."""

from pathlib import Path

import pytest
import torch

from kvchat.model.cpu.step_operations import StepOperations
from kvchat.model.decoder.matrices import Matrix
from kvchat_kernels.cpu import tile_products
from kvchat_kernels.cpu.features import has_tiles
from kvchat_kernels.cpu.program import Program
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.tile_products import TILE_ROWS
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, Layout, interleaved
from kvchat_kernels.linear.cpu import BlockProduct
from matrix.test_linear_blocks import KINDS, Kind, is_stepped, outlying, random_blocks
from support.matrix import spread
from support.other_process import run_python

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="this processor has no AMX")
# Outputs and inputs: one unit and several, full tiles and not, one run of groups and several.
SHAPES = [(1, 256), (37, 1536), (300, 512), (17, 4864)]
# Groups of 4 and of 2 blocks behind those of 8.
UNEVEN = [(37, 640), (20, 4544)]


def by_step(weights: BlockWeights, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product of rows as the program of a step computes it."""
    operations = StepOperations()
    source = operations.input("x", x.shape[1])
    source.floats[: len(x)] = x
    out = operations.output("out", weights.num_out)
    operations.products([Matrix(weights, bias)], source, source.floats, out)
    operations.header[Header.NUM_ROWS] = len(x)
    program = Program(operations.all)
    program.units[operations.of_rows] = len(x)
    program.prepare()
    program.run(2)
    return out[: len(x)].clone()


@needs_tiles
@pytest.mark.parametrize(
    "kind", spread([(kind,) for kind in KINDS], [(KINDS[n],) for n in (0, 4, 12, 15, 17)]), ids=str
)
def test_many_rows_have_the_numbers_of_few(kind: Kind) -> None:
    """Else a prompt and the answer to it were two models, and a cache changed answers."""
    for shape in SHAPES if is_stepped(kind) or kind[1] < COLUMNS else SHAPES + UNEVEN:
        weights = interleaved(random_blocks(shape, *kind))
        product = BlockProduct(weights)
        for num_rows in (1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 3, 128):
            x = outlying(num_rows, weights.num_in)
            assert torch.equal(by_step(weights, x, None), product(x)), (shape, num_rows)


@needs_tiles
def test_a_bias_is_added_to_each_row() -> None:
    weights, bias = interleaved(random_blocks((37, 512), *KINDS[0])), torch.randn(37)
    for num_rows in (2, TILE_ROWS):
        x = outlying(num_rows, weights.num_in)
        plain = BlockProduct(weights)(x)
        assert torch.equal(by_step(weights, x, bias), plain + bias)


@needs_tiles
def test_the_largest_levels_fit_two_bytes() -> None:
    """A level of 32,767 has no high byte of 128."""
    weights = interleaved(random_blocks((16, 256), 8, 32, torch.float16, False))
    x = torch.ones(TILE_ROWS, 256) * torch.tensor([1.0, -1.0]).repeat(TILE_ROWS // 2)[:, None]

    assert torch.equal(by_step(weights, x, None), BlockProduct(weights)(x))


def test_rows_of_many_small_groups_and_other_processors_take_vectors(monkeypatch):
    layout = Layout(8, 32, torch.float16, has_minimums=False, is_interleaved=True)
    monkeypatch.setattr(tile_products, "has_tiles", lambda: True)
    assert tile_products.can_use_tiles(layout, 512)
    assert tile_products.can_use_tiles(layout, 576)
    assert not any(tile_products.can_use_tiles(layout, width) for width in (192, 288, 320, 544))

    monkeypatch.setattr(tile_products, "has_tiles", lambda: False)
    assert not tile_products.can_use_tiles(layout, 512)


def test_a_level_without_tiles_has_none(tmp_path: Path) -> None:
    check = "from kvchat_kernels.cpu.features import has_tiles; print(has_tiles())"

    printed = run_python(check, KVCHAT_CPU="x86-64-v2", KVCHAT_KERNEL_CACHE=str(tmp_path))

    assert printed.split() == ["False"]
