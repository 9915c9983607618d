"""Products of rows with block weights, whose activations are rounded too (`block_rows.py`).

The products of a block are whole numbers, so nothing is lost in their sums; the blocks' results are
added in float32. Rows of weights and activations are taken together as in `products.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from llvmlite import ir

from kvchat_kernels.cpu.block_levels import Place, zero_of
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
from kvchat_kernels.cpu.features import has_512_bits, has_tiles
from kvchat_kernels.cpu.many_rows import ReadRow, Room, layout_read
from kvchat_kernels.cpu.products import WEIGHT_ROWS, write_tiles
from kvchat_kernels.cpu.races import NUM_IN, NUM_OUT, is_second_faster
from kvchat_kernels.cpu.step import Header, has_many
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import COLUMNS, Layout, Rounding

# Rows of activations that share one reading of the weights; more where vectors have 512 bits and
# there are 32 of them. Of 16, the sums of more than _FEW_X with four rows of weights take too many.
_X_COUNTS, _WIDE_X_COUNTS = (5, 3, 2, 1), (8, 5, 4, 3, 2, 1)
_FEW_X = 3
# The same where levels in planes are read for each.
_FEW_X_COUNTS, _WIDE_FEW_X_COUNTS = (3, 2, 1), (5, 4, 3, 2, 1)
# Sums side by side that keep the multiplier busy without a second chain for each.
_MANY = 6
# Chains of sums that leave room for levels and activations in 32 registers.
_MOST_CHAINS = 20


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
def block_product_kernel(layout: Layout, is_read_once: bool) -> Kernel[BlockProductTask]:
    """Return the kernel that multiplies rows with an interleaved matrix. Units: chunks.

    Activations are rounded as `layout.rounding` says. The levels beside many are read once where
    `is_read_once` (`many_rows.py`): the activations are bytes then, or all have 16 bits.
    """
    assert layout.is_interleaved, layout
    forms = (layout, is_read_once, _is_wide_faster(layout.rounding.has_8_bits))
    return Kernel("block product", BlockProductTask, forms, lambda code: _write(code, *forms))


@cache
def _is_wide_faster(are_bytes: bool) -> bool:
    """Return whether products are faster in vectors of 512 bits, of activations of 8 or 16 bits.

    Those of many rows decide, which of 16 bits are alike for all weights.
    """
    bits, rounding = (4, Rounding.BYTE) if are_bytes else (8, Rounding.SHORT)
    layout = Layout(bits, COLUMNS, torch.float16, False, True, rounding, rest=0)
    sizes = {"num_out": NUM_OUT, "num_blocks": NUM_IN // COLUMNS, "chunk": NUM_OUT}
    sizes["out_stride"] = 4 * NUM_OUT

    def write(code: Code, is_wide: bool) -> None:
        start, end = code.chunk(code.task.num_out)
        if are_bytes:
            _write_few(code, layout, is_wide, start, end, _counts(layout, is_wide)[:1])
        else:
            _write_many(code, layout, is_wide, start, end, _many_counts(is_wide)[:1])

    task = (BlockProductTask, sizes)
    return has_512_bits() and is_second_faster("raced block product", (layout,), write, task)


_Weights = WeightRow | TwoWeightRows | ReadRow


class _Pair:
    """The sum of the products of a row of weights and a row of activations.

    With two rows of weights side by side, `row` is both, and the sum has the lanes of both.
    """

    def __init__(self, code: Code, row: _Weights, x: ActivationRow, num_rows: int) -> None:
        self._code = code
        self.row, self.x = row, x
        self.num_rows = num_rows
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


def _write(code: Code, layout: Layout, is_read_once: bool, is_wide: bool) -> None:
    """Write all products of a unit."""
    start, end = code.chunk(code.task.num_out)
    few_counts = _counts(layout, is_wide)
    if not is_read_once:
        _write_few(code, layout, is_wide, start, end, few_counts)
        return
    are_many = has_many(code)
    with code.when(are_many ^ 1):
        _write_few(code, layout, is_wide, start, end, few_counts)
    with code.when(are_many):
        _write_many(code, layout, is_wide, start, end, _many_counts(is_wide))


def _counts(layout: Layout, is_wide: bool) -> Sequence[int]:
    """Return how many rows of activations share one reading of the weights."""
    if layout.has_planes:
        return _WIDE_FEW_X_COUNTS if is_wide else _FEW_X_COUNTS
    return _many_counts(is_wide)


def _many_counts(is_wide: bool) -> Sequence[int]:
    return _WIDE_X_COUNTS if is_wide else _X_COUNTS


def _write_few(
    code: Code, layout: Layout, is_wide: bool, start: Value, end: Value, counts: Sequence[int]
) -> None:
    """Write the products of the rows from `start` to `end`, whose levels are read by each tile."""
    has_many_registers = has_feature("avx512vl")

    def write_tile(rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        are_all = has_many_registers or len(x_rows) <= _FEW_X
        step = len(rows) if are_all else max(1, len(rows) // 2)
        for at in range(0, len(rows), step):
            write_part(rows[at : at + step], x_rows)

    def write_part(rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        has_two = len(rows) > 1 and (len(x_rows) > 1 or layout.has_planes)
        single = [WeightRow(code, layout, row) for row in rows]
        weights: Sequence[_Weights] = single
        if is_wide and has_two:
            twos = zip(single[::2], single[1::2], strict=True)
            weights = [TwoWeightRows(code, layout, two) for two in twos]
        _write_products(code, layout, weights, rows, x_rows)

    write_tiles(code, start, end, counts, write_tile, holds_x=True)


def _write_many(
    code: Code, layout: Layout, is_wide: bool, start: Value, end: Value, counts: Sequence[int]
) -> None:
    """Write the products of the same rows, whose levels are read once, run by run."""
    room = Room(code, layout, are_pairs=is_wide)
    for first, last in room.each_run(start, end):
        _write_run(code, layout_read(layout), room, first, last, counts)


def _write_run(
    code: Code, layout: Layout, room: Room, start: Value, end: Value, counts: Sequence[int]
) -> None:
    """Write the products of the rows from `start` to `end`, which are in a room.

    Some rows of activations stay in the first cache while all of the room passes.
    """
    has_few_registers = not has_feature("avx512vl")
    done, num_rows = code.whole(0), code.header(Header.NUM_ROWS)
    tiled = (end - start) // WEIGHT_ROWS * WEIGHT_ROWS
    for count in counts:
        step = WEIGHT_ROWS // 2 if has_few_registers and count > _FEW_X else WEIGHT_ROWS
        last = done + (num_rows - done) // count * count
        with code.loop(done, last, count) as x_row, code.loop(0, tiled, step) as place:
            rows = [start + place + number for number in range(step)]
            x_rows = [x_row + number for number in range(count)]
            _write_products(code, layout, room.rows(place, step), rows, x_rows, are_beside=True)
        done = last
    with code.loop(0, num_rows) as x_row, code.loop(tiled, end - start) as place:
        _write_products(code, layout, room.rows(place, 1), [start + place], [x_row])


def _write_products(
    code: Code,
    layout: Layout,
    weights: Sequence[_Weights],
    rows: Sequence[Value],
    x_rows: Sequence[Value],
    *,
    are_beside: bool = False,
) -> None:
    """Write the products of a tile: `rows` are the numbers of the rows that `weights` have.

    `are_beside`: one is behind the other.
    """
    side = len(rows) // len(weights)
    activations = [ActivationRow(code, x, layout.rounding, side) for x in x_rows]
    pairs = [[_Pair(code, row, x, side) for x in activations] for row in weights]
    _add_products(code, layout, pairs)
    totals = [
        code.variable(code.tree_totals([pair.total.get() for pair in of_x], LANES))
        for of_x in zip(*pairs, strict=True)
    ]
    with code.when(code.task.bias > 0):
        if are_beside:
            biases = code.load(code.task.bias, rows[0] * 4, totals[0].get().type)
        else:
            each = [code.load(code.task.bias, row * 4, F32) for row in rows]
            biases = code.gathered(each) if len(rows) > 1 else each[0]
        for total in totals:
            total.set(total.get() + biases)
    for x_row, total in zip(x_rows, totals, strict=True):
        out = code.task.out + x_row * code.task.out_stride
        if are_beside or len(rows) == 1:
            code.store(total.get(), out, rows[0] * 4)
            continue
        for number, row in enumerate(rows):
            code.store(code.lane(total.get(), number), out, row * 4)


def _add_products(code: Code, layout: Layout, pairs: _Pairs) -> None:
    """Write a group of blocks after another: a lane holds the sum of one block's products."""
    for index, size in each_group(code, code.task.num_blocks, layout):
        for of_row in pairs:
            of_row[0].row.prefetch(index, size)
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
        if count > size and not has_tiles():
            whole, count = _sums_of_blocks(code, whole, pair.num_rows, size), size
        starts = range(0, pair.num_rows * size, size)
        lanes = [start + lane % size for start in starts for lane in range(count)]
        kind = ir.VectorType(F32, len(lanes)) if len(lanes) > 1 else F32
        floats = code.convert("sitofp", whole, kind)
        pair.add(floats, code.picked(factors, lanes) if len(lanes) > 1 else factors)

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


def _sums_of_blocks(code: Code, sums: Value, num_rows: int, size: int) -> Value:
    """Return the sums of whole blocks, of lanes that have some columns of a block each.

    Bytes and 16 bits have other columns in a lane. Tiles have those of a lane of their own.
    """
    count = sums.type.count // num_rows
    while count > size:
        starts, half = range(0, num_rows * count, count), count // 2
        lower, upper = (
            [start + first + lane for start in starts for lane in range(half)]
            for first in (0, half)
        )
        if len(lower) == 1:
            return code.lane(sums, 0) + code.lane(sums, 1)
        sums, count = code.picked(sums, lower) + code.picked(sums, upper), half
    return sums


def _sums_of_group(
    code: Code, layout: Layout, pairs: _Pairs, index: Value, size: int, part: int
) -> list[list["_Whole"]]:
    """Return the sum of each pair's products in a group, a lane a block of 32 or its half `part`.

    Of weights and activations, the fewer are loaded first and stay in registers. It is a loop, for
    in a long run of instructions LLVM moves all loads to the beginning, and has no registers left.
    """
    width = vector_bytes(layout, size)
    num_rows, zero = pairs[0][0].num_rows, zero_of(layout)
    form = _SumForm.of(layout, len(pairs) * len(pairs[0]), num_rows == 2)
    starts: list[Callable[[], Value] | None] = [None] * len(pairs[0])
    if layout.is_centred:
        starts = [partial(pair.x.starts, index, size, width // 4) for pair in pairs[0]]
    elif zero:
        half = part if layout.part < COLUMNS else None
        starts = [
            partial(pair.x.starts_of, zero, half, index, size, width // 4) for pair in pairs[0]
        ]
    lanes = width * num_rows
    sums = [[_Whole(code, form, lanes, start) for start in starts] for _ in pairs]
    rows, xs = [of_row[0].row for of_row in pairs], [pair.x for pair in pairs[0]]
    for number, parts_of_x in enumerate(form.passes):
        if number:
            for total in (total for of_row in sums for total in of_row):
                total.begin_low_bytes()
        for places in each_vector(code, layout, size, part):
            for place in places:
                _add_vectors(rows, xs, sums, index, size, place, width, parts_of_x)
    return sums


def _add_vectors(
    rows: Sequence[_Weights],
    xs: Sequence[ActivationRow],
    sums: Sequence[Sequence["_Whole"]],
    index: Value,
    size: int,
    place: Place,
    width: int,
    parts_of_x: Sequence[int],
) -> None:
    """Add the products of a vector of each row of weights with each row of activations."""

    def beside(x: ActivationRow) -> list[tuple[int, int, Value]]:
        """Return a row's vectors, each with its number and its part."""
        parts = [(part, x.beside(index, size, place.start, width, part)) for part in parts_of_x]
        return [(at, part, loaded) for part, vectors in parts for at, loaded in enumerate(vectors)]

    if len(rows) < len(xs) or len(xs) == 1:
        levels = [row.vectors(index, size, place) for row in rows]
        for number, x in enumerate(xs):
            for at, part, loaded in beside(x):
                for vectors, of_row in zip(levels, sums, strict=True):
                    of_row[number].add(at, part, vectors[at], loaded)
    else:
        of_xs = [beside(x) for x in xs]
        for row, of_row in zip(rows, sums, strict=True):
            vectors = row.vectors(index, size, place)
            for of_x, total in zip(of_xs, of_row, strict=True):
                for at, part, loaded in of_x:
                    total.add(at, part, vectors[at], loaded)


@dataclass(frozen=True, slots=True)
class _SumForm:
    """How sums of products are added.

    are_bytes    levels are multiplied as bytes, four neighbours at a time
    num_chains   how many sums VNNI adds to by turns, for an addition waits 4 cycles
    passes       the parts of activations that each reading of the levels is multiplied with. With
                 two at once each part has a sum of its own
    """

    are_bytes: bool
    num_chains: int
    passes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout, num_sums: int, is_wide: bool) -> "_SumForm":
        """Return the form of so many sums side by side: they share the registers."""
        are_bytes, has_two = layout.rounding is not Rounding.SHORT, layout.rounding.num_parts == 2
        # Of 16 registers, two chains of each sum would take more than there are.
        has_many_registers = has_feature("avx512vl")
        room = _MOST_CHAINS if has_many_registers else _MANY
        if has_two and has_vnni() and num_sums * 2 <= room:
            return cls(are_bytes, 2, ((0, 1),))
        has_many = (is_wide or not has_many_registers) and num_sums >= _MANY
        num_chains = 1 if has_many or not has_vnni() else 2
        return cls(are_bytes, num_chains, ((0,), (1,)) if has_two else ((0,),))


class _Whole:
    """A sum of products of levels with activations, neighbours added by fours: 32 bits a lane.

    Of levels with 16 bits neighbours are two. Without VNNI lanes of 16 bits add up pairs of 4 bits:
    16 products, each at most 15 * 128, fit. Of activations in two bytes the high ones come first.
    What `first` loads, 32 bits a lane, is added at last: registers are few.
    """

    def __init__(
        self, code: Code, form: _SumForm, width: int, first: Callable[[], Value] | None
    ) -> None:
        self._code = code
        self._form = form
        self._lanes = ir.VectorType(I32, width // 4)
        self._has_vnni = has_vnni()
        self._is_short = form.are_bytes and not self._has_vnni
        kind = ir.VectorType(I16, width // 2) if self._is_short else self._lanes
        self._zeros = Value(code, constant(0, kind))
        self._chains = [code.variable(self._zeros) for _ in range(form.num_chains)]
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

    def add(self, at: int, part: int, levels: Value, x: Value) -> None:
        """Add the products of the vector `at` of a place with a part of the activations."""
        code = self._code
        chain = self._chains[(part if self._has_both else at) % len(self._chains)]
        if self._has_vnni:
            words = code.as_bits(levels, self._lanes), code.as_bits(x, self._lanes)
            multiplied = "vpdpbusd" if self._form.are_bytes else "vpdpwssd"
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

    @property
    def _has_both(self) -> bool:
        """Whether each part of the activations has a sum of its own."""
        return len(self._form.passes[0]) == 2

    def _in_32_bits(self) -> Value:
        total = self._chains[0].get()
        if len(self._chains) > 1:
            return (total << 8 if self._has_both else total) + self._chains[1].get()
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
