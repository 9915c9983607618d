"""Products of rows with one matrix on a CPU, by compiled kernels.

BlockProduct multiplies with block weights, FloatProduct with a float matrix. torch multiplies many
rows with floats where it has instructions for them, and all rows where nothing can be compiled:
then blocks are unpacked tile by tile.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from kvchat_kernels.cpu_products import is_fast_by_torch, linear_of_few_sizes
from kvchat_kernels.linear.blocks import (
    COLUMNS,
    BlockWeights,
    Rounding,
    dequantised,
    interleaved,
    made_of_bytes,
    part_bytes,
    quantised_on,
)
from kvchat_kernels.linear.gguf_blocks import block_weights, empty_weights
from kvchat_kernels.linear.rows import Rows, empty_rows, rounded_plainly

_log = logging.getLogger(__name__)

# Few rows: a mixture's experts and a float matrix are multiplied with so many one by one.
FEW_ROWS = 16
# Below this many weights a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 16
# A tile of unpacked blocks that stays in a core's second cache.
_TILE_BYTES = 1 << 20
# Elements of a matrix that are copied at once to be rounded.
_ROUNDED_AT_ONCE = 1 << 22
# Rows of a unit where a matrix is unpacked.
_UNPACKED_ROWS = 16


class BlockProduct:
    """Multiplies rows with one block matrix, which it keeps interleaved. Thread-safe.

    Activations are rounded first, of one row as of many: so a history that was read and one that
    was answered are the same numbers.
    """

    def __init__(self, weights: BlockWeights) -> None:
        self.weights = weights if weights.is_interleaved else interleaved(weights)
        self._kernels = _kernels()

    def __deepcopy__(self, memo: object) -> "BlockProduct":
        return self  # nothing changes it once it multiplies

    def round_coarsely(self) -> None:
        """Round activations to 8 bits beside weights of 4 from now on; before the first product."""
        self.weights = replace(self.weights, is_coarse=self.weights.bits == 4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [num_rows, in] float32 @ weights.T, float32 [num_rows, out]."""
        return self.of_rows(rows_of(x, self.weights.layout.rounding))

    def of_rows(self, rows: Rows) -> torch.Tensor:
        """Return the product of rounded rows."""
        if self._kernels is None:
            return self._by_torch(rows.values())
        out = torch.empty(len(rows), self.weights.num_out, dtype=torch.float32)
        self._kernels.multiply_blocks(self.weights, rows, out)
        return out

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with weights that are unpacked tile by tile."""
        out = x.new_empty(len(x), self.weights.num_out)
        for start, end, tile in _tiles(self.weights, self._kernels):
            torch.mm(x, tile.t(), out=out[:, start:end])
        return out


def unpack(weights: BlockWeights, out: torch.Tensor) -> None:
    """Write a matrix that is not interleaved to `out` [out, in], of any floating dtype."""
    assert not weights.is_interleaved
    for start, end, tile in _tiles(weights, _kernels()):
        out[start:end] = tile


def read_blocks(data: torch.Tensor, name: str, is_interleaved: bool = False) -> BlockWeights:
    """Return `block_weights(data, name)` of rows as a file stores them, of a format that it has.

    Compiled code reads them once, by torch's threads. `data` is uint8 [out, bytes of a row].
    """
    kernels = _kernels()
    if kernels is not None and data.is_contiguous():
        out = empty_weights(len(data), data.shape[1], name)
        kernels.read_blocks(data, name, out, is_interleaved)
        return replace(out, is_interleaved=is_interleaved)
    plain = block_weights(data, name)
    assert plain is not None, "the format has a layout"
    return interleaved(plain) if is_interleaved else plain


def _tiles(
    weights: BlockWeights, kernels: "_Kernels | None"
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield runs of rows, [start, end), and their weights in float32, valid until the next.

    Compiled code unpacks weights that are not interleaved.
    """
    step = max(1, _TILE_BYTES // (4 * weights.num_in))
    room = torch.empty(min(step, weights.num_out), weights.num_in, dtype=torch.float32)
    for start in range(0, weights.num_out, step):
        end = min(start + step, weights.num_out)
        if kernels is None:
            yield start, end, dequantised(weights.rows(start, end))
        else:
            tile = room[: end - start]
            kernels.unpack_blocks(weights, start, end, tile)
            yield start, end, tile


def rounded(weight: torch.Tensor, bits: int, out: BlockWeights | None = None) -> BlockWeights:
    """Round a float matrix [out, in] to 8 or 4 bits as `quantised` does, interleaved.

    Columns of zeros fill the last block of a row. The matrix is read once, by torch's threads;
    where its rows do not lie as compiled code reads them, a tile at a time is copied. `out`, of
    `made_of_bytes`, is written and returned if given.
    """
    num_out, missing = len(weight), -weight.shape[1] % COLUMNS
    num_in = weight.shape[1] + missing
    if out is None:
        room = torch.empty(sum(part_bytes(num_out, num_in, bits)), dtype=torch.uint8)
        out = made_of_bytes(room, num_out, num_in, bits)
    kernels = _kernels()
    if kernels is None or not kernels.rounds(weight.dtype):
        padded = pad(weight, [0, missing])
        plain = interleaved(quantised_on(padded, bits, weight.device))
        for name, part in out.parts().items():
            part.copy_(plain.parts()[name])
        return out
    is_as_read = weight.is_contiguous() and not missing
    step = num_out if is_as_read else max(1, _ROUNDED_AT_ONCE // num_in)
    for start in range(0, num_out, step):
        tile = weight[start : start + step]
        tile = tile if is_as_read else pad(tile, [0, missing]).contiguous()
        kernels.round_blocks(tile, out.rows(start, start + len(tile)))
    return out


class FloatProduct:
    """Multiplies rows with one float matrix [out, in] of any dtype, which stays the caller's."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self._float_bias = None if bias is None else bias.float()
        self._kernels = _kernels() if weight.is_contiguous() else None
        self._multiplies = is_fast_by_torch(weight.dtype)

    def __deepcopy__(self, memo: object) -> "FloatProduct":
        return self  # nothing ever changes it

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in] times the weights plus the bias, in x's dtype."""
        num_out, num_in = self._weight.shape
        num_rows = x.numel() // num_in
        kernels = self._kernels if num_in % COLUMNS == 0 else None
        is_torchs = self._multiplies and num_rows > FEW_ROWS and x.dtype == self._weight.dtype
        if kernels is None or is_torchs:
            bias = None if self._bias is None else self._bias.to(x.dtype)
            return linear_of_few_sizes(x, self._weight.to(x.dtype), bias)
        rows = x.reshape(num_rows, num_in).float().contiguous()
        out = torch.empty(num_rows, num_out, dtype=torch.float32)
        kernels.multiply_floats(self._weight, self._float_bias, rows, out)
        return out.to(x.dtype).view(*x.shape[:-1], num_out)


def rows_of(x: torch.Tensor, rounding: Rounding) -> Rows:
    """Round activation rows x [num_rows, in] float32; `in` is a multiple of 32."""
    x = x.contiguous()
    kernels = _kernels()
    if kernels is None:
        return rounded_plainly(x, rounding)
    rows = empty_rows(len(x), x.shape[1], rounding)
    kernels.round_rows(x, rows)
    return rows


@cache
def _kernels() -> "_Kernels | None":
    """Return what runs compiled kernels; None, logged once, where nothing can be compiled."""
    try:
        return _Kernels()
    except (ImportError, RuntimeError) as error:  # llvmlite raises RuntimeError for its own faults
        _log.warning("weights are multiplied without compiled code: %s", error)
        return None


class _Kernels:
    """Runs one kernel at a time; importing llvmlite waits until one is needed."""

    def __init__(self) -> None:
        from kvchat_kernels.cpu import block_reading, block_rounding, block_rows, matrix_products
        from kvchat_kernels.cpu.maths import stored_as
        from kvchat_kernels.cpu.products import unit_rows
        from kvchat_kernels.cpu.program import Operation, run_units
        from kvchat_kernels.cpu.step import NUM_HEADERS, Header

        self._rows, self._products = block_rows, matrix_products
        self._rounding, self._reading = block_rounding, block_reading
        self._stored_as, self._unit_rows = stored_as, unit_rows
        self._operation, self._run_units = Operation, run_units
        self._header: Any = np.zeros(NUM_HEADERS, np.int64)
        self._num_rows = Header.NUM_ROWS
        block_rows.rounding_kernel(Rounding.SHORT)  # raises what compiling raises

    def multiply_blocks(self, weights: BlockWeights, rows: Rows, out: torch.Tensor) -> None:
        product = self._products.block_product(weights, rows, out)
        self._multiply(product, len(rows), weights.num_out * weights.num_in)

    def multiply_floats(
        self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        product = self._products.float_product(weight, x, out, bias=bias)
        self._multiply(product, len(x), weight.numel())

    def _multiply(self, product: Any, num_rows: int, num_weights: int) -> None:
        self._run(product.kernel, product.task, product.num_units, num_rows * num_weights, num_rows)

    def unpack_blocks(self, weights: BlockWeights, start: int, end: int, out: torch.Tensor) -> None:
        task = self._rows.UnpackingTask(
            num_out=end,
            num_blocks=weights.num_in // COLUMNS,
            **weights.parts(),
            out=out,
            first=start,
            chunk=_UNPACKED_ROWS,
        )
        num_units = -(-(end - start) // _UNPACKED_ROWS)
        kernel = self._rows.unpacking_kernel(weights.layout)
        self._run(kernel, task, num_units, (end - start) * weights.num_in)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether `round_blocks` takes matrices of this dtype."""
        return self._stored_as(dtype) is not None

    def round_blocks(self, weight: torch.Tensor, out: BlockWeights) -> None:
        """Round a contiguous matrix of whole blocks, and write it to `out`, interleaved."""
        num_out, num_in = weight.shape
        stored = self._stored_as(weight.dtype)
        assert stored is not None, weight.dtype
        chunk = self._unit_rows(num_out, num_in * weight.itemsize)
        task = self._rounding.WeightRoundingTask(
            num_out=num_out,
            num_blocks=num_in // COLUMNS,
            floats=weight,
            **out.parts(),
            chunk=chunk,
        )
        kernel = self._rounding.weight_rounding_kernel(out.bits, stored)
        self._run(kernel, task, -(-num_out // chunk), weight.numel())

    def read_blocks(
        self, data: torch.Tensor, name: str, out: BlockWeights, is_interleaved: bool
    ) -> None:
        """Read contiguous rows of a format of GGUF, and write them to the parts of `out`."""
        chunk = self._unit_rows(out.num_out, data.shape[1])
        task = self._reading.ReadingTask(
            num_out=out.num_out,
            num_blocks=out.num_in // COLUMNS,
            stored=data,
            **out.parts(),
            chunk=chunk,
        )
        kernel = self._reading.block_reading_kernel(name, is_interleaved)
        self._run(kernel, task, -(-out.num_out // chunk), out.num_out * out.num_in)

    def round_rows(self, x: torch.Tensor, rows: Rows) -> None:
        kernel, task = self._products.rounding(x, rows)
        self._run(kernel, task, len(x), x.numel())

    def _run(
        self, kernel: Any, task: Any, num_units: int, num_weights: int, num_rows: int = 1
    ) -> None:
        """Run a kernel on as many threads as its work pays for."""
        header = self._header.copy()
        header[self._num_rows] = num_rows
        worth = max(1, num_weights // _WEIGHTS_PER_THREAD)
        operation = self._operation(kernel, task, header, None)
        self._run_units(operation, num_units, min(torch.get_num_threads(), worth))
