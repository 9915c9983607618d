"""Rows of weights and of rounded activations in blocks: where they lie, and unpacking."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from llvmlite import ir

from kvchat_kernels.cpu.block_levels import (
    Place,
    as_shorts,
    levels_of,
    signed,
    vectors_of,
    zero_of,
)
from kvchat_kernels.cpu.code import (
    F16,
    F32,
    I8,
    I16,
    I32,
    Code,
    Value,
    constant,
    kernel,
)
from kvchat_kernels.cpu.grid_levels import Records
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.block_order import GROUPS
from kvchat_kernels.linear.blocks import (
    CENTRE,
    COLUMNS,
    FLOATS_OF_8_BITS,
    PLANES,
    STEP_COLUMNS,
    WORD,
    Layout,
    Rounding,
)
from kvchat_kernels.linear.grids import Grid
from kvchat_kernels.linear.rows import starts_columns

_CACHE_LINE = 64
# Bytes ahead that levels are asked for, into the second cache. On a Zen 4 a processor's own look
# ahead is enough for whole bytes, and asking for the first cache too made products of all kinds 3
# to 10 % slower. Of 8,192 bytes more lie behind the end of a small matrix.
_AHEAD = 2048
# Bytes of levels that an instruction takes.
_VECTOR_BYTES = 32
# Words of 4 columns that a block has: of each, a group of 8 blocks has a vector.
_WORDS = COLUMNS // WORD

_KINDS = {torch.float16: F16, torch.float32: F32}  # others have bytes
# The float32 of 2 to the power of -127, and the power that exponents of 4 bits lack.
_LEAST_POWER, _MISSING_POWER = 0x0040_0000, 2.0**120
_STEP_BYTES = 2
_BYTES, _SHORTS = ir.VectorType(I8, 16), ir.VectorType(I16, 16)


class UnpackingTask(Task):
    """A matrix to unpack, from the row `first` on, to `out`, float32 [rows, in].

    levels, scales, ...   as BlockWeights has them
    num_out               the row after the last
    chunk                 rows of a unit
    """

    num_out: int
    num_blocks: int
    levels: Memory
    scales: Memory
    minimums: Memory | None = None
    steps: Memory | None = None
    out: Memory
    first: int
    chunk: int


def vector_bytes(layout: Layout, size: int) -> int:
    """Return how many bytes of the levels of a group of blocks are taken at once.

    Those of levels in planes count 8 bits each.
    """
    bits = 4 if layout.are_nibbles else 8
    return min(_VECTOR_BYTES, size * layout.part * bits // 8)


def each_vector(code: Code, layout: Layout, size: int, part: int) -> Iterator[list[Place]]:
    """Write a loop over the vectors of a group of `size` blocks, or of the halves `part` of them.

    The body gets the places that a turn of the loop takes. Of levels in planes all turns are
    written, for their shifts are constants then.
    """
    width = vector_bytes(layout, size)
    bits = 4 if layout.are_nibbles else 8
    part_bytes = size * layout.part * bits // 8
    first, last = part * part_bytes, (part + 1) * part_bytes
    if layout.grid is not None:
        words = range(first // width, last // width)
        yield [Place(word * width, words=[word]) for word in words]
    elif not layout.has_planes:
        with code.loop(first, last, width) as start:
            yield [Place(start)]
    elif size < GROUPS[0]:
        of_vector = width // (WORD * size)
        for at in range(first, last, width):
            word = at // (WORD * size)
            yield [Place(at, words=range(word, word + of_vector))]
    else:
        turns = PLANES[layout.bits][0]
        words = range(0, _WORDS, turns)
        half = len(words) * layout.part // COLUMNS
        for turn in range(turns):
            yield [
                Place((turn + word) * width, code.whole(turn), [word])
                for word in words[part * half : (part + 1) * half]
            ]


class WeightRow:
    """The addresses of a row of weights."""

    def __init__(self, code: Code, layout: Layout, row: Value) -> None:
        self._code = code
        self._layout = layout
        self._scale_bytes = layout.scales.itemsize
        self._num_steps = 1 + layout.has_minimums
        blocks = row * code.task.num_blocks
        self.levels_at = code.task.levels + self._level_bytes(blocks)
        of_scale = layout.block if layout.grid is None else STEP_COLUMNS
        offset = blocks * COLUMNS // of_scale * self._scale_bytes
        self._scales = code.task.scales + offset
        self._minimums = code.task.minimums + offset
        steps = blocks // (STEP_COLUMNS // COLUMNS) * self._num_steps
        self._steps = code.task.steps + (row * 4 if layout.has_row_steps else steps * _STEP_BYTES)
        self._records: tuple[Value, Records] | None = None

    def _level_bytes(self, blocks: Value) -> Value:
        """Return the bytes of the levels of so many blocks."""
        if self._layout.grid is not None:
            return blocks // GROUPS[0] * self._layout.grid.num_bytes
        return blocks * self._layout.block_bytes

    @property
    def layout(self) -> Layout:
        return self._layout

    def levels(self, index: Value) -> list[Value]:
        """Load the levels of 32 columns that are not interleaved: two vectors of 16 x 16 bits."""
        code, layout = self._code, self._layout
        at = index * layout.block_bytes
        if layout.bits == 8:
            loaded = [code.load(self.levels_at, at + start, _BYTES) for start in (0, 16)]
            return [code.convert("sext", half, _SHORTS) for half in loaded]
        if layout.are_nibbles:
            both = code.convert("zext", code.load(self.levels_at, at, _BYTES), _SHORTS)
            return [both & 15, both >> 4]
        return list(self.vectors(index, 1, Place(0, words=range(_WORDS))))

    def vectors(self, index: Value, size: int, place: Place) -> tuple[Value, ...]:
        """Load a vector of the levels of a group of `size` blocks from `index` on.

        Nibbles: the low bits of bytes and the high bits, 8 bits each. Beside activations of 16 bits
        the first half of the bytes and the second, 16 bits each. Others: bytes without signs.
        """
        if self._layout.grid is not None:
            return _vectors_of_grid(self._code, self._layout, self.records(index), place)
        return vectors_of(self._code, self._layout, size, place, self.stored(index, size, place))

    def whole_bytes(self, index: Value, size: int, place: Place) -> Value:
        """Load levels in planes as bytes with signs, as levels of 8 bits lie in a group."""
        if self._layout.grid is not None:
            return _numbers_of_grid(self._code, self._layout, self.records(index), place)
        stored = self.stored(index, size, place)
        levels = levels_of(self._code, self._layout.bits, size, place, stored)
        return signed(self._code, self._layout, levels)

    def record_at(self, index: Value) -> Value:
        """Return the address of the record of the 8 blocks from `index` on."""
        return self.levels_at + self._level_bytes(index)

    def records(self, index: Value) -> Records:
        """Return the reader of that record."""
        grid = self._layout.grid
        assert grid is not None
        if self._records is None or self._records[0] is not index:
            self._records = (index, Records(self._code, grid, [self.record_at(index)]))
        return self._records[1]

    def bytes_of_group(self, index: Value, size: int) -> Value:
        """Load the levels of a group of fewer than 8 blocks, in the order of activations beside it.

        Levels without planes are not changed: those of 4 bits are 0 to 15.
        """
        code, layout = self._code, self._layout
        group, num_bytes = self.levels_at + index * layout.block_bytes, size * layout.block_bytes
        if layout.has_planes:
            vectors = each_vector(code, layout, size, 0)
            return code.chain([self.whole_bytes(index, size, place) for [place] in vectors])
        packed = code.load(group, 0, ir.VectorType(I8, num_bytes))
        return code.joined(packed & 15, packed >> 4) if layout.are_nibbles else packed

    def stored(self, index: Value, size: int, place: Place) -> list[Value]:
        """Load the bytes that `vectors` makes its vectors of.

        Nibbles, or bytes without signs: a vector; beside activations of 16 bits its halves; levels
        in planes: a vector of each plane.
        """
        code, layout = self._code, self._layout
        group = self.levels_at + index * layout.block_bytes
        if layout.has_planes:
            return self._planes(group, size, place)
        width = vector_bytes(layout, size)
        step = width // 2 if layout.rounding is Rounding.SHORT else width
        kind = ir.VectorType(I8, step)
        return [code.load(group + place.start, at, kind) for at in range(0, width, step)]

    def _planes(self, group: Value, size: int, place: Place) -> list[Value]:
        """Load the vector of each plane, of small groups the bytes that have the place's words."""
        loaded, turns = [], PLANES[self._layout.bits][0]
        for bits in PLANES[self._layout.bits]:
            number: Value | int = place.words[0] % bits
            count = min(len(place.words), bits)
            if place.turn is not None:
                number = place.turn if bits == turns else place.turn & (bits - 1)
            kind = ir.VectorType(I8, WORD * size * count)
            loaded.append(self._code.load(group, number * (WORD * size), kind))
            group = group + WORD * bits * size
        return loaded

    def prefetch(self, index: Value, count: int) -> None:
        """Ask for the levels that lie behind those of `count` blocks at `index`."""
        layout = self._layout
        if layout.bits == 8 and not layout.has_planes:
            return
        num_bytes = count * layout.block_bytes if layout.grid is None else layout.grid.num_bytes
        for line in range(0, num_bytes, _CACHE_LINE):
            at = self._level_bytes(index) + line + _AHEAD
            self._code.prefetch(self.levels_at, at, to_second=True)

    def scales(self, index: Value, count: int = 1) -> Value:
        scales, unit = self._floats(self._scales, index, count, 0), self._layout.unit
        return scales if unit == 1 else scales * unit

    def scales_of_group(self, index: Value, size: int, part: int) -> Value:
        """Load the scales of a group of blocks of 32, the first or second where each has two."""
        if self._layout.grid is not None:
            step = self.scales(index // size)
            return self.records(index).scales(part) * self._code.spread(step, size)
        return self._of_group(index, size, part, self.scales)

    def minimums_of_group(self, index: Value, size: int, part: int) -> Value:
        """Load minimums in the same way."""
        return self._of_group(index, size, part, self.minimums)

    def _of_group(
        self, index: Value, size: int, part: int, load: Callable[[Value, int], Value]
    ) -> Value:
        if self._layout.block > COLUMNS:
            single = load(index // (self._layout.block // COLUMNS), 1)
            return self._code.spread(single, size) if size > 1 else single
        per_block = COLUMNS // self._layout.block
        loaded = load(index * per_block, size * per_block)
        if per_block == 1:
            return loaded
        lanes = range(part, size * per_block, per_block)
        return self._code.picked(loaded, lanes) if size > 1 else self._code.lane(loaded, part)

    def minimums(self, index: Value, count: int = 1) -> Value:
        """Load minimums; where levels are centred, what the level 8 makes of the scales."""
        if not self._layout.has_minimums:
            assert self._layout.is_centred
            return self.scales(index, count) * -float(CENTRE)
        are_beside = self._layout.scales == torch.uint8
        return self._floats(self._scales if are_beside else self._minimums, index, count, 1)

    def _floats(self, address: Value, index: Value, count: int, number: int) -> Value:
        """Load one factor, or a vector of `count` from `index` on, as float32.

        `number` is that of the step that whole factors are multiplied with.
        """
        code, kind, wide = self._code, _KINDS.get(self._layout.scales, I8), F32
        if count > 1:
            kind, wide = ir.VectorType(kind, count), ir.VectorType(F32, count)
        loaded = code.load(address, index * self._scale_bytes, kind)
        if self._layout.scales == torch.float16:
            return code.convert("fpext", loaded, wide)
        if self._layout.scales == torch.float32:
            return loaded
        if self._layout.scales in FLOATS_OF_8_BITS:
            floats = _floats_of_8_bits(code, loaded, self._layout.scales == torch.float8_e8m0fnu)
            if not self._layout.has_row_steps:
                return floats
            step = code.load(self._steps, 0, F32)
            return floats * (code.spread(step, count) if count > 1 else step)
        if self._layout.scales == torch.uint8:
            loaded = loaded >> 4 if number else loaded & 15
        place = index // (STEP_COLUMNS // self._layout.block) * self._num_steps + number
        step = code.convert("fpext", code.load(self._steps, place * _STEP_BYTES, F16), F32)
        factors = code.convert("sitofp", loaded, wide)
        return factors * (code.spread(step, count) if count > 1 else step)


class TwoWeightRows:
    """Two rows of interleaved weights side by side: the lanes of the first, then the other's."""

    def __init__(self, code: Code, layout: Layout, rows: Sequence[WeightRow]) -> None:
        self._code = code
        self._layout = layout
        self._rows = rows
        self._records: tuple[Value, Records] | None = None

    def _records_of(self, index: Value, grid: Grid) -> Records:
        if self._records is None or self._records[0] is not index:
            at = [row.record_at(index) for row in self._rows]
            self._records = (index, Records(self._code, grid, at))
        return self._records[1]

    def vectors(self, index: Value, size: int, place: Place) -> tuple[Value, ...]:
        """Load the vectors of both: the first of both side by side, then the second."""
        code, layout = self._code, self._layout
        if layout.grid is not None:
            return _vectors_of_grid(code, layout, self._records_of(index, layout.grid), place)
        one, other = (row.stored(index, size, place) for row in self._rows)
        pairs = list(zip(one, other, strict=True))
        if not layout.has_planes:
            joined = [code.joined(*pair) for pair in pairs]
            return vectors_of(code, layout, size, place, joined)
        are_shorts = layout.rounding is Rounding.SHORT
        if place.turn is None and are_shorts:
            each = [vectors_of(code, layout, size, place, stored) for stored in (one, other)]
            return tuple(code.joined(*two) for two in zip(*each, strict=True))
        mixes = _halves_by_turns if are_shorts else _beside
        mixed = [mixes(code, *pair) for pair in pairs]
        return vectors_of(code, layout, size, place, mixed)

    def scales_of_group(self, index: Value, size: int, part: int) -> Value:
        return self._code.joined(*(row.scales_of_group(index, size, part) for row in self._rows))

    def minimums_of_group(self, index: Value, size: int, part: int) -> Value:
        return self._code.joined(*(row.minimums_of_group(index, size, part) for row in self._rows))

    def prefetch(self, index: Value, count: int) -> None:
        for row in self._rows:
            row.prefetch(index, count)


def _vectors_of_grid(
    code: Code, layout: Layout, records: Records, place: Place
) -> tuple[Value, ...]:
    if layout.rounding.is_beside_unsigned:
        return (records.numbers(place.words[0], zero_of(layout)),)
    return as_shorts(code, code.halves(_numbers_of_grid(code, layout, records, place)))


def _numbers_of_grid(code: Code, layout: Layout, records: Records, place: Place) -> Value:
    """Return bytes with signs, whose blocks alternate by 2 columns beside 16 bits."""
    numbers = records.numbers(place.words[0])
    if layout.rounding is not Rounding.SHORT:
        return numbers
    half, count = WORD // 2, numbers.type.count
    lanes = [
        word + half * part + column
        for part in range(2)
        for word in range(0, count, WORD)
        for column in range(half)
    ]
    return code.picked(numbers, lanes)


def _beside(code: Code, one: Value, other: Value) -> Value:
    return code.joined(one, other)


def _halves_by_turns(code: Code, one: Value, other: Value) -> Value:
    """Return the first halves of two vectors, then their second halves."""
    half = one.type.count // 2
    starts = (0, 2 * half, half, 3 * half)
    return code.shuffled(one, other, [start + lane for start in starts for lane in range(half)])


def _floats_of_8_bits(code: Code, stored: Value, are_powers: bool) -> Value:
    """Return floats of 8 bits without signs as float32, or powers of two."""
    is_vector = isinstance(stored.type, ir.VectorType)
    ints, floats = (
        ir.VectorType(kind, stored.type.count) if is_vector else kind for kind in (I32, F32)
    )
    bits = code.convert("zext", stored, ints)
    if not are_powers:
        return code.as_bits(bits << 20, floats) * _MISSING_POWER
    least = Value(code, constant(_LEAST_POWER, ints))
    return code.as_bits(code.select(bits > 0, bits << 23, least), floats)


class ActivationRow:
    """The addresses of a row of activations, read for `num_weight_rows` side by side."""

    def __init__(
        self, code: Code, row: Value, rounding: Rounding, num_weight_rows: int = 1
    ) -> None:
        self._code = code
        self._rounding = rounding
        self._num_weight_rows = num_weight_rows
        blocks = row * code.task.num_blocks
        self._x = code.task.x + blocks * row_bytes(COLUMNS, rounding)
        self._scales = code.task.x_scales + blocks * 4
        self._sums = code.task.x_sums + blocks * 4
        self._starts = code.task.x_starts + blocks * (4 * COLUMNS // starts_columns(rounding))

    def beside(
        self, index: Value, size: int, start: Value | int, width: int, part: int
    ) -> tuple[Value, ...]:
        """Load what the weights' `vectors` lie beside, in a group of `size` blocks.

        `part` 0 are the levels, or their high bytes, 1 the low ones.
        """
        if self._rounding is Rounding.SHORT:
            kind = ir.VectorType(I16, width // 2)
            first = index * (2 * COLUMNS) + start * 2
            return self._load(self._x, first, kind), self._load(self._x, first + width, kind)
        kind, first = ir.VectorType(I8, width), index * COLUMNS + start
        if part:
            first = first + self._code.task.num_blocks * COLUMNS
        loaded = self._load(self._x, first, kind)
        if self._rounding.is_beside_unsigned:
            return (loaded,)
        return loaded, self._load(self._x, first + size * COLUMNS // 2, kind)

    def scales(self, index: Value, kind: Any) -> Value:
        return self._load(self._scales, index * 4, kind)

    def sums(self, index: Value, kind: Any) -> Value:
        return self._load(self._sums, index * 4, kind)

    def sums_of_halves(self, index: Value, size: int, part: int) -> Value:
        """Load the sums of the first or second halves of a group's levels, as floats."""
        code, lanes = self._code, range(part, 2 * size, 2)
        loaded = code.load(self._starts, index * 8, ir.VectorType(I32, 2 * size))
        floats = code.convert("sitofp", code.picked(loaded, lanes), ir.VectorType(F32, size))
        return code.joined(*[floats] * self._num_weight_rows)

    def starts(self, index: Value, size: int, count: int) -> Value:
        """Load what the sums of a group of blocks begin at, and zeros up to `count` lanes a row."""
        loaded = self._code.load(self._starts, index * 4, ir.VectorType(I32, size))
        return self._lanes_of(loaded, size, count)

    def starts_of(self, zero: int, part: int | None, index: Value, size: int, count: int) -> Value:
        """Return where sums begin whose levels of weights are `zero` too high, in the same way.

        It is made of the sums of the blocks' halves `part`, or of both where there is none.
        """
        code = self._code
        loaded = code.load(self._starts, index * 8, ir.VectorType(I32, 2 * size))
        first, second = (code.picked(loaded, range(half, 2 * size, 2)) for half in (0, 1))
        total = first + second if part is None else (first, second)[part]
        return self._lanes_of(total * -zero, size, count)

    def _lanes_of(self, loaded: Value, size: int, count: int) -> Value:
        code = self._code
        zeros = Value(code, constant(0, loaded.type))
        lanes = [min(lane, size) for lane in range(count)]
        start = code.shuffled(loaded, zeros, lanes) if count > size else loaded
        return code.joined(*[start] * self._num_weight_rows)

    def _load(self, address: Value, offset: Value, kind: Any) -> Value:
        loaded = self._code.load(address, offset, kind)
        return self._code.joined(*[loaded] * self._num_weight_rows)


def row_bytes(num_in: int, rounding: Rounding) -> int:
    """Return the bytes of the levels of a row."""
    return num_in * (1 if rounding.has_8_bits else 2)


def each_group(
    code: Code, num_blocks: Value, layout: Layout | None = None
) -> Iterator[tuple[Value, int]]:
    """Write loops over the groups of a row; each body gets the first block and their number.

    Without a layout a row may have groups of all sizes.
    """
    start = code.whole(0)
    for size in GROUPS if layout is None else layout.groups:
        end = start + (num_blocks - start) // size * size
        with code.loop(start, end, size) as index:
            yield index, size
        start = end


def alternating(code: Code, words: Sequence[Value]) -> Value:
    """Return the first words of all vectors, then their second words, and so on."""
    if len(words) == 1:
        return words[0]
    even, odd = alternating(code, words[::2]), alternating(code, words[1::2])
    count = even.type.count
    return code.shuffled(even, odd, [lane // 2 + count * (lane % 2) for lane in range(2 * count)])


def transposed(code: Code, vectors: Sequence[Value]) -> list[Value]:
    """Return the first lanes of all vectors side by side, then their second lanes, and so on.

    Of 8 vectors of 16 lanes the halves are turned each by itself. In each of the rounds every two
    vectors whose numbers differ in one bit exchange lanes whose numbers differ in it.
    """
    turned, count = list(vectors), vectors[0].type.count
    step = 1
    while step < len(turned):
        kept = [lane if not lane & step else count + lane - step for lane in range(count)]
        moved = [lane + step if not lane & step else count + lane for lane in range(count)]
        for number in range(len(turned)):
            if not number & step:
                pair = turned[number], turned[number + step]
                turned[number], turned[number + step] = (
                    code.shuffled(*pair, order) for order in (kept, moved)
                )
        step *= 2
    return turned


# Unpacking


@kernel("unpacking", UnpackingTask)
def unpacking_kernel(code: Code, layout: Layout) -> None:
    """Write each row of a matrix as float32, the first at the beginning of `out`.

    Units: chunks of rows.
    """
    assert not layout.is_interleaved
    count = code.task.num_blocks
    first = code.task.first
    start = first + code.unit * code.task.chunk
    end = code.least(start + code.task.chunk, code.task.num_out)
    with code.loop(start, end) as number:
        row = WeightRow(code, layout, number)
        out = code.task.out + (number - first) * (count * (4 * COLUMNS))
        with code.loop(0, count) as index:
            _unpack_block(code, layout, row, index, out)


def _unpack_block(code: Code, layout: Layout, row: WeightRow, index: Value, out: Value) -> None:
    wide = ir.VectorType(F32, 16)
    places = index * COLUMNS // layout.block
    for half, levels in enumerate(row.levels(index)):
        place = places + (half if layout.block == 16 else 0)
        values = code.convert("sitofp", levels, wide) * code.spread(row.scales(place), 16)
        if layout.has_minimums or layout.is_centred:
            values = values + code.spread(row.minimums(place), 16)
        code.store(values, out, index * (4 * COLUMNS) + 64 * half)
