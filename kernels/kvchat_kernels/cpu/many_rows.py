"""Many rows of activations: the levels of the weights beside them are read once.

Reading levels from planes, and adding sums of high and low bytes, cost about as much as the
products if each few rows do it again. So the levels of some rows of weights are written to memory
that stays in the second cache, with their scales in float32, and multiplied with all rows of
activations. Beside activations of 8 bits these levels are bytes. Beside others both the levels and
the activations have 16 bits here (`Rounding.SHORT`), where few rows may have two bytes: they are
the same numbers.
"""

from collections.abc import Iterator
from dataclasses import replace

from llvmlite import ir

from kvchat_kernels.cpu.block_levels import SIGN, Place
from kvchat_kernels.cpu.block_rows import WeightRow, each_group, each_vector, vector_bytes
from kvchat_kernels.cpu.code import F32, I8, I16, Code, Value
from kvchat_kernels.cpu.products import WEIGHT_ROWS
from kvchat_kernels.cpu.step import MOST_BLOCKS
from kvchat_kernels.linear.blocks import CENTRE, COLUMNS, WORD, Layout, Rounding

_SHORT_BYTES, _FLOAT_BYTES = 2, 4
# Blocks that are read at once: of four rows at least.
_BLOCKS_READ = MOST_BLOCKS * WEIGHT_ROWS


def layout_read(layout: Layout) -> Layout:
    """Return the layout of levels that were read: 8 bits, multiplied as 16 or as they are."""
    rounding = Rounding.COARSE if layout.rounding.has_8_bits else Rounding.SHORT
    return replace(layout, bits=8, zero=0, codes=None, grid=None, rounding=rounding)


class Room:
    """Memory of some neighbouring rows of weights, where `are_pairs` two by two.

    A pair has the pieces of both rows by turns, and the scales of a group of the one, then those of
    the other. A piece is a vector of bytes, or half of one whose levels have 16 bits. The last
    rows, fewer than four, lie alone.
    """

    def __init__(self, code: Code, layout: Layout, are_pairs: bool) -> None:
        self._code = code
        self._layout = layout
        self._read_layout = layout_read(layout)
        self._are_pairs = are_pairs
        self._num_parts = COLUMNS // layout.part
        self._are_bytes = self._read_layout.rounding is Rounding.COARSE
        self._level_bytes = 1 if self._are_bytes else _SHORT_BYTES
        self._levels = code.room(_BLOCKS_READ * COLUMNS * self._level_bytes)
        float_bytes = _BLOCKS_READ * self._num_parts * _FLOAT_BYTES
        self._scales = code.room(float_bytes)
        self._minimums = code.room(float_bytes) if layout.has_minimums else None

    def each_run(self, start: Value, end: Value) -> Iterator[tuple[Value, Value]]:
        """Write a loop over runs of the rows [`start`, `end`) that fit; each is read first."""
        code = self._code
        # Four rows fit: `has_many` asks for no more than MOST_BLOCKS.
        most = code.whole(_BLOCKS_READ) // (code.task.num_blocks * WEIGHT_ROWS) * WEIGHT_ROWS
        with code.loop(0, (end - start + (most - 1)) // most) as run:
            first = start + run * most
            last = code.least(first + most, end)
            self._read(first, last)
            yield first, last

    def rows(self, place: Value, count: int) -> list["ReadRow"]:
        """Return `count` rows that lie at `place` of the run: four, or one of the last."""
        num_rows = 2 if self._are_pairs and count > 1 else 1
        starts = range(0, count, num_rows)
        return [ReadRow(self, place + start, num_rows) for start in starts]

    def vectors(
        self, row: Value, num_rows: int, index: Value, size: int, place: Place
    ) -> tuple[Value, ...]:
        """Load the pieces of a vector, as `WeightRow.vectors` has them."""
        at = row * self._row_columns + (index * COLUMNS + place.start) * num_rows
        count = self._piece(size) * num_rows
        address = at * self._level_bytes
        if self._are_bytes:
            return (self._code.load(self._levels, address, ir.VectorType(I8, count)),)
        kind = ir.VectorType(I16, count)
        first = self._code.load(self._levels, address, kind)
        return first, self._code.load(self._levels, address + count * _SHORT_BYTES, kind)

    def _piece(self, size: int) -> int:
        """Return how many levels of a row lie together in a group of `size` blocks."""
        return vector_bytes(self._read_layout, size) // self._level_bytes

    def factors(
        self, are_scales: bool, row: Value, num_rows: int, index: Value, size: int, part: int
    ) -> Value:
        """Load the scales of a group, or its minimums, as `WeightRow` has them."""
        kind = ir.VectorType(F32, size * num_rows) if size * num_rows > 1 else F32
        at = self._place_of_factors(row, index, part * size, num_rows)
        address = self._scales if are_scales else self._minimums
        assert address is not None, "these weights have no minimums"
        return self._code.load(address, at, kind)

    def _place_of_factors(
        self, row: Value, index: Value, number: int, num_rows: Value | int
    ) -> Value:
        blocks = row * self._code.task.num_blocks * self._num_parts
        return (blocks + (index * self._num_parts + number) * num_rows) * _FLOAT_BYTES

    @property
    def _row_columns(self) -> Value:
        return self._code.task.num_blocks * COLUMNS

    def _read(self, start: Value, end: Value) -> None:
        code = self._code
        in_pairs = (end - start) // WEIGHT_ROWS * WEIGHT_ROWS
        with code.loop(start, end) as number:
            place = number - start
            first, num_rows, side = place, code.whole(1), code.whole(0)
            if self._are_pairs:
                is_of_pair = place < in_pairs
                num_rows = code.select(is_of_pair, code.whole(2), num_rows)
                side = code.select(is_of_pair, place & 1, side)
                first = place - side
            self._read_row(number, first, num_rows, side)

    def _read_row(self, number: Value, first: Value, num_rows: Value, side: Value) -> None:
        """Write a row: it is the one `side` of `num_rows` that begin at the place `first`."""
        code, layout = self._code, self._layout
        row, as_a_whole = WeightRow(code, layout, number), replace(layout, block=COLUMNS)
        whole_row = WeightRow(code, as_a_whole, number)  # of blocks whose halves lie together
        for index, size in each_group(code, code.task.num_blocks, layout):
            row.prefetch(index, size)
            piece = self._piece(size)
            for places in each_vector(code, as_a_whole, size, 0):
                for place in places:
                    for start, levels in self._levels_of(whole_row, index, size, place):
                        at = first * self._row_columns + (index * COLUMNS + start) * num_rows
                        self._store(levels, at + side * piece, num_rows, piece)
            for part in range(self._num_parts):
                at = self._place_of_factors(first, index, part * size, num_rows)
                at = at + side * (size * _FLOAT_BYTES)
                code.store(row.scales_of_group(index, size, part), self._scales, at)
                if self._minimums is not None:
                    code.store(row.minimums_of_group(index, size, part), self._minimums, at)

    def _levels_of(
        self, row: WeightRow, index: Value, size: int, place: Place
    ) -> Iterator[tuple[Value | int, Value]]:
        """Yield the vectors of a place with the columns before each: bytes with signs."""
        code, layout = self._code, self._layout
        if layout.has_planes:
            parts = [row.whole_bytes(index, size, place)]
        elif layout.are_nibbles:
            zero = CENTRE if layout.is_centred else 0
            parts = [part - zero for part in row.vectors(index, size, place)]
            if parts[0].type.count < COLUMNS:
                parts = [code.joined(*parts)]
        else:
            parts = [code.chain(row.stored(index, size, place))]
        for number, levels in enumerate(parts):
            start = place.start + number * (size * COLUMNS // 2) if number else place.start
            is_in_order = self._are_bytes or layout.rounding is Rounding.SHORT
            yield start, levels if is_in_order else _by_twos(code, levels, size)

    def _store(self, levels: Value, at: Value, num_rows: Value, piece: int) -> None:
        """Store bytes with signs as 16 bits, or as bytes without signs, a piece after another."""
        code, kind = self._code, ir.VectorType(I16, piece)
        for number in range(levels.type.count // piece):
            part = code.picked(levels, range(number * piece, (number + 1) * piece))
            place = (at + num_rows * (number * piece)) * self._level_bytes
            stored = part ^ -SIGN if self._are_bytes else code.convert("sext", part, kind)
            code.store(stored, self._levels, place)


class ReadRow:
    """A row whose levels were read, or two side by side: `num_rows` from `row` of a room on."""

    def __init__(self, room: Room, row: Value, num_rows: int) -> None:
        self._room = room
        self._row = row
        self._num_rows = num_rows

    def vectors(self, index: Value, size: int, place: Place) -> tuple[Value, ...]:
        return self._room.vectors(self._row, self._num_rows, index, size, place)

    def scales_of_group(self, index: Value, size: int, part: int) -> Value:
        return self._room.factors(True, self._row, self._num_rows, index, size, part)

    def minimums_of_group(self, index: Value, size: int, part: int) -> Value:
        return self._room.factors(False, self._row, self._num_rows, index, size, part)

    def prefetch(self, index: Value, count: int) -> None:
        """Do nothing: the levels are near."""


def _by_twos(code: Code, levels: Value, size: int) -> Value:
    """Return levels whose blocks alternate by 2 columns, of those that alternate by 4."""
    lanes = [
        (word * size + block) * WORD + half + column
        for word in range(levels.type.count // (WORD * size))
        for half in (0, WORD // 2)
        for block in range(size)
        for column in range(WORD // 2)
    ]
    return code.picked(levels, lanes)
