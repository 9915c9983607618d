"""Products of rows with block weights, whose activations are rounded too (`block_rows.py`).

The products of a block are whole numbers, so nothing is lost in their sums; the blocks' results are
added in float32. Rows of weights and activations are taken together as in `products.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from llvmlite import ir

from kvchat_kernels.cpu.block_levels import Place
from kvchat_kernels.cpu.block_rows import (
    ActivationRow,
    TwoWeightRows,
    WeightRow,
    each_group,
    each_vector,
    vector_bytes,
)
from kvchat_kernels.cpu.code import (
    F32,
    I16,
    I32,
    LANES,
    Code,
    Kernel,
    Value,
    Variable,
    constant,
    has_feature,
    has_vnni,
)
from kvchat_kernels.cpu.products import WEIGHT_ROWS, write_tiles
from kvchat_kernels.cpu.races import NUM_IN, NUM_OUT, has_512_bits, is_second_faster
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import COLUMNS, Layout

# Rows of activations that share one reading of the weights; more where vectors have 512 bits and
# there are 32 of them. Of 16, the sums of more than _FEW_X with four rows of weights take too many.
_X_COUNTS, _WIDE_X_COUNTS = (5, 3, 2, 1), (8, 5, 4, 3, 2, 1)
_FEW_X = 3
# The same where levels in planes are read for each; with more than _MOST_FEW_X they are read once.
_FEW_X_COUNTS, _WIDE_FEW_X_COUNTS = (3, 2, 1), (5, 4, 3, 2, 1)
_MOST_FEW_X = 5
# Levels of 8 bits that are read once: of four rows at least.
_ROOM_BYTES = 1 << 17
# Bytes ahead that levels are asked for.
_AHEAD = 1024
# Sums side by side that keep the multiplier busy without a second chain for each.
_MANY = 6


class BlockProductTask(Task):
    """A product: sizes are in rows, blocks of 32 columns, and bytes (`out_stride`).

    levels, scales, ...   of the weights, as BlockWeights has them
    x, x_scales, ...      rounded activations, as of `Rows`
    out                   float32 [rows, out], may lie in a wider matrix
    bias                  float32 [out]
    chunk                 rows of the matrix of a unit
    """

    num_out: int
    num_blocks: int
    levels: Memory
    scales: Memory
    minimums: Memory | None = None
    steps: Memory | None = None
    x: Memory
    x_scales: Memory
    x_sums: Memory
    x_starts: Memory
    out: Memory
    out_stride: int
    bias: Memory | None = None
    chunk: int


@cache
def block_product_kernel(layout: Layout) -> Kernel[BlockProductTask]:
    """Return the kernel that multiplies rows with an interleaved matrix. Units: chunks.

    Activations are rounded as `layout.rounding` says.
    """
    assert layout.is_interleaved, layout
    forms = (layout, _is_wide_faster(replace(layout, rest=0)))
    return Kernel("block product", BlockProductTask, forms, lambda code: _write(code, *forms))


@cache
def _is_wide_faster(layout: Layout) -> bool:
    """Return whether products are faster in vectors of 512 bits."""
    if not layout.are_nibbles:  # those of 8 bits decide for all that are multiplied as 16 bits
        layout = replace(layout, bits=8, zero=0, codes=None)
    sizes = {"num_out": NUM_OUT, "num_blocks": NUM_IN // COLUMNS, "chunk": NUM_OUT}
    sizes["out_stride"] = 4 * NUM_OUT

    def write(code: Code, is_wide: bool) -> None:
        start, end = code.chunk(code.task.num_out)
        _write_rows(code, layout, is_wide, start, end, counts=_counts(layout, is_wide)[:1])

    task = (BlockProductTask, sizes)
    return has_512_bits() and is_second_faster("raced block product", (layout,), write, task)


class _Pair:
    """The sum of the products of a row of weights and a row of activations.

    With two rows of weights side by side, `row` is both, and the sum has the lanes of both.
    """

    def __init__(self, code: Code, row: WeightRow | TwoWeightRows, x: ActivationRow) -> None:
        self._code = code
        self.row, self.x = row, x
        self.num_rows = 2 if isinstance(row, TwoWeightRows) else 1
        zeros = ir.VectorType(F32, LANES * self.num_rows)
        self.total: Variable = code.variable(Value(code, constant(0.0, zeros)))

    def add(self, value: Value, factor: Value) -> None:
        """Add the product of each row's lanes, which are up to 8, or a single one.

        They are multiplied in all lanes of the sum, by factors in all of them: so both are always
        one instruction where there is one, as they are where tiles are multiplied.
        """
        each = max(1, getattr(factor.type, "count", 1) // self.num_rows)
        lanes = [row * each + lane % each for row in range(self.num_rows) for lane in range(LANES)]
        factors = self._code.picked(factor, lanes)
        self.total.set(self.total.get() + self._widened(value) * factors)

    def _widened(self, value: Value) -> Value:
        if self.num_rows == 1:
            return self._code.widened(value)
        if value.type.count == 2 * LANES:
            return value
        return self._code.joined(*(self._code.widened(half) for half in self._code.halves(value)))


_Pairs = Sequence[Sequence[_Pair]]


def _write(code: Code, layout: Layout, is_wide: bool) -> None:
    """Write all products of a unit.

    Beside many rows of activations levels in planes are read once, into memory of 8 bits each that
    stays in the second cache.
    """
    start, end = code.chunk(code.task.num_out)
    if not layout.has_planes:
        _write_rows(code, layout, is_wide, start, end)
        return
    row_bytes = code.task.num_blocks * COLUMNS
    fits = row_bytes < _ROOM_BYTES // WEIGHT_ROWS + 1
    is_read_once = (code.header(Header.NUM_ROWS) > _MOST_FEW_X) & fits
    with code.when(is_read_once ^ 1):
        _write_rows(code, layout, is_wide, start, end)
    with code.when(is_read_once):
        room, whole = code.room(_ROOM_BYTES), replace(layout, bits=8, zero=0, codes=None)
        most = code.whole(_ROOM_BYTES) // (row_bytes * WEIGHT_ROWS) * WEIGHT_ROWS
        first = code.variable(start)
        with code.loop(0, (end - start + (most - 1)) // most):
            last = code.least(first.get() + most, end)
            _read_levels(code, layout, first.get(), last, room)
            _write_rows(code, whole, is_wide, first.get(), last, room)
            first.set(last)


def _read_levels(code: Code, layout: Layout, start: Value, end: Value, room: Value) -> None:
    """Write the levels of some rows to `room` as levels of 8 bits."""
    num_blocks = code.task.num_blocks
    as_a_whole = replace(layout, block=COLUMNS)
    with code.loop(start, end) as number:
        row, to = WeightRow(code, layout, number), room + (number - start) * (num_blocks * COLUMNS)
        for index, size in each_group(code, num_blocks, layout):
            row.prefetch(index, size, _AHEAD)
            for places in each_vector(code, as_a_whole, size, 0):
                for place in places:
                    levels = row.whole_bytes(index, size, place)
                    code.store(levels, to, index * COLUMNS + place.start)


def _write_rows(
    code: Code,
    layout: Layout,
    is_wide: bool,
    start: Value,
    end: Value,
    room: Value | None = None,
    counts: Sequence[int] | None = None,
) -> None:
    """Write the products of the rows from `start` to `end`, whose levels may be in a `room`.

    `counts`, for a race: how many rows of activations are multiplied at once.
    """
    has_many_registers = has_feature("avx512vl")

    def weight_row(row: Value) -> WeightRow:
        if room is None:
            return WeightRow(code, layout, row)
        levels_at = room + (row - start) * (code.task.num_blocks * COLUMNS)
        return WeightRow(code, layout, row, levels_at)

    def write_tile(rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        are_all = has_many_registers or len(x_rows) <= _FEW_X
        step = len(rows) if are_all else max(1, len(rows) // 2)
        for at in range(0, len(rows), step):
            write_part(rows[at : at + step], x_rows)

    def write_part(rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        has_two = len(rows) > 1 and (len(x_rows) > 1 or layout.has_planes)
        side = 2 if is_wide and has_two else 1
        single = [weight_row(row) for row in rows]
        weights: Sequence[WeightRow | TwoWeightRows] = single
        if side == 2:
            pairs_of_rows = zip(single[::2], single[1::2], strict=True)
            weights = [TwoWeightRows(code, layout, two) for two in pairs_of_rows]
        activations = [ActivationRow(code, x, layout.rounding, side) for x in x_rows]
        pairs = [[_Pair(code, row, x) for x in activations] for row in weights]
        _add_products(code, layout, pairs)
        for x_row, of_x in zip(x_rows, zip(*pairs, strict=True), strict=True):
            totals = code.tree_totals([pair.total.get() for pair in of_x], LANES)
            for number, row in enumerate(rows):
                total = code.lane(totals, number) if len(rows) > 1 else totals
                _store(code, total, row, x_row)

    counts = counts or _counts(layout, is_wide)
    write_tiles(code, start, end, counts, write_tile, holds_x=True)


def _counts(layout: Layout, is_wide: bool) -> Sequence[int]:
    """Return how many rows of activations share one reading of the weights."""
    if layout.has_planes:
        return _WIDE_FEW_X_COUNTS if is_wide else _FEW_X_COUNTS
    return _WIDE_X_COUNTS if is_wide else _X_COUNTS


def _store(code: Code, value: Value, row: Value, x_row: Value) -> None:
    total = code.variable(value)
    with code.when(code.task.bias > 0):
        total.set(value + code.load(code.task.bias, row * 4, F32))
    offset = x_row * code.task.out_stride + row * 4
    code.store(total.get(), code.task.out, offset)


def _add_products(code: Code, layout: Layout, pairs: _Pairs) -> None:
    """Write a group of blocks after another: a lane holds the sum of one block's products."""
    for index, size in each_group(code, code.task.num_blocks, layout):
        for of_row in pairs:
            of_row[0].row.prefetch(index, size, _AHEAD)
        for part in range(COLUMNS // layout.part):
            sums = _sums_of_group(code, layout, pairs, index, size, part)
            _add_sums(code, layout, pairs, sums, index, size, part)


def _add_sums(
    code: Code,
    layout: Layout,
    pairs: _Pairs,
    sums: Sequence[Sequence["_Whole"]],
    index: Value,
    size: int,
    part: int,
) -> None:
    """Add what the sums of a group, or of a half of each of its blocks, are with their scales."""
    kind = ir.VectorType(F32, size) if size > 1 else F32
    x_scales = [pair.x.scales(index, kind) for pair in pairs[0]]

    def add_scaled(pair: _Pair, total: _Whole, factors: Value) -> None:
        whole = total.get()
        count = whole.type.count // pair.num_rows  # lanes of a row of weights
        starts = range(0, pair.num_rows * size, size)
        lanes = [start + lane % size for start in starts for lane in range(count)]
        floats = code.convert("sitofp", whole, ir.VectorType(F32, len(lanes)))
        pair.add(floats, code.picked(factors, lanes))

    for of_row, of_sums in zip(pairs, sums, strict=True):
        row = of_row[0].row
        scales = row.scales_of_group(index, size, part)
        for pair, x_scale, total in zip(of_row, x_scales, of_sums, strict=True):
            add_scaled(pair, total, scales * x_scale)
        if layout.has_minimums:
            minimums = row.minimums_of_group(index, size, part)
            for pair, x_scale in zip(of_row, x_scales, strict=True):
                if layout.has_minimums_of_parts:
                    sums_of_x = pair.x.sums_of_halves(index, size, part)
                    pair.add(sums_of_x, minimums * x_scale)
                else:
                    pair.add(minimums, pair.x.sums(index, kind))


def _sums_of_group(
    code: Code, layout: Layout, pairs: _Pairs, index: Value, size: int, part: int
) -> list[list["_Whole"]]:
    """Return the sum of each pair's products in a group, a lane a block of 32 or its half `part`.

    Of weights and activations, the fewer are loaded first and stay in registers. It is a loop, for
    in a long run of instructions LLVM moves all loads to the beginning, and has no registers left.
    """
    width = vector_bytes(layout, size)
    num_rows = pairs[0][0].num_rows
    # Of 16 registers, two chains of each sum would take more than there are.
    has_few_registers = not has_feature("avx512vl")
    is_beside = num_rows == 2 or has_few_registers
    has_many = is_beside and len(pairs) * len(pairs[0]) >= _MANY
    starts: list[Callable[[], Value] | None] = [None] * len(pairs[0])
    if layout.is_centred:
        starts = [partial(pair.x.starts, index, size, width // 4) for pair in pairs[0]]
    lanes = width * num_rows
    sums = [
        [_Whole(code, layout.are_nibbles, lanes, has_many, start) for start in starts]
        for _ in pairs
    ]
    rows, xs = [of_row[0].row for of_row in pairs], [pair.x for pair in pairs[0]]
    for part_of_x in range(layout.rounding.num_parts):
        if part_of_x:
            for total in (total for of_row in sums for total in of_row):
                total.begin_low_bytes()
        for places in each_vector(code, layout, size, part):
            for place in places:
                _add_vectors(rows, xs, sums, index, size, place, width, part_of_x)
    return sums


def _add_vectors(
    rows: Sequence[WeightRow | TwoWeightRows],
    xs: Sequence[ActivationRow],
    sums: Sequence[Sequence["_Whole"]],
    index: Value,
    size: int,
    place: Place,
    width: int,
    part_of_x: int,
) -> None:
    """Add the products of a vector of each row of weights with each row of activations."""
    if len(rows) < len(xs) or len(xs) == 1:
        levels = [row.halves(index, size, place) for row in rows]
        for number, x in enumerate(xs):
            halves = x.beside(index, size, place.start, width, part_of_x)
            for half, loaded in enumerate(halves):
                for both, of_row in zip(levels, sums, strict=True):
                    of_row[number].add(half, both[half], loaded)
    else:
        beside = [x.beside(index, size, place.start, width, part_of_x) for x in xs]
        for row, of_row in zip(rows, sums, strict=True):
            for half, levels_of_half in enumerate(row.halves(index, size, place)):
                for halves, total in zip(beside, of_row, strict=True):
                    total.add(half, levels_of_half, halves[half])


class _Whole:
    """A sum of products of levels with activations, neighbours added by fours: 32 bits a lane.

    Of levels with 16 bits neighbours are two.
    VNNI adds them at once, in two chains, for an addition waits 4 cycles; in one where there are
    `has_many` such sums. Else lanes of 16 bits add up pairs of 4 bits: 16 products, each at most
    15 * 128, fit. Of activations in two bytes the high ones come first. What `first` loads, 32 bits
    a lane, is added at last: registers are few.
    """

    def __init__(
        self,
        code: Code,
        are_nibbles: bool,
        width: int,
        has_many: bool,
        first: Callable[[], Value] | None,
    ) -> None:
        self._code = code
        self._lanes = ir.VectorType(I32, width // 4)
        self._has_vnni = has_vnni()
        self._is_short = are_nibbles and not self._has_vnni
        self._are_nibbles = are_nibbles
        kind = ir.VectorType(I16, width // 2) if self._is_short else self._lanes
        self._zeros = Value(code, constant(0, kind))
        has_two = self._has_vnni and not has_many
        self._chains = [code.variable(self._zeros) for _ in range(1 + has_two)]
        self._first = first
        self._high: Variable | None = None

    def begin_low_bytes(self) -> None:
        """Multiply the sum of the high bytes' products with 256, and go on with the low bytes."""
        total = self._in_32_bits() << 8
        if self._is_short:
            self._high = self._code.variable(total)
        starts = [self._zeros if self._is_short else total, self._zeros]
        for chain, start in zip(self._chains, starts, strict=False):
            chain.set(start)

    def add(self, half: int, levels: Value, x: Value) -> None:
        code, chain = self._code, self._chains[half % len(self._chains)]
        if self._has_vnni:
            words = code.as_bits(levels, self._lanes), code.as_bits(x, self._lanes)
            multiplied = "vpdpbusd" if self._are_nibbles else "vpdpwssd"
            name = f"llvm.x86.avx512.{multiplied}.{32 * self._lanes.count}"
            chain.set(code.call(name, self._lanes, chain.get(), *words))
        elif self._is_short:
            chain.set(chain.get() + _neighbouring_bytes(code, levels, x))
        else:
            chain.set(chain.get() + _neighbouring_shorts(code, levels, x))

    def get(self) -> Value:
        """Return the sum in 32 bits."""
        total = self._in_32_bits()
        if self._high is not None:
            total = total + self._high.get()
        return total if self._first is None else total + self._first()

    def _in_32_bits(self) -> Value:
        total = self._chains[0].get()
        if len(self._chains) > 1:
            return total + self._chains[1].get()
        if not self._is_short:
            return total
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
