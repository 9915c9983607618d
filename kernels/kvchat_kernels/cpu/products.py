"""Products of few rows with a float matrix [out, in], which is read once for all rows.

A unit is a chunk of the matrix' rows, read as four runs of memory side by side: one row of each run
at a time is multiplied with up to five rows of activations, so that each loaded vector is used
several times and the sums do not wait for each other. Every product of two rows has a sum of its
own, so a row's result does not depend on the rows beside it.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Kernel, Value, Variable
from kvchat_kernels.cpu.maths import Stored, load_floats
from kvchat_kernels.cpu.step import Header

# Rows of weights and of activations that are multiplied together. Of weights it is half as many
# beside more than _FEW_X rows, so that all sums stay in 16 registers.
WEIGHT_ROWS = 4
_X_COUNTS = (5, 3, 2, 1)
_FEW_X = 3
# Rows of activations that all of a unit's weights are multiplied with before the next: both stay in
# the second cache.
_SLAB = 64
# Bytes ahead that weights are asked for.
_AHEAD = 1024
# A unit's weights: long enough runs of memory for the processor to read ahead in, but a matrix that
# is small has several units too, which threads share.
_MOST_BYTES, _LEAST_BYTES, _UNITS = 1 << 18, 1 << 15, 8
# The number of columns is a multiple, which is what a cache line holds of 16-bit weights.
COLUMNS = 32


class Place(IntEnum):
    """The task of a product: addresses, and sizes in rows and columns. Strides are in bytes.

    X, X_STRIDE      float32 [rows, in]
    OUT, OUT_STRIDE  float32 [rows, out], may lie in a wider matrix
    BIAS             float32 [out], 0 for none
    CHUNK            rows of the matrix of a unit
    """

    WEIGHTS = 0
    NUM_OUT = 1
    NUM_IN = 2
    X = 3
    X_STRIDE = 4
    OUT = 5
    OUT_STRIDE = 6
    BIAS = 7
    CHUNK = 8


def unit_rows(num_out: int, row_bytes: int) -> int:
    """Return how many rows of a matrix a unit has."""
    num_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, num_out * row_bytes // _UNITS))
    rows = max(WEIGHT_ROWS, num_bytes // row_bytes // WEIGHT_ROWS * WEIGHT_ROWS)
    return min(rows, -(-num_out // WEIGHT_ROWS) * WEIGHT_ROWS)


@cache
def product_kernel(stored: Stored, has_bias: bool) -> Kernel:
    """Return the kernel for weights stored so."""
    return Kernel(
        "product", (stored, has_bias), lambda code: _Product(code, stored, has_bias).write()
    )


def write_tiles(
    code: Code,
    start: Value,
    end: Value,
    x_counts: Sequence[int],
    write_tile: Callable[[Sequence[Value], Sequence[Value]], None],
    few_x: int = _FEW_X,
) -> None:
    """Write the products of the rows [`start`, `end`) of a matrix with all rows of activations.

    `write_tile` writes those of some rows of weights with some of activations, as many as one of
    `x_counts`, of which the last is 1. Beside more than `few_x` rows it gets half of WEIGHT_ROWS.
    """
    num_rows = code.header(Header.NUM_ROWS)
    with code.loop(0, num_rows, _SLAB) as first_x:
        last_x = code.least(first_x + _SLAB, num_rows)
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


_Places = Sequence[Value]
_Sums = Sequence[Sequence[Variable]]


class _Product:
    def __init__(self, code: Code, stored: Stored, has_bias: bool) -> None:
        self._code = code
        self._stored = stored
        self._has_bias = has_bias
        self._num_in = code.field(Place.NUM_IN)
        self._row_bytes = self._num_in * stored.num_bytes
        self._weights, self._x = code.field(Place.WEIGHTS), code.field(Place.X)
        self._x_stride = code.field(Place.X_STRIDE)
        self._out, self._out_stride = code.field(Place.OUT), code.field(Place.OUT_STRIDE)

    def write(self) -> None:
        code = self._code
        start = code.unit * code.field(Place.CHUNK)
        end = code.least(start + code.field(Place.CHUNK), code.field(Place.NUM_OUT))
        write_tiles(code, start, end, _X_COUNTS, self._write_tile)

    def _write_tile(self, rows: Sequence[Value], x_rows: Sequence[Value]) -> None:
        code = self._code
        weights = [self._weights + row * self._row_bytes for row in rows]
        activations = [self._x + x_row * self._x_stride for x_row in x_rows]
        sums = [[code.variable(code.floats(0.0)) for _ in activations] for _ in weights]
        columns = 64 // self._stored.num_bytes
        with code.loop(0, self._num_in, columns) as column:
            for address in weights:
                code.prefetch(address, column * self._stored.num_bytes + _AHEAD)
            for start in range(0, columns, LANES):
                self._add_columns(weights, activations, sums, column + start)
        for row, of_row in zip(rows, sums, strict=True):
            for x_row, total in zip(x_rows, of_row, strict=True):
                self._store(code.total(total.get()), row, x_row)

    def _add_columns(self, weights: _Places, activations: _Places, sums: _Sums, at: Value) -> None:
        """Add the products of 8 columns from `at` on.

        Of weights and activations, the fewer are loaded first and stay in registers.
        """
        code, stored = self._code, self._stored
        offset = at * stored.num_bytes
        if len(weights) < len(activations):
            rows = [load_floats(code, row, offset, stored) for row in weights]
            for number, x_row in enumerate(activations):
                x = code.load(x_row, at * 4, F32S)
                for row, of_row in zip(rows, sums, strict=True):
                    of_row[number].set(of_row[number].get() + row * x)
        else:
            xs = [code.load(x_row, at * 4, F32S) for x_row in activations]
            for address, of_row in zip(weights, sums, strict=True):
                row = load_floats(code, address, offset, stored)
                for x, total in zip(xs, of_row, strict=True):
                    total.set(total.get() + row * x)

    def _store(self, value: Value, row: Value, x_row: Value) -> None:
        code = self._code
        if self._has_bias:
            value = value + code.load(code.field(Place.BIAS), row * 4, F32)
        code.store(value, self._out, x_row * self._out_stride + row * 4)
