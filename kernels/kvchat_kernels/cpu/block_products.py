"""Products of few rows with block weights, whose activations are rounded too (`block_rows.py`).

The products of a block are whole numbers, so nothing is lost in their sums; the blocks' results are
added in float32. Rows of weights and activations are taken together as in `products.py`.
"""

from collections.abc import Callable, Sequence
from functools import cache

from llvmlite import ir

from kvchat_kernels.cpu.block_rows import ActivationRow, Place, WeightRow, each_group, vector_bytes
from kvchat_kernels.cpu.code import (
    F32,
    F32S,
    I16,
    I32,
    LANES,
    Code,
    Kernel,
    Value,
    Variable,
    constant,
    has_feature,
)
from kvchat_kernels.cpu.products import write_tiles
from kvchat_kernels.linear.blocks import COLUMNS, Layout

# Rows of activations that share one reading of the weights.
_X_COUNTS = (5, 3, 2, 1)
# Blocks whose factors are computed before their products: 1 KiB of levels at most.
_SPAN = 16
# Bytes ahead that levels are asked for.
_AHEAD = 1024


@cache
def block_product_kernel(layout: Layout, has_bias: bool) -> Kernel:
    """Return the kernel that multiplies few rows with a matrix of this layout. Units: chunks.

    Activations have `layout.activation_bits`; weights of 4 bits are interleaved.
    """
    assert layout.is_interleaved == (layout.bits == 4), layout
    write = _write_interleaved if layout.is_interleaved else _write_by_blocks
    return Kernel(
        "block product", (layout, has_bias), lambda code: _write(code, layout, has_bias, write)
    )


class _Pair:
    """The sum of the products of a row of weights and a row of activations."""

    def __init__(self, code: Code, row: WeightRow, x: ActivationRow) -> None:
        self.row, self.x = row, x
        self.total: Variable = code.variable(code.floats(0.0))

    def add(self, value: Value) -> None:
        self.total.set(self.total.get() + value)


_Pairs = Sequence[Sequence[_Pair]]


def _write(
    code: Code, layout: Layout, has_bias: bool, write: Callable[[Code, Layout, _Pairs], None]
) -> None:
    """Write all products of a unit; `write` adds those of pairs of rows, a list a weight row."""
    start = code.unit * code.field(Place.CHUNK)
    end = code.least(start + code.field(Place.CHUNK), code.field(Place.NUM_OUT))

    def write_tile(rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        weights = [WeightRow(code, layout, row) for row in rows]
        activations = [ActivationRow(code, x_row, layout.activation_bits) for x_row in x_rows]
        pairs = [[_Pair(code, row, x) for x in activations] for row in weights]
        write(code, layout, pairs)
        for row, of_row in zip(rows, pairs, strict=True):
            for x_row, pair in zip(x_rows, of_row, strict=True):
                _store(code, code.total(pair.total.get()), row, x_row, has_bias)

    write_tiles(code, start, end, _X_COUNTS, write_tile)


def _store(code: Code, value: Value, row: Value, x_row: Value, has_bias: bool) -> None:
    if has_bias:
        value = value + code.load(code.field(Place.BIAS), row * 4, F32)
    offset = x_row * code.field(Place.OUT_STRIDE) + row * 4
    code.store(value, code.field(Place.OUT), offset)


# 4 bits


def _write_interleaved(code: Code, layout: Layout, pairs: _Pairs) -> None:
    """Write a group of blocks after another: a lane holds the sum of one block's products."""
    for index, size in each_group(code, code.field(Place.NUM_BLOCKS)):
        sums = _sums_of_group(code, pairs, index, size)
        kind = ir.VectorType(F32, size) if size > 1 else F32
        x_scales = [pair.x.scales(index, kind) for pair in pairs[0]]
        x_sums = [pair.x.sums(index, kind) for pair in pairs[0]]
        for of_row, of_sums in zip(pairs, sums, strict=True):
            row = of_row[0].row
            row.prefetch(index, size, _AHEAD)
            scales, minimums = row.scales(index, size), row.minimums(index, size)
            for pair, x_scale, x_sum, total in zip(of_row, x_scales, x_sums, of_sums, strict=True):
                whole = total.get()
                lanes = [lane % size for lane in range(whole.type.count)]
                floats = code.convert("sitofp", whole, ir.VectorType(F32, len(lanes)))
                factor = code.picked(scales * x_scale, lanes)
                pair.add(code.widened(floats * factor))
                pair.add(code.widened(minimums * x_sum))


def _sums_of_group(code: Code, pairs: _Pairs, index: Value, size: int) -> list[list["_Whole"]]:
    """Return the sum of each pair's products in a group, a lane a block.

    Of weights and activations, the fewer are loaded first and stay in registers. It is a loop, for
    in a long run of instructions LLVM moves all loads to the beginning, and has no registers left.
    """
    width = vector_bytes(size)
    sums = [[_Whole(code, width) for _ in of_row] for of_row in pairs]
    rows, xs = [of_row[0].row for of_row in pairs], [pair.x for pair in pairs[0]]
    with code.loop(0, size * COLUMNS // 2, width) as start:
        if len(rows) < len(xs) or len(xs) == 1:
            levels = [row.nibbles(index, start, width) for row in rows]
            for number, x in enumerate(xs):
                for half, loaded in enumerate(x.beside(index, size, start, width)):
                    for both, of_row in zip(levels, sums, strict=True):
                        of_row[number].add(half, both[half], loaded)
        else:
            beside = [x.beside(index, size, start, width) for x in xs]
            for row, of_row in zip(rows, sums, strict=True):
                for half, part in enumerate(row.nibbles(index, start, width)):
                    for halves, total in zip(beside, of_row, strict=True):
                        total.add(half, part, halves[half])
    return sums


class _Whole:
    """A sum of products of levels with activations, neighbours added by fours: 32 bits a lane.

    VNNI adds them at once, in two chains, for an addition waits 4 cycles. Else lanes of 16 bits
    add up pairs: 16 products, each at most 15 * 127, fit.
    """

    def __init__(self, code: Code, width: int) -> None:
        self._code = code
        self._lanes = ir.VectorType(I32, width // 4)
        self._has_vnni = has_feature("avx512vnni") and has_feature("avx512vl")
        kind = self._lanes if self._has_vnni else ir.VectorType(I16, width // 2)
        start = Value(code, constant(0, kind))
        self._chains = [code.variable(start) for _ in range(1 + self._has_vnni)]

    def add(self, half: int, levels: Value, x: Value) -> None:
        code, chain = self._code, self._chains[half % len(self._chains)]
        if not self._has_vnni:
            chain.set(chain.get() + _neighbouring_bytes(code, levels, x))
            return
        words = code.as_bits(levels, self._lanes), code.as_bits(x, self._lanes)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self._lanes.count}"
        chain.set(code.call(name, self._lanes, chain.get(), *words))

    def get(self) -> Value:
        """Return the sum in 32 bits."""
        total = self._chains[0].get()
        if self._has_vnni:
            return total + self._chains[1].get()
        return _neighbouring_shorts(self._code, total, Value(self._code, constant(1, total.type)))


def _neighbouring_bytes(code: Code, levels: Value, x: Value) -> Value:
    """Return the products of levels up to 15 and signed bytes, neighbours added, in 16 bits."""
    count = levels.type.count
    kind = ir.VectorType(I16, count // 2)
    if has_feature("avx2"):
        name = "llvm.x86.avx2.pmadd.ub.sw" if count == 32 else "llvm.x86.ssse3.pmadd.ub.sw.128"
        return code.call(name, kind, levels, x)
    wide = ir.VectorType(I16, count)
    return code.neighbours(code.convert("zext", levels, wide) * code.convert("sext", x, wide))


def _neighbouring_shorts(code: Code, a: Value, b: Value) -> Value:
    """Return the products of two vectors of 16-bit numbers, neighbours added, in 32 bits."""
    count = a.type.count
    kind = ir.VectorType(I32, count // 2)
    if has_feature("avx2"):
        name = "llvm.x86.avx2.pmadd.wd" if count == 16 else "llvm.x86.sse2.pmadd.wd"
        return code.call(name, kind, a, b)
    wide = ir.VectorType(I32, count)
    return code.neighbours(code.convert("sext", a, wide) * code.convert("sext", b, wide))


# 8 bits


def _write_by_blocks(code: Code, layout: Layout, pairs: _Pairs) -> None:
    """Write a block after another, span by span; their factors are computed before a span."""
    num_blocks, per_block = code.field(Place.NUM_BLOCKS), COLUMNS // layout.block
    factors = [[code.room(4 * _SPAN * per_block) for _ in of_row] for of_row in pairs]
    with code.loop(0, num_blocks, _SPAN) as start:
        end = code.least(start + _SPAN, num_blocks)
        first = start
        for count in (LANES, 4, 2, 1):
            last = first + (end - first) // count * count
            with code.loop(first, last, count) as index:
                _write_factors(code, layout, pairs, factors, index - start, index, count)
            first = last
        with code.loop(start, end) as index:
            place = (index - start) * (4 * per_block)
            levels = [of_row[0].row.levels(index) for of_row in pairs]
            for number, x in enumerate(pair.x.levels(index) for pair in pairs[0]):
                for row, of_row, of_factors in zip(levels, pairs, factors, strict=True):
                    _add_block(code, of_row[number], row, x, of_factors[number] + place, per_block)


def _write_factors(
    code: Code,
    layout: Layout,
    pairs: _Pairs,
    factors: Sequence[Sequence[Value]],
    place: Value,
    index: Value,
    count: int,
) -> None:
    """Write what `count` blocks from `index` on are multiplied with, and add their minimums.

    Factors are written from the block `place` of the span on.
    """
    per_block = COLUMNS // layout.block
    kind = ir.VectorType(F32, count) if count > 1 else F32
    for of_row, of_factors in zip(pairs, factors, strict=True):
        row = of_row[0].row
        row.prefetch(index, count, _AHEAD)
        parts = range(per_block)
        scales = [row.scales(index * per_block + part * count, count) for part in parts]
        minimums = row.minimums(index, count) if layout.has_minimums else None
        for pair, room in zip(of_row, of_factors, strict=True):
            x_scales = pair.x.scales(index, kind)
            for part, factor in enumerate(scales):
                blocks = [(part * count + lane) // per_block for lane in range(count)]
                spread = code.picked(x_scales, blocks) if count > 1 else x_scales
                code.store(factor * spread, room, place * (4 * per_block) + 4 * count * part)
            if minimums is not None:
                pair.add(code.widened(minimums * pair.x.sums(index, kind)))


def _add_block(
    code: Code, pair: _Pair, levels: list[Value], x: list[Value], factors: Value, per_block: int
) -> None:
    """Add the products of a block: with one factor for all, or one for each half."""
    sums = [_neighbouring_shorts(code, *halves) for halves in zip(levels, x, strict=True)]
    if per_block == 1:
        sums = [sums[0] + sums[1]]
    for number, part in enumerate(sums):
        factor = code.spread(code.load(factors, 4 * number, F32))
        pair.add(code.convert("sitofp", part, F32S) * factor)
