"""Products of rows with one matrix on a CPU, by compiled kernels.

BlockProduct multiplies with block weights, FloatProduct with a float matrix. torch multiplies many
rows with floats where it has instructions for them, and all rows where nothing can be compiled:
then blocks are unpacked tile by tile.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from kvchat_kernels.cpu_products import is_fast_by_torch, linear_of_few_sizes
from kvchat_kernels.linear.blocks import (
    CENTRE,
    COLUMNS,
    BlockWeights,
    Rounding,
    alternating,
    dequantised,
    in_order,
    interleaved,
    made_of_bytes,
    part_bytes,
    quantised_on,
)
from kvchat_kernels.linear.gguf_blocks import block_weights, empty_weights

_log = logging.getLogger(__name__)

# Few rows: a mixture's experts and a float matrix are multiplied with so many one by one.
FEW_ROWS = 16
# Below this many weights a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 16
# A tile of unpacked blocks that stays in a core's second cache.
_TILE_BYTES = 1 << 20
# Elements of a matrix that are copied at once to be rounded.
_ROUNDED_AT_ONCE = 1 << 22
# The least that a block's largest value counts as, as in the compiled code.
_LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class Rows:
    """Activation rows in blocks of 32 columns.

    levels          int16 or int8 [num_rows, parts, in], whose blocks alternate as `alternating`
                    has them; of two parts, a level is 256 * the first + the second
    scales, sums    float32 [num_rows, in / 32]; a sum is that of a block's levels times its scale
    starts          int32 [num_rows, in / 32], in bytes: that of the levels times -CENTRE
    """

    rounding: Rounding
    levels: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    starts: torch.Tensor

    def __len__(self) -> int:
        return len(self.levels)

    def values(self) -> torch.Tensor:
        """Return what the levels stand for, float32 [num_rows, in]."""
        return (self.whole_levels() * self.scales[..., None]).view(len(self), -1)

    def whole_levels(self) -> torch.Tensor:
        """Return the levels in order, int32 [num_rows, in / 32, 32]."""
        word = self.rounding.word
        first, *second = (in_order(part, COLUMNS, word).int() for part in self.levels.unbind(1))
        return first * 256 + second[0] if second else first


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
    num_rows, num_in = x.shape
    kernels = _kernels()
    if kernels is None:
        return _rounded_plainly(x, rounding)
    dtype = torch.int16 if rounding is Rounding.SHORT else torch.int8
    levels = torch.empty(num_rows, rounding.num_parts, num_in, dtype=dtype)
    scales, sums = torch.empty(2, num_rows, num_in // COLUMNS, dtype=torch.float32).unbind()
    rows = Rows(rounding, levels, scales, sums, torch.empty(scales.shape, dtype=torch.int32))
    kernels.round_rows(x, rows)
    return rows


def _rounded_plainly(x: torch.Tensor, rounding: Rounding) -> Rows:
    blocks = x.view(len(x), -1, COLUMNS)
    largest = blocks.abs().amax(dim=-1).clamp_(min=_LEAST)
    levels = (blocks * (rounding.most / largest)[..., None]).round_().int()
    scales = largest / rounding.most
    totals = levels.sum(dim=-1, dtype=torch.int32)
    high = (levels + 128) >> 8
    parts = (high, levels - high * 256) if rounding is Rounding.BYTES else (levels,)
    dtype = torch.int16 if rounding is Rounding.SHORT else torch.int8
    stored = torch.stack([alternating(part.to(dtype), rounding.word) for part in parts], 1)
    return Rows(rounding, stored, scales, totals * scales, totals * -CENTRE)


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
        from kvchat_kernels.cpu import (
            block_products,
            block_reading,
            block_rounding,
            block_rows,
            products,
        )
        from kvchat_kernels.cpu.maths import stored_as
        from kvchat_kernels.cpu.program import Operation, run_units
        from kvchat_kernels.cpu.step import NUM_HEADERS

        self._blocks, self._rows, self._floats = block_products, block_rows, products
        self._rounding, self._reading = block_rounding, block_reading
        self._stored_as = stored_as
        self._operation: Callable[..., Any] = Operation
        self._run_units = run_units
        self._num_headers = NUM_HEADERS
        block_rows.rounding_kernel(Rounding.SHORT)  # raises what compiling raises

    def multiply_blocks(self, weights: BlockWeights, rows: Rows, out: torch.Tensor) -> None:
        place = self._rows.Place
        task = self._block_task(weights)
        task[place.X] = rows.levels.data_ptr()
        task[place.X_SCALES] = rows.scales.data_ptr()
        task[place.X_SUMS] = rows.sums.data_ptr()
        task[place.X_STARTS] = rows.starts.data_ptr()
        task[place.OUT] = out.data_ptr()
        task[place.OUT_STRIDE] = out.stride(0) * 4
        chunk = self._floats.unit_rows(weights.num_out, weights.num_in * weights.bits // 8)
        task[place.CHUNK] = chunk
        kernel = self._blocks.block_product_kernel(weights.layout, False)
        self._run(kernel, task, len(rows), weights.num_out, chunk, weights.num_in)

    def unpack_blocks(self, weights: BlockWeights, start: int, end: int, out: torch.Tensor) -> None:
        place = self._rows.Place
        task = self._block_task(weights)
        task[place.FIRST], task[place.NUM_OUT] = start, end
        task[place.OUT] = out.data_ptr()
        chunk = task[place.CHUNK] = 16
        kernel = self._rows.unpacking_kernel(weights.layout)
        self._run(kernel, task, 1, end - start, chunk, weights.num_in)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether `round_blocks` takes matrices of this dtype."""
        return self._stored_as(dtype) is not None

    def round_blocks(self, weight: torch.Tensor, out: BlockWeights) -> None:
        """Round a contiguous matrix of whole blocks, and write it to `out`, interleaved."""
        place = self._rounding.Place
        num_out, num_in = weight.shape
        task = np.zeros(self._rounding.NUM_PLACES, np.int64)
        task[place.NUM_OUT], task[place.NUM_BLOCKS] = num_out, num_in // COLUMNS
        task[place.FLOATS] = weight.data_ptr()
        task[place.LEVELS] = out.levels.data_ptr()
        task[place.SCALES] = out.scales.data_ptr()
        task[place.MINIMUMS] = 0 if out.minimums is None else out.minimums.data_ptr()
        chunk = task[place.CHUNK] = self._floats.unit_rows(num_out, num_in * weight.itemsize)
        kernel = self._rounding.weight_rounding_kernel(out.bits, self._stored_as(weight.dtype))
        self._run(kernel, task, 1, num_out, chunk, num_in)

    def read_blocks(
        self, data: torch.Tensor, name: str, out: BlockWeights, is_interleaved: bool
    ) -> None:
        """Read contiguous rows of a format of GGUF, and write them to the parts of `out`."""
        place = self._reading.Place
        task = np.zeros(self._reading.NUM_PLACES, np.int64)
        task[place.NUM_OUT], task[place.NUM_BLOCKS] = out.num_out, out.num_in // COLUMNS
        task[place.STORED] = data.data_ptr()
        for key, part in out.parts().items():
            task[place[key.upper()]] = part.data_ptr()
        chunk = task[place.CHUNK] = self._floats.unit_rows(out.num_out, data.shape[1])
        kernel = self._reading.block_reading_kernel(name, is_interleaved)
        self._run(kernel, task, 1, out.num_out, chunk, out.num_in)

    def round_rows(self, x: torch.Tensor, rows: Rows) -> None:
        place = self._rows.Place
        task = np.zeros(self._rows.NUM_PLACES, np.int64)
        task[place.NUM_BLOCKS] = x.shape[1] // COLUMNS
        task[place.FLOATS] = x.data_ptr()
        task[place.X] = rows.levels.data_ptr()
        task[place.X_SCALES] = rows.scales.data_ptr()
        task[place.X_SUMS] = rows.sums.data_ptr()
        task[place.X_STARTS] = rows.starts.data_ptr()
        self._run(self._rows.rounding_kernel(rows.rounding), task, 1, len(x), 1, x.shape[1])

    def multiply_floats(
        self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        place = self._floats.Place
        num_out, num_in = weight.shape
        task = np.zeros(self._rows.NUM_PLACES, np.int64)
        task[place.WEIGHTS] = weight.data_ptr()
        task[place.NUM_OUT], task[place.NUM_IN] = num_out, num_in
        task[place.X], task[place.X_STRIDE] = x.data_ptr(), num_in * 4
        task[place.OUT], task[place.OUT_STRIDE] = out.data_ptr(), num_out * 4
        task[place.BIAS] = 0 if bias is None else bias.data_ptr()
        chunk = task[place.CHUNK] = self._floats.unit_rows(num_out, num_in * weight.itemsize)
        stored = self._stored_as(weight.dtype)
        assert stored is not None
        kernel = self._floats.product_kernel(stored, bias is not None)
        self._run(kernel, task, len(x), num_out, chunk, num_in)

    def _block_task(self, weights: BlockWeights) -> Any:
        place = self._rows.Place
        task = np.zeros(self._rows.NUM_PLACES, np.int64)
        task[place.NUM_OUT] = weights.num_out
        task[place.NUM_BLOCKS] = weights.num_in // COLUMNS
        task[place.LEVELS] = weights.levels.data_ptr()
        task[place.SCALES] = weights.scales.data_ptr()
        if weights.minimums is not None:
            task[place.MINIMUMS] = weights.minimums.data_ptr()
        if weights.steps is not None:
            task[place.STEPS] = weights.steps.data_ptr()
        return task

    def _run(
        self, kernel: Any, task: Any, num_rows: int, num_out: int, chunk: int, num_in: int
    ) -> None:
        """Run a kernel on as many threads as its work pays for."""
        header = np.zeros(self._num_headers, np.int64)
        header[0] = num_rows
        worth = max(1, num_rows * num_out * num_in // _WEIGHTS_PER_THREAD)
        operation = self._operation(kernel, task, header, None)
        num_threads = min(torch.get_num_threads(), worth)
        self._run_units(operation, -(-num_out // chunk), num_threads)
