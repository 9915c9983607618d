"""Products with block weights as Triton kernels: for one row, for 2 to 16 rows, and unpacking.

Weights are read once and unpacked in registers. Shapes: M rows, padded to 16; N outputs of a tile;
B blocks of a loop step; W bytes of a block, which has 2 W columns in 4 bits and W in 8 bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch
from kvchat_kernels.linear.blocks import STEP_COLUMNS as _STEP_COLUMNS
from kvchat_kernels.linear.blocks import BlockWeights

ROWS_OF_A_TILE = 16
STEP_COLUMNS = tl.constexpr(_STEP_COLUMNS)
ONE_ROW_TILE = {"BLOCK_N": 8, "BLOCK_B": 32, "STAGES": 3}


@triton.jit
def load_blocks(
    levels_ptr, scales_ptr, minimums_ptr, steps_ptr, output, block, out_size,
    NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return levels [N, B, W], scales and minimums [N, B] float32; zeros outside the matrix.

    Without minimums a level of 8 stands for 0 in 4 bits. Whole scales and minimums are multiplied
    with their steps.
    """
    place = output.to(tl.int64)[:, None] * NUM_BLOCKS + block[None, :]
    inside = (output < out_size)[:, None] & (block < NUM_BLOCKS)[None, :]
    byte = tl.arange(0, WIDTH)
    places = place[:, :, None] * WIDTH + byte[None, None, :]
    levels = tl.load(levels_ptr + places, mask=inside[:, :, None], other=0)
    scales = tl.load(scales_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if steps_ptr is not None:
        blocks_of_a_step: tl.constexpr = STEP_COLUMNS * BITS // (8 * WIDTH)
        num_steps: tl.constexpr = NUM_BLOCKS // blocks_of_a_step
        step = output.to(tl.int64)[:, None] * num_steps + (block // blocks_of_a_step)[None, :]
        if minimums_ptr is not None:
            step *= 2
        scales *= tl.load(steps_ptr + step, mask=inside, other=0.0).to(tl.float32)
    minimums = scales * (-8.0 if BITS == 4 else 0.0)
    if minimums_ptr is not None:
        minimums = tl.load(minimums_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if steps_ptr is not None:
            minimums *= tl.load(steps_ptr + step + 1, mask=inside, other=0.0).to(tl.float32)
    return levels, scales, minimums


@triton.jit
def outputs_of_row(
    row_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr,
    output, out_size, IN_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return one row's products with the matrix's rows `output` [N], in float32 [N].

    A thread sums whole blocks, then all add. A block's sum is scaled once, and its minimum
    multiplies the sum of its inputs.
    """
    byte = tl.arange(0, WIDTH)[None, None, :]
    total = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.float32)
    for start in tl.range(0, NUM_BLOCKS, BLOCK_B, num_stages=STAGES):
        block = start + tl.arange(0, BLOCK_B)
        levels, scales, minimums = load_blocks(
            levels_ptr, scales_ptr, minimums_ptr, steps_ptr, output, block, out_size, NUM_BLOCKS,
            WIDTH, BITS,
        )  # fmt: skip
        column = block[None, :, None] * (WIDTH * 8 // BITS) + byte  # [1, B, W]
        low = tl.load(row_ptr + column, mask=column < IN_SIZE, other=0.0).to(tl.float32)
        if BITS == 4:
            column += WIDTH
            high = tl.load(row_ptr + column, mask=column < IN_SIZE, other=0.0).to(tl.float32)
            products = (levels & 15).to(tl.float32) * low + (levels >> 4).to(tl.float32) * high
            inputs = low + high
        else:
            products = levels.to(tl.float32) * low
            inputs = low
        total += tl.sum(products, axis=2) * scales
        if BITS == 4 or minimums_ptr is not None:
            total += tl.sum(inputs, axis=2) * minimums
    return tl.sum(total, axis=1)


@triton.jit
def one_row_kernel(
    row_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, bias_ptr, out_ptr, out_size,
    IN_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile,) computes BLOCK_N outputs."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    result = outputs_of_row(
        row_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr,
        output, out_size, IN_SIZE, NUM_BLOCKS,
        WIDTH, BITS, BLOCK_N, BLOCK_B, STAGES,
    )  # fmt: skip
    is_output = output < out_size
    if bias_ptr is not None:
        result += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def outputs_of_rows(
    rows_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, row, is_row, output, out_size,
    IN_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of rows `row` [M, 1] with the matrix's rows `output` [N]: float32 [M, N].

    On the tensor cores. Weights are rounded to the rows' dtype, as unpacked ones are.
    """
    inner = tl.arange(0, BLOCK_B * WIDTH)[None, :]  # [1, B * W]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, NUM_BLOCKS, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        levels, scales, minimums = load_blocks(
            levels_ptr, scales_ptr, minimums_ptr, steps_ptr, output, block, out_size, NUM_BLOCKS,
            WIDTH, BITS,
        )  # fmt: skip
        scales, minimums = scales[:, :, None], minimums[:, :, None]
        column = (start + inner // WIDTH) * (WIDTH * 8 // BITS) + inner % WIDTH
        for part in tl.static_range(8 // BITS):
            if BITS == 8:
                part_levels = levels
            elif part == 0:
                part_levels = levels & 15
            else:
                part_levels = levels >> 4
            weights = part_levels.to(tl.float32) * scales + minimums  # [N, B, W]
            weights = tl.reshape(weights.to(rows_ptr.dtype.element_ty), (BLOCK_N, BLOCK_B * WIDTH))
            columns = column + part * WIDTH
            rows = tl.load(
                rows_ptr + row * IN_SIZE + columns, mask=is_row & (columns < IN_SIZE), other=0.0
            )
            total = tl.dot(rows, tl.trans(weights), total, input_precision=PRECISION)
    return total


# do_not_specialize: one compilation for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    rows_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr,
    bias_ptr, out_ptr, num_rows, out_size,
    IN_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile,) computes BLOCK_N outputs of all rows."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)[:, None]  # [M, 1]
    total = outputs_of_rows(
        rows_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr,
        row, row < num_rows, output, out_size,
        IN_SIZE, NUM_BLOCKS, WIDTH, BITS, BLOCK_M, BLOCK_N, BLOCK_B, PRECISION,
    )  # fmt: skip
    outputs = output[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=outputs < out_size, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64) * out_size + outputs
    inside = (row < num_rows) & (outputs < out_size)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unpack_kernel(
    levels_ptr, scales_ptr, minimums_ptr, steps_ptr, out_ptr, out_size, NUM_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Program (output tile, block tile) writes BLOCK_N rows of BLOCK_B blocks in `out`'s dtype."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    levels, scales, minimums = load_blocks(
        levels_ptr, scales_ptr, minimums_ptr, steps_ptr, output, block, out_size, NUM_BLOCKS,
        WIDTH, BITS,
    )  # fmt: skip
    columns: tl.constexpr = WIDTH * 8 // BITS
    place = output.to(tl.int64)[:, None] * NUM_BLOCKS + block[None, :]
    target = place[:, :, None] * columns + tl.arange(0, WIDTH)[None, None, :]
    inside = ((output < out_size)[:, None] & (block < NUM_BLOCKS)[None, :])[:, :, None]
    scales, minimums = scales[:, :, None], minimums[:, :, None]
    for part in tl.static_range(8 // BITS):
        if BITS == 8:
            part_levels = levels
        elif part == 0:
            part_levels = levels & 15
        else:
            part_levels = levels >> 4
        weights = part_levels.to(tl.float32) * scales + minimums
        tl.store(out_ptr + target + part * WIDTH, weights.to(out_ptr.dtype.element_ty), mask=inside)


def block_linear_launch(
    rows: torch.Tensor, weights: BlockWeights, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    """Return the launch that fills `out` [num_rows, out] for 1 to 16 contiguous rows."""
    assert rows.is_contiguous()
    assert out.is_contiguous()
    num_rows, in_size = rows.shape
    values = {**operands(weights), "bias_ptr": bias, "out_ptr": out, "IN_SIZE": in_size}
    if num_rows == 1:
        tile = ONE_ROW_TILE
        grid = (triton.cdiv(weights.num_out, tile["BLOCK_N"]),)
        return Launch(one_row_kernel, grid, {"row_ptr": rows, **values, **tile})
    few = few_rows_tile(rows.dtype)
    grid = (triton.cdiv(weights.num_out, few["BLOCK_N"]),)
    return Launch(few_rows_kernel, grid, {"rows_ptr": rows, "num_rows": num_rows, **values, **few})


def few_rows_tile(dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile of `outputs_of_rows` for rows of a dtype, and how exactly it multiplies."""
    is_exact = dtype == torch.float32
    tile = {"BLOCK_M": ROWS_OF_A_TILE, "BLOCK_N": 32, "BLOCK_B": 4 if is_exact else 8}
    return {**tile, "PRECISION": "ieee" if is_exact else "tf32"}


def unpack_launch(weights: BlockWeights, out: torch.Tensor) -> Launch:
    """Return the launch that writes the whole matrix to `out` [out, in], contiguous."""
    assert out.is_contiguous()
    tile = {"BLOCK_N": 8, "BLOCK_B": 32}
    values = {**operands(weights), "out_ptr": out, **tile}
    num_blocks = weights.num_in // weights.block
    grid = (triton.cdiv(weights.num_out, tile["BLOCK_N"]), triton.cdiv(num_blocks, tile["BLOCK_B"]))
    return Launch(unpack_kernel, grid, values)


def operands(weights: BlockWeights) -> dict[str, object]:
    """Return the parameters of kernels that stand for a matrix."""
    assert not weights.is_interleaved, "as compiled code for a CPU reads them"
    return {
        "levels_ptr": weights.levels,
        "scales_ptr": weights.scales,
        "minimums_ptr": weights.minimums,
        "steps_ptr": weights.steps,
        "out_size": weights.num_out,
        "NUM_BLOCKS": weights.num_in // weights.block,
        "WIDTH": weights.block * weights.bits // 8,
        "BITS": weights.bits,
    }
