"""Products with a matrix of floats or blocks: kernels with their tasks, for steps or one call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvchat_kernels.cpu.activation_rounding import RoundingTask, rounding_kernel
from kvchat_kernels.cpu.block_products import BlockProductTask, block_product_kernel
from kvchat_kernels.cpu.code import Kernel
from kvchat_kernels.cpu.features import has_tiles
from kvchat_kernels.cpu.maths import Stored, stored_as
from kvchat_kernels.cpu.products import ProductTask, product_kernel, unit_rows
from kvchat_kernels.cpu.task import Task
from kvchat_kernels.cpu.tile_products import (
    TILE_ROWS,
    TiledProductTask,
    tiled_product_kernel,
    tiled_rounding_kernel,
)
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, Rounding
from kvchat_kernels.linear.rows import Rows


@dataclass(frozen=True, slots=True)
class Product:
    """A kernel and its task; a unit is a chunk of the matrix' rows."""

    kernel: Kernel[Any]
    task: Task
    num_units: int


def rounding(
    floats: torch.Tensor, rows: Rows, *, is_tiled: bool = False
) -> tuple[Kernel[RoundingTask], RoundingTask]:
    """Return what rounds `floats` [rows, in] into `rows`: a kernel, whose units are rows.

    `is_tiled`: many rows lie as tiled products read them, else as others do.
    """
    task = RoundingTask(
        floats=floats,
        num_blocks=floats.shape[1] // COLUMNS,
        **rows.operands(),
    )
    if is_tiled:
        return tiled_rounding_kernel(rows.rounding), task
    return rounding_kernel(rows.rounding, many_are_short(rows.rounding)), task


def many_are_short(rounding: Rounding) -> bool:
    """Return whether many rows are multiplied as 16 bits.

    Beside tiles the lanes of a sum have the columns that a tile's have.
    """
    return rounding is Rounding.SHORT if has_tiles() else not rounding.has_8_bits


def block_product(
    weights: BlockWeights,
    x: Rows,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    num_out: int | None = None,
    is_tiled: bool = False,
) -> Product:
    """Return the product of rounded rows with an interleaved matrix, or its first `num_out` rows.

    out        float32 [rows, out], may lie in a wider matrix
    bias       float32 [out]
    is_tiled   multiplies many rows by tiles; the rows were rounded for these
    """
    num_out = weights.num_out if num_out is None else num_out
    chunk = unit_rows(num_out, weights.levels.shape[1])
    layout = weights.layout
    # Whole levels beside 16 bits are read as fast by each tile, and one row is faster without it.
    # So are nibbles beside 8 bits.
    is_short = many_are_short(layout.rounding)
    gains = layout.has_planes or (is_short and layout.rounding is not Rounding.SHORT)
    is_read_once = gains and (is_short or layout.rounding.has_8_bits) and not is_tiled
    kernel: Kernel[Any] = block_product_kernel(weights.layout, is_read_once)
    new_task: Callable[..., BlockProductTask] = BlockProductTask
    if is_tiled:
        chunk += -chunk % TILE_ROWS  # rows of a unit are whole tiles
        new_task = partial(TiledProductTask, few=kernel)
        kernel = tiled_product_kernel(weights.layout, bias is not None)
    task = new_task(
        num_out=num_out,
        num_blocks=weights.num_in // COLUMNS,
        **weights.parts(),
        **x.operands(),
        out=out,
        out_stride=out.stride(0) * 4,
        bias=bias,
        chunk=chunk,
    )
    return Product(kernel, task, -(-num_out // chunk))


def float_product(
    weights: torch.Tensor | BlockWeights,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    num_out: int | None = None,
) -> Product:
    """Return the product of rows `x` [rows, in] float32 with floats that a kernel reads.

    Floats of 8 bits are in blocks. The others are as of `block_product`; `in` is a multiple of
    `products.COLUMNS`.
    """
    scales = weights.scales if isinstance(weights, BlockWeights) else None
    weights = weights.levels if isinstance(weights, BlockWeights) else weights
    stored = stored_as(weights.dtype) if scales is None else Stored.E4M3
    assert stored is not None, weights.dtype
    num_out = len(weights) if num_out is None else num_out
    chunk = unit_rows(num_out, weights.shape[1] * weights.itemsize)
    task = ProductTask(
        weights=weights,
        num_out=num_out,
        num_in=weights.shape[1],
        scales=scales,
        x=x,
        x_stride=x.stride(0) * 4,
        out=out,
        out_stride=out.stride(0) * 4,
        bias=bias,
        chunk=chunk,
    )
    return Product(product_kernel(stored, bias is not None), task, -(-num_out // chunk))
