"""Products of rows with one matrix on a CPU, by compiled kernels.

BlockProduct multiplies with block weights, FloatProduct with a float matrix. torch multiplies many
rows with floats where it has instructions for them, and all rows where nothing can be compiled:
then blocks are unpacked tile by tile.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from kvchat_kernels.cpu_products import compiled_calls, is_fast_by_torch, linear_of_few_sizes
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

# Few rows: a mixture's experts and a float matrix are multiplied with so many one by one.
FEW_ROWS = 16
# A tile of unpacked blocks that stays in a core's second cache.
_TILE_BYTES = 1 << 20
# Stored bytes of a matrix that are read before `on_read` is told.
_BYTES_AT_ONCE = 1 << 24
# Elements of a matrix that are copied at once to be rounded.
_ROUNDED_AT_ONCE = 1 << 22


class BlockProduct:
    """Multiplies rows with one block matrix, which it keeps interleaved. Thread-safe.

    Activations are rounded first, of one row as of many: so a history that was read and one that
    was answered are the same numbers.
    """

    def __init__(self, weights: BlockWeights) -> None:
        is_as_read = weights.is_interleaved or weights.are_floats
        self.weights = weights if is_as_read else interleaved(weights, rounding_beside(weights))
        self._kernels = compiled_calls()

    def __deepcopy__(self, memo: object) -> "BlockProduct":
        return self  # nothing changes it once it multiplies

    def round_coarsely(self) -> None:
        """Round activations to 8 bits from now on; before the first product.

        Beside weights of 8 bits nothing changes. On a processor with tiles, or without products of
        bytes, only weights of 4 bits without codes have it: no kernel is written for others.
        """
        layout = self.weights.layout
        if layout.are_nibbles:
            self.weights = replace(self.weights, rounding=Rounding.BYTE)
        elif layout.rounding is Rounding.HALVES and layout.has_planes:
            self.weights = replace(self.weights, rounding=Rounding.COARSE)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [num_rows, in] float32 @ weights.T, float32 [num_rows, out]."""
        if self.weights.are_floats:
            return self._of_floats(x.contiguous())
        return self.of_rows(self.rounded(x))

    def rounded(self, x: torch.Tensor) -> Rows:
        """Round rows [num_rows, in] float32 as this matrix multiplies so many."""
        own, kernels = self.weights.layout.rounding, self._kernels
        rounding = own if kernels is None else kernels.rounding_of(self.weights, len(x))
        return rows_of(x, rounding)

    def of_rows(self, rows: Rows) -> torch.Tensor:
        """Return the product of rounded rows."""
        if self._kernels is None:
            return self._by_torch(rows.values())
        out = torch.empty(len(rows), self.weights.num_out, dtype=torch.float32)
        self._kernels.multiply_blocks(self.weights, rows, out)
        return out

    def _of_floats(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of rows that are not rounded."""
        if self._kernels is None:
            return self._by_torch(x)
        out = torch.empty(len(x), self.weights.num_out, dtype=torch.float32)
        self._kernels.multiply_floats(self.weights, None, x, out)
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
    for start, end, tile in _tiles(weights, compiled_calls()):
        out[start:end] = tile


def read_blocks(
    data: torch.Tensor,
    name: str,
    is_interleaved: bool = False,
    on_read: Callable[[int], None] | None = None,
) -> BlockWeights:
    """Return `block_weights(data, name)` of rows as a file stores them, of a format that it has.

    Compiled code reads them once, by torch's threads. `data` is uint8 [out, bytes of a row].
    `on_read` is called with the number of the first rows that are not read any more, several times.
    """
    kernels = compiled_calls()
    if kernels is not None and data.is_contiguous():
        out = empty_weights(len(data), data.shape[1], name)
        if is_interleaved:
            out = replace(out, is_interleaved=True, rounding=rounding_beside(out))
        step = max(1, _BYTES_AT_ONCE // data.shape[1])
        for start in range(0, len(data), step):
            end = min(start + step, len(data))
            kernels.read_blocks(data[start:end], name, out.rows(start, end))
            if on_read is not None:
                on_read(end)
        return out
    plain = block_weights(data, name)
    assert plain is not None, "the format has a layout"
    return interleaved(plain) if is_interleaved else plain


def rounding_beside(weights: BlockWeights) -> Rounding:
    """Return how activations are rounded beside block weights on this processor.

    Where a processor multiplies bytes four at a time, levels of other bits than 4 are bytes too.
    """
    kernels = compiled_calls()
    is_short = weights.layout.rounding is Rounding.SHORT
    if kernels is None or not is_short or not kernels.multiplies_bytes():
        return weights.layout.rounding
    return Rounding.HALVES


def _tiles(weights: BlockWeights, kernels: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
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
    kernels = compiled_calls()
    if kernels is None or not kernels.takes_floats(weight.dtype):
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
        self._kernels = compiled_calls() if weight.is_contiguous() else None
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
    kernels = compiled_calls()
    if kernels is None:
        return rounded_plainly(x, rounding)
    rows = empty_rows(len(x), x.shape[1], rounding)
    kernels.round_rows(x, rows)
    return rows
