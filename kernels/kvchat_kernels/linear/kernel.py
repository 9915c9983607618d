"""Products with block weights as Triton kernels: for one row, for 2 to 16 rows, and unpacking.

Weights are read once and unpacked in registers. One reader serves all layouts: a `Form`, a constant
of the kernels, says where a matrix has its bits, and what these stand for.

Shapes: M rows, padded to 16; N outputs of a tile; B blocks of a loop step; W bytes that a block has
in its first plane. Byte `i` has columns `i`, `W + i` and so on: a *field* is W columns, which lie
one behind another, and have one scale.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch
from kvchat_kernels.linear.blocks import CENTRE, COLUMNS, PLANES, STEP_COLUMNS, BlockWeights
from kvchat_kernels.linear.file_formats import FLOATS

ROWS_OF_A_TILE = 16
ONE_ROW_TILE = {"BLOCK_N": 8, "BLOCK_B": 32, "STAGES": 3}
# A float whose bits are moved to those of a float16 is so many times too small: one of e4m3, and
# one of 4 bits beside `FLOATS`, which are doubled.
_E4M3_UNIT, _DOUBLED_UNIT = 2.0**8, 2.0**15


@dataclass(frozen=True)
class Form:
    """How a matrix lies in memory, in blocks of `columns` columns.

    num_blocks      of a row
    first, second   bits of the planes of a level; 0: there is no second one. Of a row all bytes of
                    the first plane come first
    zero            what is subtracted from a level; 0 beside minimums
    scale_fields    fields that have one scale
    per_scale       blocks that share one
    per_step        blocks that share a step; 0: a row has one
    kind            of scales that are no plain numbers: e8m0, e4m3, or `pairs` of scale and minimum
    unit            what scales are multiplied with
    has_minimums    whether something is added to scaled levels
    mantissa        its bits in levels that are floats with a sign; 0 for whole numbers and codes
    """

    num_blocks: int
    columns: int
    first: int
    second: int
    zero: int
    scale_fields: int
    per_scale: int
    per_step: int
    kind: str
    unit: float
    has_minimums: bool
    mantissa: int

    @property
    def width(self) -> int:
        """W."""
        return self.columns * self.first // 8

    @property
    def num_fields(self) -> int:
        return 8 // self.first

    @property
    def second_width(self) -> int:
        """The bytes that a block has in its second plane."""
        return self.columns * self.second // 8

    @property
    def num_scales(self) -> int:
        """The scales of a block, 1 or 2."""
        return self.num_fields // self.scale_fields

    @property
    def row_bytes(self) -> int:
        return self.num_blocks * (self.width + self.second_width)


@triton.jit
def load_levels(levels_ptr, output, block, out_size, FORM: tl.constexpr):
    """Return the bytes of blocks in both planes, [N, B, W] and [N, B, V]; zeros outside.

    Without a second plane the first is returned twice.
    """
    row = output.to(tl.int64)[:, None, None] * FORM.row_bytes
    inside = (output < out_size)[:, None] & (block < FORM.num_blocks)[None, :]
    byte = tl.arange(0, FORM.width)[None, None, :]
    place = row + block[None, :, None] * FORM.width + byte
    first = tl.load(levels_ptr + place, mask=inside[:, :, None], other=0)
    second = first
    if FORM.second:
        start = row + FORM.num_blocks * FORM.width
        byte = tl.arange(0, FORM.second_width)[None, None, :]
        place = start + block[None, :, None] * FORM.second_width + byte
        second = tl.load(levels_ptr + place, mask=inside[:, :, None], other=0)
    return first, second


@triton.jit
def levels_of(first, second, codes_ptr, FORM: tl.constexpr, FIELD: tl.constexpr):
    """Return a field's levels [N, B, W] in float32, of what `load_levels` returns."""
    levels = first
    if FORM.first < 8:
        levels = first >> (FIELD * FORM.first)
        if FORM.num_fields > FIELD + 1:
            levels &= (1 << FORM.first) - 1
    if FORM.second:
        # The W columns of a field are in several fields of the second plane.
        parts: tl.constexpr = FORM.width // FORM.second_width
        part = FIELD * parts + tl.arange(0, parts)[None, None, :, None]
        shift = (part * FORM.second).to(tl.uint8)
        high = (second[:, :, None, :] >> shift) & ((1 << FORM.second) - 1)
        levels |= tl.reshape(high << FORM.first, levels.shape)
    if FORM.mantissa:
        # Sign, exponent and mantissa become those of a float16.
        sign: tl.constexpr = FORM.first - 1
        bits = levels.to(tl.uint16)
        rest = (bits & ((1 << sign) - 1)) << (10 - FORM.mantissa)
        levels = (((bits >> sign) << 15) | rest).to(tl.float16, bitcast=True)
    elif codes_ptr is not None:
        levels = tl.load(codes_ptr + levels)
    return levels.to(tl.float32)


@triton.jit
def load_scales(
    scales_ptr, minimums_ptr, steps_ptr, output, block, out_size, FORM: tl.constexpr,
    FIELD: tl.constexpr,
):  # fmt: skip
    """Return a field's scales and minimums [N, B] in float32; zeros outside the matrix.

    Where nothing is added to a level the minimums are zeros.
    """
    row, block, is_row = output.to(tl.int64)[:, None], block[None, :], (output < out_size)[:, None]
    inside = is_row & (block < FORM.num_blocks)
    if FORM.per_scale == 1:
        place = (row * FORM.num_blocks + block) * FORM.num_scales + FIELD // FORM.scale_fields
    else:
        place = row * (FORM.num_blocks // FORM.per_scale) + block // FORM.per_scale
    stored = tl.load(scales_ptr + place, mask=inside, other=0)
    if FORM.kind == "e8m0":
        bits = tl.where(stored == 0, 1 << 22, stored.to(tl.int32) << 23)
        scales = bits.to(tl.float32, bitcast=True)
    elif FORM.kind == "e4m3":
        scales = (stored.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORM.kind == "pairs":
        scales = (stored & 15).to(tl.float32)
    else:
        scales = stored.to(tl.float32)
    if FORM.unit != 1.0:
        scales *= FORM.unit
    if minimums_ptr is not None:
        minimums = tl.load(minimums_ptr + place, mask=inside, other=0).to(tl.float32)
    elif FORM.kind == "pairs":
        minimums = (stored >> 4).to(tl.float32)
    if steps_ptr is not None and FORM.per_step:
        step = row * (FORM.num_blocks // FORM.per_step) + block // FORM.per_step
        if FORM.has_minimums:
            step *= 2
            minimums *= tl.load(steps_ptr + step + 1, mask=inside, other=0.0).to(tl.float32)
        scales *= tl.load(steps_ptr + step, mask=inside, other=0.0).to(tl.float32)
    elif steps_ptr is not None:
        scales *= tl.load(steps_ptr + row, mask=is_row, other=0.0)
    if not FORM.has_minimums:
        minimums = scales * -FORM.zero
    return scales, minimums


@triton.jit
def outputs_of_row(
    row_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr,
    output, out_size, IN_SIZE: tl.constexpr, FORM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return one row's products with the matrix's rows `output` [N], in float32 [N].

    A thread sums whole blocks, then all add. A block's sum is scaled once, and its minimum
    multiplies the sum of its inputs.
    """
    byte = tl.arange(0, FORM.width)[None, None, :]
    total = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.float32)
    num_fields: tl.constexpr = FORM.num_fields
    for start in tl.range(0, FORM.num_blocks, BLOCK_B, num_stages=STAGES):
        block = start + tl.arange(0, BLOCK_B)
        first, second = load_levels(levels_ptr, output, block, out_size, FORM)
        for field in tl.static_range(num_fields):
            if field % FORM.scale_fields == 0:
                scales, minimums = load_scales(
                    scales_ptr, minimums_ptr, steps_ptr, output, block, out_size, FORM, field
                )
            column = block[None, :, None] * FORM.columns + field * FORM.width + byte
            x = tl.load(row_ptr + column, mask=column < IN_SIZE, other=0.0).to(tl.float32)
            of_field = levels_of(first, second, codes_ptr, FORM, field) * x
            if field % FORM.scale_fields == 0:
                products, inputs = of_field, x
            else:
                products += of_field
                inputs += x
            if (field + 1) % FORM.scale_fields == 0:
                total += tl.sum(products, axis=2) * scales
                if FORM.zero or FORM.has_minimums:
                    total += tl.sum(inputs, axis=2) * minimums
    return tl.sum(total, axis=1)


@triton.jit
def one_row_kernel(
    row_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr, bias_ptr, out_ptr,
    out_size, IN_SIZE: tl.constexpr, FORM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile,) computes BLOCK_N outputs."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    result = outputs_of_row(
        row_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr,
        output, out_size, IN_SIZE, FORM, BLOCK_N, BLOCK_B, STAGES,
    )  # fmt: skip
    is_output = output < out_size
    if bias_ptr is not None:
        result += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def weights_of(first, second, codes_ptr, scales, minimums, FORM: tl.constexpr, FIELD: tl.constexpr):
    """Return a field's weights [N, B, W] in float32."""
    levels = levels_of(first, second, codes_ptr, FORM, FIELD)
    return levels * scales[:, :, None] + minimums[:, :, None]


@triton.jit
def outputs_of_rows(
    rows_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr, row, is_row, output,
    out_size, IN_SIZE: tl.constexpr, FORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of rows `row` [M, 1] with the matrix's rows `output` [N]: float32 [M, N].

    On the tensor cores. Weights are rounded to the rows' dtype, as unpacked ones are.
    """
    inner = tl.arange(0, BLOCK_B * FORM.width)[None, :]  # [1, B * W]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    num_fields: tl.constexpr = FORM.num_fields
    for start in range(0, FORM.num_blocks, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        first, second = load_levels(levels_ptr, output, block, out_size, FORM)
        column = (start + inner // FORM.width) * FORM.columns + inner % FORM.width
        for field in tl.static_range(num_fields):
            if field % FORM.scale_fields == 0:
                scales, minimums = load_scales(
                    scales_ptr, minimums_ptr, steps_ptr, output, block, out_size, FORM, field
                )
            weights = weights_of(first, second, codes_ptr, scales, minimums, FORM, field)
            weights = weights.to(rows_ptr.dtype.element_ty)
            weights = tl.reshape(weights, (BLOCK_N, BLOCK_B * FORM.width))
            columns = column + field * FORM.width
            rows = tl.load(
                rows_ptr + row * IN_SIZE + columns, mask=is_row & (columns < IN_SIZE), other=0.0
            )
            total = tl.dot(rows, tl.trans(weights), total, input_precision=PRECISION)
    return total


# do_not_specialize: one compilation for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    rows_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr,
    bias_ptr, out_ptr, num_rows, out_size, IN_SIZE: tl.constexpr, FORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile,) computes BLOCK_N outputs of all rows."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)[:, None]  # [M, 1]
    total = outputs_of_rows(
        rows_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr,
        row, row < num_rows, output, out_size,
        IN_SIZE, FORM, BLOCK_M, BLOCK_N, BLOCK_B, PRECISION,
    )  # fmt: skip
    outputs = output[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=outputs < out_size, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64) * out_size + outputs
    inside = (row < num_rows) & (outputs < out_size)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unpack_kernel(
    levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr, out_ptr, out_size,
    FORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Program (output tile, block tile) writes BLOCK_N rows of BLOCK_B blocks in `out`'s dtype."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = (output < out_size)[:, None] & (block < FORM.num_blocks)[None, :]
    first, second = load_levels(levels_ptr, output, block, out_size, FORM)
    place = output.to(tl.int64)[:, None] * FORM.num_blocks + block[None, :]
    target = place[:, :, None] * FORM.columns + tl.arange(0, FORM.width)[None, None, :]
    num_fields: tl.constexpr = FORM.num_fields
    for field in tl.static_range(num_fields):
        if field % FORM.scale_fields == 0:
            scales, minimums = load_scales(
                scales_ptr, minimums_ptr, steps_ptr, output, block, out_size, FORM, field
            )
        weights = weights_of(first, second, codes_ptr, scales, minimums, FORM, field)
        weights = weights.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target + field * FORM.width, weights, mask=inside[:, :, None])


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
    num_blocks = form_of(weights).num_blocks
    grid = (triton.cdiv(weights.num_out, tile["BLOCK_N"]), triton.cdiv(num_blocks, tile["BLOCK_B"]))
    return Launch(unpack_kernel, grid, values)


def operands(weights: BlockWeights) -> dict[str, object]:
    """Return the parameters of kernels that stand for a matrix."""
    assert not weights.is_interleaved, "as compiled code for a CPU reads them"
    form, codes = form_of(weights), None
    if weights.codes is not None and not form.mantissa:
        codes = _codes_on(weights.codes, weights.device)
    return {
        "levels_ptr": _as_bytes(weights.levels) if weights.are_floats else weights.levels,
        "scales_ptr": _as_bytes(weights.scales) if form.kind else weights.scales,
        "minimums_ptr": weights.minimums,
        "steps_ptr": weights.steps,
        "codes_ptr": codes,
        "out_size": weights.num_out,
        "FORM": form,
    }


def form_of(weights: BlockWeights) -> Form:
    """Return how kernels read a matrix; its planes lie apart."""
    layout, planes = weights.layout, PLANES[weights.bits]
    assert weights.grid is None
    assert len(planes) == 1 or weights.are_planes_apart
    # Of levels in one byte a half block lies as a whole one does.
    columns = layout.part if weights.bits == 8 else COLUMNS
    kind = _KINDS.get(weights.scales.dtype, "")
    unit = weights.unit * (_E4M3_UNIT if kind == "e4m3" else 1)
    mantissa = 3 if layout.are_floats else 1 if weights.codes == FLOATS else 0
    unit *= {0: 1, 1: _DOUBLED_UNIT, 3: _E4M3_UNIT}[mantissa]
    return Form(
        num_blocks=weights.num_in // columns,
        columns=columns,
        first=planes[0],
        second=planes[1] if len(planes) > 1 else 0,
        zero=CENTRE if layout.is_centred else layout.zero,
        scale_fields=(8 // planes[0]) // max(1, columns // weights.block),
        per_scale=max(1, weights.block // columns),
        per_step=0 if layout.has_row_steps else STEP_COLUMNS // columns,
        kind=kind,
        unit=unit,
        has_minimums=layout.has_minimums,
        mantissa=mantissa,
    )


_KINDS = {
    torch.float8_e8m0fnu: "e8m0",
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "pairs",
}


def _as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)


@cache
def _codes_on(codes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the numbers that levels stand for, int8. There are two or three books of codes."""
    return torch.tensor(codes, dtype=torch.int8, device=device)
