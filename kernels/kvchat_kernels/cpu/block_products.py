"""Products of few rows with block weights, activations rounded to 16 bits, and unpacking.

An activation is 16 bits with a scale for each 32 columns: 2^-16 of the block's largest value, which
is below what bfloat16 keeps of it. The products of a block are whole numbers, so nothing is lost
in their sums; the blocks' results are added in float32.

Rows of weights and activations are taken together as in `products.py`.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

from llvmlite import ir

from kvchat_kernels.cpu.code import (
    F16,
    F32,
    F32S,
    I8,
    I16,
    I32,
    I32S,
    LANES,
    Code,
    Kernel,
    Value,
    Variable,
    has_feature,
)
from kvchat_kernels.cpu.products import WEIGHT_ROWS
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.linear.blocks import COLUMNS, Layout

# Activation rows that share one reading of the weights.
_MOST_X = 2
# Blocks whose factors are computed before their products: 1 KiB of levels at most.
_SPAN = 16
# Bytes ahead that levels are asked for.
_AHEAD = 1024
# The largest level of an activation, and the least that a block's largest value counts as.
MOST, LEAST = 32767.0, 1e-30

_BYTES, _SHORTS = ir.VectorType(I8, 16), ir.VectorType(I16, 16)
_BLOCK_F, _BLOCK_I = ir.VectorType(F32, COLUMNS), ir.VectorType(I32, COLUMNS)
_BLOCK_S = ir.VectorType(I16, COLUMNS)


class Place(IntEnum):
    """The task: addresses, and sizes in rows, blocks of 32 columns, and bytes (OUT_STRIDE).

    LEVELS, SCALES, MINIMUMS   of the weights, as BlockWeights has them
    X, X_SCALES, X_SUMS        activations in 16 bits; a sum is that of a block, times its scale
    FLOATS                     to round: float32 [rows, columns]
    OUT, OUT_STRIDE            float32 [rows, out]; to unpack: [out, in]
    BIAS                       float32 [out]
    CHUNK                      rows of the matrix of a unit
    FIRST                      to unpack: the first row
    """

    NUM_OUT = 1
    NUM_BLOCKS = 2
    LEVELS = 4
    SCALES = 5
    MINIMUMS = 6
    X = 7
    X_SCALES = 8
    X_SUMS = 9
    OUT = 10
    OUT_STRIDE = 11
    BIAS = 12
    CHUNK = 13
    FLOATS = 14
    FIRST = 15


NUM_PLACES = 16


@cache
def block_product_kernel(layout: Layout, has_bias: bool) -> Kernel:
    """Return the kernel that multiplies few rows with a matrix of this layout. Units: chunks."""
    return Kernel(
        "block product", (layout, has_bias), lambda code: _Product(code, layout, has_bias).write()
    )


@cache
def unpacking_kernel(layout: Layout) -> Kernel:
    """Return the kernel that writes rows of a matrix as float32. Units: chunks from FIRST on."""
    return Kernel("unpacking", (layout,), lambda code: _write_unpacking(code, layout))


@cache
def rounding_kernel() -> Kernel:
    """Return the kernel that rounds activations to 16 bits. Units: rows."""
    return Kernel("rounding", (), _write_rounding)


# Reading weights


class _Row:
    """The addresses of a row of weights."""

    def __init__(self, code: Code, layout: Layout, row: Value) -> None:
        self._code = code
        self._layout = layout
        self._scale_bytes = 2 if layout.is_half else 4
        blocks = row * code.field(Place.NUM_BLOCKS)
        self.levels_at = code.field(Place.LEVELS) + blocks * (COLUMNS * layout.bits // 8)
        offset = blocks * (self._scale_bytes * (COLUMNS // layout.block))
        self._scales = code.field(Place.SCALES) + offset
        self._minimums = code.field(Place.MINIMUMS) + offset

    def levels(self, index: Value) -> list[Value]:
        """Load the levels of 32 columns: two vectors of 16 x 16 bits."""
        code = self._code
        if self._layout.bits == 8:
            start = index * COLUMNS
            loaded = [code.load(self.levels_at, start + at, _BYTES) for at in (0, 16)]
            return [code.convert("sext", half, _SHORTS) for half in loaded]
        packed = code.load(self.levels_at, index * (COLUMNS // 2), _BYTES)
        both = code.convert("zext", packed, _SHORTS)
        return [both & 15, both >> 4]

    def scales(self, index: Value, count: int = 1) -> Value:
        return self._floats(self._scales, index, count)

    def minimums(self, index: Value, count: int = 1) -> Value:
        return self._floats(self._minimums, index, count)

    def _floats(self, address: Value, index: Value, count: int) -> Value:
        """Load one float, or a vector of `count` from `index` on, as float32."""
        kind, wide = (F16 if self._layout.is_half else F32), F32
        if count > 1:
            kind, wide = ir.VectorType(kind, count), ir.VectorType(F32, count)
        loaded = self._code.load(address, index * self._scale_bytes, kind)
        return self._code.convert("fpext", loaded, wide) if self._layout.is_half else loaded


# Products


class _Activations:
    """The addresses of a row of activations."""

    def __init__(self, code: Code, row: Value) -> None:
        self._code = code
        blocks = row * code.field(Place.NUM_BLOCKS)
        self._x = code.field(Place.X) + blocks * (2 * COLUMNS)
        self._scales = code.field(Place.X_SCALES) + blocks * 4
        self._sums = code.field(Place.X_SUMS) + blocks * 4

    def levels(self, index: Value) -> list[Value]:
        start = index * (2 * COLUMNS)
        return [self._code.load(self._x, start + at, _SHORTS) for at in (0, 32)]

    def scales(self, index: Value, kind: Any) -> Value:
        return self._code.load(self._scales, index * 4, kind)

    def sums(self, index: Value, kind: Any) -> Value:
        return self._code.load(self._sums, index * 4, kind)


class _Pair:
    """The sum of the products of a row of weights and a row of activations.

    `factors` is the address of what the blocks of a span are multiplied with.
    """

    def __init__(self, code: Code, row: _Row, x: _Activations, layout: Layout) -> None:
        self.row, self.x = row, x
        self.factors = code.room(4 * _SPAN * (COLUMNS // layout.block))
        self.total: Variable = code.variable(code.floats(0.0))
        self.shift: Variable | None = None
        if layout.has_minimums:
            self.shift = code.variable(code.floats(0.0))


class _Product:
    def __init__(self, code: Code, layout: Layout, has_bias: bool) -> None:
        self._code = code
        self._layout = layout
        self._has_bias = has_bias
        self._per_block = COLUMNS // layout.block
        self._num_blocks = code.field(Place.NUM_BLOCKS)

    def write(self) -> None:
        code = self._code
        start = code.unit * code.field(Place.CHUNK)
        end = code.least(start + code.field(Place.CHUNK), code.field(Place.NUM_OUT))
        quarter = (end - start) // WEIGHT_ROWS
        num_rows = code.header(Header.NUM_ROWS)
        left = num_rows % _MOST_X
        tiled = num_rows - left
        with code.loop(start, start + quarter) as row:
            rows = [row + quarter * i for i in range(WEIGHT_ROWS)]
            with code.loop(0, tiled, _MOST_X) as first:
                self._write_tile(rows, [first + i for i in range(_MOST_X)])
            with code.when(left > 0):
                self._write_tile(rows, [tiled])
        with code.loop(start + quarter * WEIGHT_ROWS, end) as row, code.loop(0, num_rows) as x_row:
            self._write_tile([row], [x_row])

    def _write_tile(self, rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        """Write the products of some rows of weights with some of activations, span by span."""
        code = self._code
        weights = [_Row(code, self._layout, row) for row in rows]
        activations = [_Activations(code, x_row) for x_row in x_rows]
        pairs = [[_Pair(code, w, x, self._layout) for x in activations] for w in weights]
        with code.loop(0, self._num_blocks, _SPAN) as start:
            end = code.least(start + _SPAN, self._num_blocks)
            vectors = end - (end - start) % LANES
            with code.loop(start, vectors, LANES) as index:
                self._write_factors(pairs, start, index, LANES)
            with code.loop(vectors, end) as index:
                self._write_factors(pairs, start, index, 1)
            with code.loop(start, end) as index:
                xs = [x.levels(index) for x in activations]
                place = (index - start) * (4 * self._per_block)
                for weight, of_row in zip(weights, pairs, strict=True):
                    levels = weight.levels(index)
                    for pair, x in zip(of_row, xs, strict=True):
                        self._add(pair, levels, x, place)
        for row, of_row in zip(rows, pairs, strict=True):
            for x_row, pair in zip(x_rows, of_row, strict=True):
                self._store(pair, row, x_row)

    def _write_factors(
        self, pairs: Sequence[Sequence[_Pair]], start: Value, index: Value, count: int
    ) -> None:
        """Write what `count` blocks from `index` on are multiplied with, and add their minimums.

        `start` is the first block of the span.
        """
        code, per_block = self._code, self._per_block
        kind = ir.VectorType(F32, count) if count > 1 else F32
        block_bytes = COLUMNS * self._layout.bits // 8
        for of_row in pairs:
            row = of_row[0].row
            for line in range(0, count * block_bytes, 64):
                code.prefetch(row.levels_at, index * block_bytes + (line + _AHEAD))
            scales = [
                row.scales(index * per_block + part * count, count) for part in range(per_block)
            ]
            minimums = row.minimums(index, count) if self._layout.has_minimums else None
            for pair in of_row:
                x_scales = pair.x.scales(index, kind)
                for part, factor in enumerate(scales):
                    spread = self._of_parts(x_scales, part, count)
                    offset = (index - start) * (4 * per_block) + 4 * count * part
                    code.store(factor * spread, pair.factors, offset)
                if pair.shift is not None and minimums is not None:
                    shift = minimums * pair.x.sums(index, kind)
                    pair.shift.set(pair.shift.get() + code.widened(shift))

    def _of_parts(self, x_scales: Value, part: int, count: int) -> Value:
        """Return the scales of activations beside the `part`-th vector of scales of weights."""
        if self._per_block == 1 or count == 1:
            return x_scales
        lanes = [(part * count + lane) // self._per_block for lane in range(count)]
        order = ir.Constant(I32S, lanes)
        shuffled = self._code.builder.shuffle_vector(x_scales.raw, x_scales.raw, order)
        return Value(self._code, shuffled)

    def _add(self, pair: _Pair, levels: list[Value], x: list[Value], place: Value) -> None:
        """Add the products of a block: with one factor for all, or one for each half."""
        code = self._code
        sums = [_pair_sums(code, *halves) for halves in zip(levels, x, strict=True)]
        if self._per_block == 1:
            sums = [sums[0] + sums[1]]
        for number, part in enumerate(sums):
            factor = code.spread(code.load(pair.factors, place + 4 * number, F32))
            pair.total.set(pair.total.get() + code.convert("sitofp", part, F32S) * factor)

    def _store(self, pair: _Pair, row: Value, x_row: Value) -> None:
        code = self._code
        total = pair.total.get()
        value = code.total(total if pair.shift is None else total + pair.shift.get())
        if self._has_bias:
            value = value + code.load(code.field(Place.BIAS), row * 4, F32)
        offset = x_row * code.field(Place.OUT_STRIDE) + row * 4
        code.store(value, code.field(Place.OUT), offset)


def _pair_sums(code: Code, a: Value, b: Value) -> Value:
    """Return the products of two vectors of 16 x 16 bits, neighbours added: 8 x 32 bits."""
    if has_feature("avx2"):
        return code.call("llvm.x86.avx2.pmadd.wd", I32S, a, b)
    wide = ir.VectorType(I32, 16)
    products = code.convert("sext", a, wide) * code.convert("sext", b, wide)
    even, odd = (
        Value(
            code,
            code.builder.shuffle_vector(
                products.raw, products.raw, ir.Constant(I32S, list(range(start, 16, 2)))
            ),
        )
        for start in (0, 1)
    )
    return even + odd


# Unpacking


def _write_unpacking(code: Code, layout: Layout) -> None:
    """Write: each row of the matrix as float32, FIRST at the beginning of OUT."""
    count = code.field(Place.NUM_BLOCKS)
    first = code.field(Place.FIRST)
    start = first + code.unit * code.field(Place.CHUNK)
    end = code.least(start + code.field(Place.CHUNK), code.field(Place.NUM_OUT))
    wide = ir.VectorType(F32, 16)
    with code.loop(start, end) as number:
        row = _Row(code, layout, number)
        out = code.field(Place.OUT) + (number - first) * (count * (4 * COLUMNS))
        with code.loop(0, count) as index:
            places = index * (COLUMNS // layout.block)
            for half, levels in enumerate(row.levels(index)):
                place = places + (half if layout.block == 16 else 0)
                values = code.convert("sitofp", levels, wide) * code.spread(row.scales(place), 16)
                if layout.has_minimums:
                    values = values + code.spread(row.minimums(place), 16)
                code.store(values, out, index * (4 * COLUMNS) + 64 * half)


# Activations


def _write_rounding(code: Code) -> None:
    """Write: each block of 32 values of a row in 16 bits, its scale, and its sum."""
    count = code.field(Place.NUM_BLOCKS)
    start = code.unit * count
    with code.loop(start, start + count) as index:
        values = code.load(code.field(Place.FLOATS), index * (4 * COLUMNS), _BLOCK_F)
        magnitudes = code.call("llvm.fabs.v32f32", _BLOCK_F, values)
        # nnan: a tree of comparisons
        name = "llvm.vector.reduce.fmax.v32f32"
        largest = code.call(name, F32, magnitudes, fastmath=("nnan", "nsz"))
        largest = code.greatest(largest, code.single(ctypes.c_float(LEAST).value))
        inverse = code.spread(code.single(MOST) / largest, COLUMNS)
        rounded = code.call("llvm.rint.v32f32", _BLOCK_F, values * inverse)
        levels = code.convert("fptosi", rounded, _BLOCK_I)
        total = code.call("llvm.vector.reduce.add.v32i32", I32, levels)
        short = code.convert("trunc", levels, _BLOCK_S)
        code.store(short, code.field(Place.X), index * (2 * COLUMNS))
        scale = largest / MOST
        code.store(scale, code.field(Place.X_SCALES), index * 4)
        code.store(code.convert("sitofp", total, F32) * scale, code.field(Place.X_SUMS), index * 4)
