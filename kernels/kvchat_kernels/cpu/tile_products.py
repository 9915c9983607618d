"""Products of many rows with block weights by a processor's tiles (AMX, whole numbers).

An instruction multiplies 16 rows of activations with 16 rows of weights, 32 columns of each, and
adds the products in 32 bits: a block's sum, as in `block_products.py`, whose numbers these are to
the bit. There a lane of a vector has the blocks of one remainder by 8; here the blocks of one
remainder are visited after another, so that every float sum takes the same terms in the same order,
and the 8 sums are added as the 8 lanes are.

Weights are turned once for each unit: a tile has 4 columns of 16 rows side by side. Activations lie
as `tiled_rounding_kernel` stores them. Behind the groups of 8 blocks there are groups of 4 and of
2, of which each lane has some columns of a block: a tile has these, and zeros. Levels of 16 bits
are two bytes, of which the low one is unsigned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from kvchat_kernels.cpu.activation_rounding import RoundingTask, round_block, write_rounding
from kvchat_kernels.cpu.block_levels import bits_at, signed
from kvchat_kernels.cpu.block_products import BlockProductTask
from kvchat_kernels.cpu.block_rows import (
    WeightRow,
    row_bytes,
    transposed,
)
from kvchat_kernels.cpu.code import (
    F32,
    I8,
    I16,
    I32,
    I32S,
    I64,
    LANES,
    Code,
    Kernel,
    Value,
    Variable,
    constant,
    kernel,
)
from kvchat_kernels.cpu.features import has_tiles
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.linear.blocks import CENTRE, COLUMNS, PLANES, Layout, Rounding

# Rows of a tile, of activations and of weights. With fewer rows of activations vectors are used.
TILE_ROWS = 16
# The blocks of groups behind those of 8, and how many times the blocks of a row tiles may take: the
# columns that a lane has of such a group take as long as a whole block.
_RESTS, _MOST_TILES = (4, 2), 1.5
# Groups of 8 blocks whose weights are turned at once: 64 KB of them stay in the second cache.
_RUN = 16
# Rows of activations that share the turned weights, whose sums lie in memory meanwhile.
_SLAB = 128
_LINE = 64
_TILE_BYTES = COLUMNS * TILE_ROWS
# What is loaded of a row at once: as many words as there are rows.
_SQUARE_BYTES = 4 * TILE_ROWS
_VECTOR_F, _VECTOR_I = ir.VectorType(F32, TILE_ROWS), ir.VectorType(I32, TILE_ROWS)
_VECTOR_B = ir.VectorType(I8, _LINE)
_VOID, _POINTER = ir.VoidType(), I8.as_pointer()
# The tiles: sums of high and of low bytes, for two parts one after another; activations; weights.
_SUMS, _X, _WEIGHTS = ((0, 1), (2, 3)), (4, 5), 6


def can_use_tiles(layout: Layout, num_in: int) -> bool:
    """Return whether tiles multiply rows of so many columns."""
    if not layout.is_interleaved or layout.grid is not None or not has_tiles():
        return False
    num_groups, rest = divmod(num_in // COLUMNS, LANES)
    num_tiles = LANES * (num_groups + rest.bit_count())
    is_worth_it = num_groups > 0 and num_tiles <= _MOST_TILES * (num_in // COLUMNS)
    return not rest or (is_worth_it and rest % 2 == 0 and layout.part == COLUMNS)


@kernel("tiled rounding", RoundingTask)
def tiled_rounding_kernel(code: Code, rounding: Rounding) -> None:
    """Round activations for `tiled_product_kernel`. Units: rows."""
    has_many = _has_many(code)
    with code.when(has_many < 1):
        write_rounding(code, rounding)
    with code.when(has_many > 0):
        _write_tiled_rounding(code, rounding)


class TiledProductTask(BlockProductTask):
    """A product whose units are whole tiles; `few` is the kernel for fewer rows than TILE_ROWS."""

    few: Kernel[BlockProductTask]


@kernel("tiled product", TiledProductTask)
def tiled_product_kernel(code: Code, layout: Layout, has_bias: bool) -> None:
    """Multiply with a matrix that `can_use_tiles`, for any number of rows. Units: chunks."""
    has_many = _has_many(code)
    with code.when(has_many < 1):
        code.run_kernel(code.task.few, code.address, code.step, code.unit)
    with code.when(has_many > 0):
        _Product(code, layout, has_bias).write()


def _has_many(code: Code) -> Value:
    """Return 1 if there are rows enough for a tile, else 0: both kernels decide alike."""
    return code.header(Header.NUM_ROWS) // TILE_ROWS


# Activations


def _write_tiled_rounding(code: Code, rounding: Rounding) -> None:
    """Write a row: high bytes, then low ones; in each the runs, and in a run lane after lane."""
    count = code.task.num_blocks
    start = code.task.x + code.unit * count * row_bytes(COLUMNS, rounding)
    num_groups = count // LANES
    with code.loop(0, num_groups, _RUN) as run:
        of_run = code.least(code.whole(_RUN), num_groups - run)
        with code.loop(0, of_run) as group, code.loop(0, LANES) as lane:
            index = code.unit * count + ((run + group) * LANES + lane)
            at = (run * LANES + lane * of_run + group) * COLUMNS
            for part, numbers in enumerate(_rounded_bytes(code, index, rounding)):
                code.store(numbers, start, count * (COLUMNS * part) + at)
    for first, size in _each_rest(code, count):
        index = code.unit * count + first
        blocks = [_rounded_bytes(code, index + number, rounding) for number in range(size)]
        words = COLUMNS // rounding.word
        columns = [
            (place % size) * COLUMNS + place // size * rounding.word + byte
            for lane in range(LANES)
            for place in range(lane, words * size, LANES)
            for byte in range(rounding.word)
        ]
        for part, of_blocks in enumerate(zip(*blocks, strict=True)):
            at = count * (COLUMNS * part) + first * COLUMNS
            code.store(code.picked(code.chain(of_blocks), columns), start, at)


def _each_rest(code: Code, num_blocks: Value) -> Iterator[tuple[Value, int]]:
    """Write what is done with the groups behind those of LANES: their first blocks, and sizes."""
    first = num_blocks // LANES * LANES
    for size in _RESTS:
        with code.when(num_blocks // size % 2 > 0):
            yield first, size
        first = num_blocks // size * size


def _rounded_bytes(code: Code, index: Value, rounding: Rounding) -> list[Value]:
    """Round a block; return the parts of its levels in bytes."""
    levels, kind = round_block(code, index, rounding), ir.VectorType(I8, COLUMNS)
    return [code.convert("trunc", part, kind) for part in _bytes_of(code, levels, rounding)]


def _bytes_of(code: Code, levels: Value, rounding: Rounding) -> list[Value]:
    if rounding.has_8_bits:
        return [levels]
    shift = constant(8, levels.type)
    return [Value(code, code.builder.ashr(levels.raw, shift)), levels]


# Products


@dataclass(frozen=True, slots=True)
class _Run:
    """Groups of a row that are multiplied at once, `num_groups` of `size` blocks from `first` on.

    Of a group of fewer than LANES blocks, lane `n` has columns of the block `n` modulo its size.
    """

    first: Value
    num_groups: Value
    size: int = LANES


class _Product:
    """Parts are blocks, or halves of blocks that have two scales, or what a lane has of a block."""

    def __init__(self, code: Code, layout: Layout, has_bias: bool) -> None:
        self._code = code
        self._layout = layout
        self._has_bias = has_bias
        self._parts = 1 if layout.rounding.has_8_bits else 2
        self._halves = COLUMNS // layout.part
        self._num_blocks = code.task.num_blocks
        self._num_groups = self._num_blocks // LANES
        self._row_bytes = self._num_blocks * row_bytes(COLUMNS, layout.rounding)
        tiles = LANES * _RUN
        self._weights = code.room(tiles * _TILE_BYTES)
        self._scales = code.room(tiles * self._halves * _LINE)
        minimum_bytes = tiles * self._halves * _LINE
        self._minimums = code.room(minimum_bytes) if layout.has_minimums else None
        self._sums = code.room(_SLAB * LANES * _LINE)
        turned_bytes = max(LANES * layout.block_bytes // 4 * _LINE, TILE_ROWS * _RESTS[0] * COLUMNS)
        self._turned = code.room(turned_bytes)
        self._has_rests = not layout.are_groups_whole and layout.part == COLUMNS
        self._whole_bytes = self._parts * TILE_ROWS * _LINE
        self._whole = code.room(2 * self._whole_bytes)

    def write(self) -> None:
        code = self._code
        start = code.unit * code.task.chunk
        end = code.least(start + code.task.chunk, code.task.num_out)
        num_rows = code.header(Header.NUM_ROWS)
        self._configure()
        with code.loop(0, num_rows, _SLAB) as slab:
            # The last tile of rows, and the last slab, begin where there are enough rows.
            last = code.least(slab + _SLAB, num_rows)
            first = code.least(slab, last - TILE_ROWS)
            with code.loop(start, end, TILE_ROWS) as out:
                self._write_outputs(out, end, first, last)
        code.call("llvm.x86.tilerelease", _VOID)

    def _configure(self) -> None:
        """Say how many rows and bytes each tile has."""
        code, columns = self._code, self._layout.part
        room = code.room(_LINE)
        code.store(Value(code, constant(0, ir.VectorType(I64, 8))), room, 0)
        code.store(Value(code, constant(1, I8)), room, 0)  # the palette
        sizes = {_WEIGHTS: (columns // 4, _LINE)}
        sizes |= dict.fromkeys((*_SUMS[0], *_SUMS[1]), (TILE_ROWS, _LINE))
        sizes |= dict.fromkeys(_X, (TILE_ROWS, columns))
        for tile, (rows, num_bytes) in sizes.items():
            code.store(Value(code, constant(num_bytes, I16)), room, 16 + 2 * tile)
            code.store(Value(code, constant(rows, I8)), room, 48 + tile)
        code.call("llvm.x86.ldtilecfg", _VOID, self._pointer(room))

    def _write_outputs(self, out: Value, end: Value, first: Value, last: Value) -> None:
        """Write the outputs of TILE_ROWS rows of weights from `out` on, of the rows of a slab."""
        code = self._code
        # Beyond the end the last row is multiplied again, and not stored.
        rows = [
            WeightRow(code, self._layout, code.least(out + number, end - 1))
            for number in range(TILE_ROWS)
        ]
        with code.loop(0, self._num_groups, _RUN) as start:
            run = _Run(start * LANES, code.least(code.whole(_RUN), self._num_groups - start))
            with code.loop(0, run.num_groups) as group:
                self._turn(rows, run.first + group * LANES, group, run.num_groups)
            self._add_run(run, first, last)
        if self._has_rests:
            for start, size in _each_rest(code, self._num_blocks):
                run = _Run(start, code.whole(1), size)
                self._turn_rest(rows, run)
                self._add_run(run, first, last)
        with code.loop(first, last, TILE_ROWS) as at:
            self._store(out, end, code.least(at, last - TILE_ROWS), at - first)

    def _sums_of(self, at: Value, lane: Value) -> Value:
        """Return the address of the sums of a tile of rows, `at` of the slab: a line for a row."""
        return self._sums + (at * LANES + lane * TILE_ROWS) * _LINE

    # Weights

    def _turn(
        self, rows: Sequence[WeightRow], index: Value, group: Value, num_groups: Value
    ) -> None:
        """Write the tiles and the factors of a group of blocks, each at its place in the run."""
        code = self._code
        tiles = [group + num_groups * lane for lane in range(LANES)]
        for half in range(self._halves):
            scales = [row.scales_of_group(index, LANES, half) for row in rows]
            places = [tile * self._halves + half for tile in tiles]
            self._store_lanes(scales, self._scales, places)
            if self._minimums is not None:
                minimums = [row.minimums_of_group(index, LANES, half) for row in rows]
                self._store_lanes(minimums, self._minimums, places)
        if self._layout.has_planes:
            self._turn_planes(rows, index, tiles)
            return
        # A loop, for of a longer run of instructions LLVM keeps too many vectors at once.
        group_bytes = LANES * self._layout.block_bytes
        store = self._store_of_4_bits if self._layout.bits == 4 else self._store_of_8_bits
        with code.loop(0, group_bytes // _SQUARE_BYTES) as number:
            at = index * self._layout.block_bytes + number * _SQUARE_BYTES
            words = [code.load(row.levels_at, at, _VECTOR_I) for row in rows]
            store(transposed(code, words), tiles, number * 2)

    def _turn_planes(self, rows: Sequence[WeightRow], index: Value, tiles: Sequence[Value]) -> None:
        """Turn the bytes of planes, a line of all rows for each word, and then read the levels."""
        code, layout = self._code, self._layout
        words = LANES * layout.block_bytes // 4
        turned = self._turned
        with code.loop(0, words, TILE_ROWS // 2) as number:
            at = index * layout.block_bytes + number * 4
            halves = [code.load(row.levels_at, at, I32S) for row in rows]
            joined = [code.joined(*two) for two in zip(halves[:LANES], halves[LANES:], strict=True)]
            for lane, line in enumerate(transposed(code, joined)):
                code.store(line, turned, (number + lane) * _LINE)
        turns = PLANES[layout.bits][0]
        for pair in range(LANES // 2):
            with code.loop(0, turns) as turn:
                for word in range(0, LANES, turns):
                    one, other = (
                        self._levels_at(turned, turn, word, lane)
                        for lane in (pair, pair + LANES // 2)
                    )
                    self._store_pair(one, other, tiles, turn + word, pair)

    def _levels_at(self, turned: Value, turn: Value, word: int, lane: int) -> Value:
        """Return the levels of the word `turn` + `word` of columns, words of 32 bits for all rows.

        A word of the bytes has 2 columns of each of 2 neighbouring blocks.
        """
        code, total, low, start = self._code, None, 0, 0
        turns = PLANES[self._layout.bits][0]
        for bits in PLANES[self._layout.bits]:
            number = turn if bits == turns else turn & (bits - 1)
            data = code.load(turned, (number * LANES + (start + lane)) * _LINE, _VECTOR_B)
            part = bits_at(code, data, bits, word, low, turn & -bits if bits < turns else None)
            total = part if total is None else total | part
            low, start = low + bits, start + bits * LANES
        assert total is not None
        return code.as_bits(signed(code, self._layout, total), _VECTOR_I)

    def _turn_rest(self, rows: Sequence[WeightRow], run: _Run) -> None:
        """Write the tiles and the factors of a smaller group."""
        code, size, room = self._code, run.size, self._turned
        tiles = [code.whole(lane) for lane in range(LANES)]
        blocks = [lane % size for lane in range(LANES)]
        scales = [code.picked(row.scales_of_group(run.first, size, 0), blocks) for row in rows]
        self._store_lanes(scales, self._scales, tiles)
        if self._minimums is not None:
            zeros, lanes = code.floats(0.0, size), [min(lane, size) for lane in range(LANES)]
            minimums = [
                code.shuffled(row.minimums_of_group(run.first, size, 0), zeros, lanes)
                for row in rows
            ]
            self._store_lanes(minimums, self._minimums, tiles)
        num_bytes, word = size * COLUMNS, self._layout.rounding.word
        order = [
            place * word + byte
            for lane in range(LANES)
            for place in range(lane, num_bytes // word, LANES)
            for byte in range(word)
        ]
        for number, row in enumerate(rows):
            levels = row.bytes_of_group(run.first, size)
            code.store(code.picked(levels, order), room, number * num_bytes)
        no_word = Value(code, constant(0, _VECTOR_I))
        for start in range(0, num_bytes, _LINE):
            words = [
                code.load(room, number * num_bytes + start, _VECTOR_I)
                for number in range(TILE_ROWS)
            ]
            for number, word_of_rows in enumerate(transposed(code, words)):
                lane, line = divmod(start // 4 + number, size)
                code.store(word_of_rows, self._weights, lane * _TILE_BYTES + line * _LINE)
        for lane in range(LANES):
            for line in range(size, LANES):
                code.store(no_word, self._weights, lane * _TILE_BYTES + line * _LINE)

    def _store_lanes(self, factors: Sequence[Value], room: Value, places: Sequence[Value]) -> None:
        """Store the rows' factors for each block of a group side by side."""
        half = TILE_ROWS // 2
        joined = [
            self._code.joined(*two) for two in zip(factors[:half], factors[half:], strict=True)
        ]
        vectors = transposed(self._code, joined)
        for place, vector in zip(places, vectors, strict=True):
            self._code.store(vector, room, place * _LINE)

    def _store_of_4_bits(self, words: Sequence[Value], tiles: Sequence[Value], row: Value) -> None:
        """Store words of 8 columns: 4 in the low bits of bytes, and 4 that are 16 behind those."""
        for number, word in enumerate(words):
            at, tile = row + number // LANES, tiles[number % LANES]
            self._store_word(word & 0x0F0F0F0F, tile, at)
            self._store_word((word >> 4) & 0x0F0F0F0F, tile, at + COLUMNS // 8)

    def _store_of_8_bits(self, words: Sequence[Value], tiles: Sequence[Value], row: Value) -> None:
        """Store words of 2 columns of 2 neighbouring blocks each."""
        pairs = LANES // 2
        for number in range(0, len(words), 2 * pairs):
            at = row + number // (2 * pairs)
            for pair in range(pairs):
                one, other = words[number + pair], words[number + pair + pairs]
                self._store_pair(one, other, tiles, at, pair)

    def _store_pair(
        self, one: Value, other: Value, tiles: Sequence[Value], row: Value, pair: int
    ) -> None:
        """Store columns 0 and 1, and 2 and 3, of word `row` of the two blocks of a pair."""
        even, odd = tiles[2 * pair : 2 * pair + 2]
        self._store_word((one & 0xFFFF) | (other << 16), even, row)
        self._store_word((one >> 16) | (other & -(1 << 16)), odd, row)

    def _store_word(self, word: Value, tile: Value, row: Value) -> None:
        """Store 4 columns of all rows; levels of 4 bits without minimums are 8 too high."""
        if self._layout.is_centred:
            kind = ir.VectorType(I8, _LINE)
            word = self._code.as_bits(self._code.as_bits(word, kind) - CENTRE, word.type)
        self._code.store(word, self._weights, tile * _TILE_BYTES + row * _LINE)

    # Sums

    def _add_run(self, run: _Run, first: Value, last: Value) -> None:
        """Add the products of a run's groups to the sums of all rows of a slab."""
        code = self._code
        with code.loop(first, last, TILE_ROWS) as at:
            sums = self._sums_of(at - first, code.whole(0))
            self._add_to_tile(run, code.least(at, last - TILE_ROWS), sums)

    def _add_to_tile(self, run: _Run, x_row: Value, sums: Value) -> None:
        """Add them to the sums of a tile of rows, lane after lane."""
        code = self._code
        x = code.task.x + x_row * self._row_bytes + run.first * COLUMNS
        of_lane = run.num_groups * self._halves
        count = of_lane * LANES
        totals = [code.variable(code.floats(0.0, TILE_ROWS)) for _ in range(TILE_ROWS)]
        lane, left = code.variable(code.whole(0)), code.variable(of_lane)
        self._load_totals(totals, sums, run)
        # A tile's sums are 50 cycles late, and so is what is stored of a tile: two parts are under
        # way while the sums of the part before them are added.
        self._multiply(run, x, code.whole(0), 0)
        self._multiply(run, x, code.whole(1), 1)
        self._keep(0)
        with code.loop(0, count, 2) as even:
            for side in (0, 1):
                part = even + side
                with code.when(part + 2 < count):
                    self._multiply(run, x, part + 2, side)
                with code.when(part + 1 < count):
                    self._keep(1 - side)
                number = of_lane - left.get()  # of the part in its lane
                self._add_part(run, totals, part, x_row, number, lane.get(), side)
                left.set(left.get() - 1)
                with code.when(left.get() < 1):
                    of_sums = sums + lane.get() * (TILE_ROWS * _LINE)
                    for row, total in enumerate(totals):
                        code.store(total.get(), of_sums, row * _LINE)
                    lane.set(lane.get() + 1)
                    left.set(of_lane)
                    with code.when(lane.get() < LANES):
                        self._load_totals(totals, of_sums + TILE_ROWS * _LINE, run)

    def _load_totals(self, totals: Sequence[Variable], sums: Value, run: _Run) -> None:
        """Begin with the sums of the runs before, or zeros."""
        code = self._code
        for row, total in enumerate(totals):
            before = code.load(sums, row * _LINE, _VECTOR_F)
            total.set(code.select(run.first > 0, before, code.floats(0.0, TILE_ROWS)))

    def _multiply(self, run: _Run, x: Value, part: Value, side: int) -> None:
        """Multiply a part of TILE_ROWS rows of activations with that of as many of weights."""
        columns = self._layout.part
        step = columns * run.size // LANES  # what is read behind it is multiplied with zeros
        # A product right behind the zeros of its tile waits for the one before.
        for number in range(self._parts):
            self._call_tile("llvm.x86.tilezero", _SUMS[side][number])
        weights = self._weights + part * (columns * TILE_ROWS)
        self._load_tile(_WEIGHTS, weights, self._code.whole(_LINE))
        for number in range(self._parts):
            at = part * step + self._num_blocks * (COLUMNS * number)
            self._load_tile(_X[number], x + at, self._row_bytes)
        for number in range(self._parts):
            product = "llvm.x86.tdpbusd" if number else "llvm.x86.tdpbssd"  # low bytes are unsigned
            self._call_tile(product, _SUMS[side][number], _X[number], _WEIGHTS)

    def _keep(self, side: int) -> None:
        """Store the whole sums of a side."""
        for number in range(self._parts):
            room = self._whole + (side * self._whole_bytes + number * (TILE_ROWS * _LINE))
            self._store_tile(_SUMS[side][number], room)

    def _add_part(
        self,
        run: _Run,
        totals: Sequence[Variable],
        part: Value,
        x_row: Value,
        number: Value,
        lane: Value,
        side: int,
    ) -> None:
        """Add the sums of a part's products, the one of this number in its lane, with its scales.

        Of a smaller group, sums of levels that are CENTRE too high begin at what takes this away.
        """
        code, layout = self._code, self._layout
        block = run.first + number // self._halves * LANES + lane % run.size
        scales = code.load(self._scales, part * _LINE, _VECTOR_F)
        room = self._whole + side * self._whole_bytes
        has_starts = layout.is_centred and run.size < LANES
        for row, total in enumerate(totals):
            whole = code.load(room, row * _LINE, _VECTOR_I)
            if self._parts == 2:
                low = code.load(room, (TILE_ROWS + row) * _LINE, _VECTOR_I)
                whole = (whole << 8) + low
            if has_starts:
                start = self._of_block(code.task.x_starts, x_row + row, block, I32)
                zeros = Value(code, constant(0, _VECTOR_I))
                whole = whole + code.select(lane < run.size, start, zeros)
            x_scale = self._of_block(code.task.x_scales, x_row + row, block)
            floats = code.convert("sitofp", whole, _VECTOR_F)
            total.set(total.get() + floats * (scales * x_scale))
        if self._minimums is not None:
            minimums = code.load(self._minimums, part * _LINE, _VECTOR_F)
            for row, total in enumerate(totals):
                if layout.has_minimums_of_parts:
                    at = (x_row + row) * self._num_blocks + block
                    half = code.load(code.task.x_starts, (at * 2 + number % 2) * 4, I32)
                    x_sum = code.spread(code.convert("sitofp", half, F32), TILE_ROWS)
                    x_scale = self._of_block(code.task.x_scales, x_row + row, block)
                    total.set(total.get() + x_sum * (minimums * x_scale))
                else:
                    x_sum = self._of_block(code.task.x_sums, x_row + row, block)
                    total.set(total.get() + minimums * x_sum)

    def _of_block(self, factors: Value, x_row: Value, block: Value, kind: Any = F32) -> Value:
        """Return a factor of a row's block in all lanes."""
        code = self._code
        at = (x_row * self._num_blocks + block) * 4
        return code.spread(code.load(factors, at, kind), TILE_ROWS)

    def _store(self, out: Value, end: Value, x_row: Value, at: Value) -> None:
        """Add up the lanes of a tile's sums, and store the outputs."""
        code = self._code
        with code.loop(0, TILE_ROWS) as number:
            lanes = [
                code.load(self._sums_of(at, code.whole(lane)), number * _LINE, _VECTOR_F)
                for lane in range(LANES)
            ]
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
            target = code.task.out + (x_row + number) * code.task.out_stride
            for place in range(TILE_ROWS):
                with code.when(out + place < end):
                    value = code.lane(lanes[0], place)
                    if self._has_bias:
                        value = value + code.load(code.task.bias, (out + place) * 4, F32)
                    code.store(value, target, (out + place) * 4)

    # Instructions

    def _pointer(self, address: Value) -> Value:
        return Value(self._code, self._code.builder.inttoptr(address.raw, _POINTER))

    def _call_tile(self, name: str, *tiles: int) -> None:
        self._code.call(name, _VOID, *(self._tile(tile) for tile in tiles))

    def _load_tile(self, tile: int, address: Value, stride: Value) -> None:
        operands = self._tile(tile), self._pointer(address), stride
        self._code.call("llvm.x86.tileloadd64", _VOID, *operands)

    def _store_tile(self, tile: int, address: Value) -> None:
        stride = self._code.whole(_LINE)
        operands = self._tile(tile), self._pointer(address), stride
        self._code.call("llvm.x86.tilestored64", _VOID, *operands)

    def _tile(self, number: int) -> Value:
        return Value(self._code, constant(number, I8))
