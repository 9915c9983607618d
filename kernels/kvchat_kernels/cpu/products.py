"""Products of rows with a float matrix [out, in], which is read once for all rows, or for 64.

A unit is a chunk of the matrix' rows, read as four runs of memory side by side: one row of each run
at a time is multiplied with up to five rows of activations, so that each loaded vector is used
several times and the sums do not wait for each other. Every product of two rows has a sum of its
own, so a row's result does not depend on the rows beside it. Beside many rows of activations a tile
of weights is converted to float32 first, and each sum takes its products in the same order.
"""

from collections.abc import Callable, Sequence
from functools import cache

from llvmlite import ir

from kvchat_kernels.cpu.code import F32, I8, LANES, Code, Kernel, Value, Variable
from kvchat_kernels.cpu.features import has_512_bits
from kvchat_kernels.cpu.maths import Stored, from_e4m3_by_256, load_floats, load_stored
from kvchat_kernels.cpu.races import NUM_IN, NUM_OUT, is_second_faster
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import FLOAT_COLUMNS

# Rows of weights and of activations that are multiplied together. Of weights it is half as many
# beside more than _FEW_X rows, so that all sums stay in 16 registers.
WEIGHT_ROWS = 4
_X_COUNTS = (5, 3, 2, 1)
_FEW_X = 3
# Rows of activations that all of a unit's weights are multiplied with before the next: both stay in
# the second cache.
_SLAB = 64
# From so many rows on weights are converted first, a tile of some rows and _RUN columns at a time,
# which lies in the first cache, and multiplied with so many rows of activations at once that all
# sums stay in registers: there are 32 of 512 bits, and 16 of 256.
_WIDE_MANY_X, _WIDE_COUNTS, _WIDE_TILE_ROWS = 6, (6, 2, 1), 12
_MANY_X, _COUNTS, _TILE_ROWS = 24, (3, 2, 1), 8
_RUN = 512
# A unit's weights: long enough runs of memory for the processor to read ahead in, but a matrix that
# is small has several units too, which threads share.
_MOST_BYTES, _LEAST_BYTES, _UNITS = 1 << 18, 1 << 15, 8
# The number of columns is a multiple, which is what a cache line holds of 16-bit weights.
COLUMNS = 32


class ProductTask(Task):
    """A product: sizes are in rows and columns, strides in bytes.

    scales           of floats of 8 bits, float32 [out, in / FLOAT_COLUMNS]
    x, x_stride      float32 [rows, in]
    out, out_stride  float32 [rows, out], may lie in a wider matrix
    bias             float32 [out]
    chunk            rows of the matrix of a unit
    """

    weights: Memory
    num_out: int
    num_in: int
    scales: Memory | None = None
    x: Memory
    x_stride: int
    out: Memory
    out_stride: int
    bias: Memory | None = None
    chunk: int


def unit_rows(num_out: int, row_bytes: int) -> int:
    """Return how many rows of a matrix a unit has."""
    num_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, num_out * row_bytes // _UNITS))
    rows = max(WEIGHT_ROWS, num_bytes // row_bytes // WEIGHT_ROWS * WEIGHT_ROWS)
    return min(rows, -(-num_out // WEIGHT_ROWS) * WEIGHT_ROWS)


@cache
def product_kernel(stored: Stored, has_bias: bool) -> Kernel[ProductTask]:
    """Return the kernel for weights stored so."""
    forms = (stored, has_bias, are_wide_floats_faster(stored))
    return Kernel("product", ProductTask, forms, lambda code: _Product(code, *forms).write())


@cache
def are_wide_floats_faster(stored: Stored) -> bool:
    """Return whether products of floats are faster in vectors of 512 bits."""
    strides = {"x_stride": 4 * NUM_IN, "out_stride": 4 * NUM_OUT}
    sizes = {"num_out": NUM_OUT, "num_in": NUM_IN, "chunk": NUM_OUT, **strides}

    def write(code: Code, is_wide: bool) -> None:
        _Product(code, stored, False, is_wide).write_many(*code.chunk(code.task.num_out))

    task = (ProductTask, sizes)
    return has_512_bits() and is_second_faster("raced product", (stored,), write, task)


def write_tiles(
    code: Code,
    start: Value,
    end: Value,
    x_counts: Sequence[int],
    write_tile: Callable[[Sequence[Value], Sequence[Value]], None],
    few_x: int = _FEW_X,
    holds_x: bool = False,
) -> None:
    """Write the products of the rows [`start`, `end`) of a matrix with all rows of activations.

    `write_tile` writes those of some rows of weights with some of activations, as many as one of
    `x_counts`, of which the last is 1. WEIGHT_ROWS stay in the first cache while activations pass;
    beside more than `few_x` rows it gets half of them. `holds_x`: activations stay instead while
    all weights of the unit pass, which lie in the second cache, and it always gets WEIGHT_ROWS.
    """
    num_rows = code.header(Header.NUM_ROWS)
    with code.loop(0, num_rows, _SLAB) as first_x:
        last_x = code.least(first_x + _SLAB, num_rows)
        if holds_x:
            _write_slab_by_x(code, (start, end), (first_x, last_x), x_counts, write_tile)
        else:
            _write_slab(code, (start, end), (first_x, last_x), x_counts, write_tile, few_x)


def _write_slab(
    code: Code,
    weights: tuple[Value, Value],
    activations: tuple[Value, Value],
    x_counts: Sequence[int],
    write_tile: Callable[[Sequence[Value], Sequence[Value]], None],
    few_x: int,
) -> None:
    """Write the products of some rows of weights with some rows of activations."""
    (start, end), (first_x, last_x) = weights, activations
    quarter = (end - start) // WEIGHT_ROWS
    with code.loop(start, start + quarter) as row:
        rows = [row + quarter * i for i in range(WEIGHT_ROWS)]
        done = first_x
        for count in x_counts:
            tiled = done + (last_x - done) // count * count
            step = WEIGHT_ROWS if count <= few_x else WEIGHT_ROWS // 2
            with code.loop(done, tiled, count) as first:
                for at in range(0, WEIGHT_ROWS, step):
                    write_tile(rows[at : at + step], [first + i for i in range(count)])
            done = tiled
    with code.loop(start + quarter * WEIGHT_ROWS, end) as row, code.loop(first_x, last_x) as x_row:
        write_tile([row], [x_row])


def _write_slab_by_x(
    code: Code,
    weights: tuple[Value, Value],
    activations: tuple[Value, Value],
    x_counts: Sequence[int],
    write_tile: Callable[[Sequence[Value], Sequence[Value]], None],
) -> None:
    """Write the same with the loops exchanged."""
    (start, end), (done, last_x) = weights, activations
    quarter = (end - start) // WEIGHT_ROWS
    for count in x_counts:
        tiled = done + (last_x - done) // count * count
        with code.loop(done, tiled, count) as first, code.loop(start, start + quarter) as row:
            rows = [row + quarter * i for i in range(WEIGHT_ROWS)]
            write_tile(rows, [first + i for i in range(count)])
        done = tiled
    each = code.loop(activations[0], last_x), code.loop(start + quarter * WEIGHT_ROWS, end)
    with each[0] as x_row, each[1] as row:
        write_tile([row], [x_row])


_Places = Sequence[Value]
_Sums = Sequence[Sequence[Variable]]


class _Product:
    """Vectors have 16 lanes where the processor takes 512 bits at once, else 8."""

    def __init__(self, code: Code, stored: Stored, has_bias: bool, is_wide: bool) -> None:
        self._code = code
        self._stored = stored
        self._has_bias = has_bias
        self._is_wide = is_wide
        self._lanes = 2 * LANES if self._is_wide else LANES
        self._floats = ir.VectorType(F32, self._lanes)
        wide, narrow = (_WIDE_COUNTS, _WIDE_TILE_ROWS), (_COUNTS, _TILE_ROWS)
        self._counts, self._tile_rows = wide if self._is_wide else narrow
        self._num_in = code.task.num_in
        self._row_bytes = self._num_in * stored.num_bytes
        self._weights, self._x = code.task.weights, code.task.x
        self._x_stride = code.task.x_stride
        self._out, self._out_stride = code.task.out, code.task.out_stride

    def write(self) -> None:
        code = self._code
        start = code.unit * code.task.chunk
        end = code.least(start + code.task.chunk, code.task.num_out)
        num_rows = code.header(Header.NUM_ROWS)
        is_slow_to_convert = self._is_wide or self._stored is Stored.E4M3
        many_x = _WIDE_MANY_X if is_slow_to_convert else _MANY_X
        few_x = max(_X_COUNTS) if self._is_wide else _FEW_X
        with code.when(num_rows < many_x):
            write_tiles(code, start, end, _X_COUNTS, self._write_tile, few_x=few_x)
        with code.when(num_rows >= many_x):
            tiled = start + (end - start) // WEIGHT_ROWS * WEIGHT_ROWS
            self.write_many(start, tiled)
            with code.loop(tiled, end) as row, code.loop(0, num_rows) as x_row:
                self._write_tile([row], [x_row])

    # Few rows

    def _write_tile(self, rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        code = self._code
        weights = [self._weights + row * self._row_bytes for row in rows]
        activations = [self._x + x_row * self._x_stride for x_row in x_rows]
        sums = [[code.variable(self._zeros()) for _ in activations] for _ in weights]
        columns = 64 // self._stored.num_bytes
        with code.loop(0, self._num_in, columns) as column:
            factors = [self._factor(row, column) for row in rows]
            for start in range(0, columns, self._lanes):
                self._add_columns(weights, factors, activations, sums, column + start)
        for row, of_row in zip(rows, sums, strict=True):
            for x_row, total in zip(x_rows, of_row, strict=True):
                self._store(code.tree_total(total.get()), row, x_row)

    def _zeros(self) -> Value:
        return self._code.floats(0.0, self._lanes)

    def _factor(self, row: Value, column: Value) -> Value | None:
        """Load the scale of a run of a row's columns, times 256; None where there are none."""
        if self._stored is not Stored.E4M3:
            return None
        code = self._code
        place = row * (self._num_in // FLOAT_COLUMNS) + column // FLOAT_COLUMNS
        return code.spread(code.load(code.task.scales, place * 4, F32) * 256.0, self._lanes)

    def _loaded(self, address: Value, offset: Value, factor: Value | None) -> Value:
        """Load a vector of weights."""
        if factor is not None:
            loaded = self._code.load(address, offset, ir.VectorType(I8, self._lanes))
            return from_e4m3_by_256(self._code, loaded) * factor
        if self._is_wide:
            return load_stored(self._code, address, offset, self._stored, self._lanes)
        return load_floats(self._code, address, offset, self._stored)

    def _add_columns(
        self,
        weights: _Places,
        factors: Sequence[Value | None],
        activations: _Places,
        sums: _Sums,
        at: Value,
    ) -> None:
        """Add the products of a vector of columns from `at` on.

        Of weights and activations, the fewer are loaded first and stay in registers.
        """
        code = self._code
        offset = at * self._stored.num_bytes
        if len(weights) < len(activations):
            pairs = zip(weights, factors, strict=True)
            rows = [self._loaded(row, offset, factor) for row, factor in pairs]
            for number, x_row in enumerate(activations):
                x = code.load(x_row, at * 4, self._floats)
                for row, of_row in zip(rows, sums, strict=True):
                    of_row[number].set(of_row[number].get() + row * x)
        else:
            xs = [code.load(x_row, at * 4, self._floats) for x_row in activations]
            for address, factor, of_row in zip(weights, factors, sums, strict=True):
                row = self._loaded(address, offset, factor)
                for x, total in zip(xs, of_row, strict=True):
                    total.set(total.get() + row * x)

    def _store(self, value: Value, row: Value, x_row: Value) -> None:
        code = self._code
        if self._has_bias:
            value = value + code.load(code.task.bias, row * 4, F32)
        code.store(value, self._out, x_row * self._out_stride + row * 4)

    # Many rows

    def write_many(self, start: Value, end: Value) -> None:
        """Write the products of the rows [`start`, `end`) of the matrix, self._tile_rows at a time.

        These are converted once, _RUN columns of each, and multiplied with a slab of activations.
        Sums lie in memory between one run of columns and the next.
        """
        code = self._code
        num_rows = code.header(Header.NUM_ROWS)
        tile = code.room(self._tile_rows * _RUN * 4)
        sums = code.room(_SLAB * self._tile_rows * 4 * self._lanes)
        slabs = code.loop(0, num_rows, _SLAB)
        with slabs as first_x, code.loop(start, end, self._tile_rows) as first_row:
            last_x = code.least(first_x + _SLAB, num_rows)
            num_tiled = code.least(code.whole(self._tile_rows), end - first_row)

            def sums_of(x_row: Value, number: Value) -> Value:
                place = (x_row - first_x) * self._tile_rows + number
                return sums + place * (4 * self._lanes)

            with code.loop(0, self._num_in, _RUN) as first:
                columns = code.least(first + _RUN, self._num_in) - first
                with code.loop(0, num_tiled, WEIGHT_ROWS) as number:
                    self._convert(first_row + number, first, columns, tile + number * (_RUN * 4))
                done = first_x
                for count in self._counts:
                    tiled = done + (last_x - done) // count * count
                    each = code.loop(done, tiled, count), code.loop(0, num_tiled, WEIGHT_ROWS)
                    with each[0] as x_row, each[1] as number:
                        to = [sums_of(x_row + i, number) for i in range(count)]
                        of_rows = tile + number * (_RUN * 4)
                        self._add_run(x_row, first, columns, of_rows, to)
                    done = tiled
            each = code.loop(first_x, last_x), code.loop(0, num_tiled, WEIGHT_ROWS)
            with each[0] as x_row, each[1] as number:
                self._store_many(first_row + number, x_row, sums_of(x_row, number))

    def _convert(self, row: Value, first: Value, columns: Value, tile: Value) -> None:
        """Write some columns of WEIGHT_ROWS rows as float32, and ask for those of the next tile."""
        code, size = self._code, self._stored.num_bytes
        step = 64 // size
        rows = [
            self._weights + (row + number) * self._row_bytes + first * size
            for number in range(WEIGHT_ROWS)
        ]
        with code.loop(0, columns, step) as column:
            for number, address in enumerate(rows):
                factor = self._factor(row + number, first + column)
                ahead = column * size + self._row_bytes * self._tile_rows
                code.prefetch(address, ahead, to_second=True)
                for at in range(0, step, self._lanes):
                    values = self._loaded(address, (column + at) * size, factor)
                    code.store(values, tile, (column + (number * _RUN + at)) * 4)

    def _add_run(
        self, x_row: Value, first: Value, columns: Value, tile: Value, sums: _Places
    ) -> None:
        """Add the products of a run of columns with rows of activations to their `sums`."""
        code, size = self._code, 4 * self._lanes
        xs = [self._x + (x_row + i) * self._x_stride + first * 4 for i in range(len(sums))]
        places = [(at, number * size) for at in sums for number in range(WEIGHT_ROWS)]
        totals = []
        for place in places:
            before = code.load(*place, self._floats)
            totals.append(code.variable(code.select(first > 0, before, self._zeros())))
        with code.loop(0, columns, self._lanes) as column:
            self._add_vectors(xs, tile, column, totals)
        for total, place in zip(totals, places, strict=True):
            code.store(total.get(), *place)

    def _add_vectors(
        self, xs: _Places, tile: Value, column: Value, totals: Sequence[Variable]
    ) -> None:
        """Add the products of a vector of columns.

        The fewer of a full tile are loaded first and stay in registers: weights beside 6 rows of
        activations, those beside 4 of weights.
        """
        code = self._code

        def row(number: int) -> Value:
            return code.load(tile, column * 4 + number * (_RUN * 4), self._floats)

        if not self._is_wide:
            loaded = [code.load(address, column * 4, self._floats) for address in xs]
            for number in range(WEIGHT_ROWS):
                weights = row(number)
                for x, total in zip(loaded, totals[number::WEIGHT_ROWS], strict=True):
                    total.set(total.get() + weights * x)
        else:
            rows = [row(number) for number in range(WEIGHT_ROWS)]
            for number, address in enumerate(xs):
                x = code.load(address, column * 4, self._floats)
                for weights, total in zip(rows, totals[number * WEIGHT_ROWS :], strict=False):
                    total.set(total.get() + weights * x)

    def _store_many(self, row: Value, x_row: Value, sums: Value) -> None:
        code, size = self._code, 4 * self._lanes
        vectors = [code.load(sums, number * size, self._floats) for number in range(WEIGHT_ROWS)]
        values = code.tree_totals(vectors, self._lanes)
        if self._has_bias:
            values = values + code.load(code.task.bias, row * 4, values.type)
        code.store(values, self._out, x_row * self._out_stride + row * 4)
