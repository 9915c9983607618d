"""Products of rows with block weights on a CPU: compiled code, run on torch's threads.

The code takes its work through one array of 64-bit numbers, so a call from Python is one call of a
C function. It runs in torch's own OpenMP threads (`GOMP_parallel`): a second pool of threads would
compete with the first. Threads take chunks of rows from a counter, so that a thread beside a busy
neighbour takes fewer.

Products of many rows unpack the weights by tiles, for torch's matrix product.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, dequantised
from kvchat_kernels.linear.task import NUM_PLACES, Place

_log = logging.getLogger(__name__)

# With more rows than this, unpacking once for a matrix product is faster than a pass for each.
FEW_ROWS = 16
# Below this many weights a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 16
# A tile of unpacked weights that stays in a core's second cache.
_TILE_BYTES = 1 << 20
# As in the compiled code: the largest level of an activation, and the least that a block's largest
# value counts as.
_MOST, _LEAST = 32767.0, 1e-30

Run = Callable[[Any, int], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Activation rows in 16 bits, in blocks of 32 columns.

    levels          int16 [num_rows, in]
    scales, sums    float32 [num_rows, in / 32]; a sum is that of a block's levels times its scale
    """

    levels: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    def __len__(self) -> int:
        return len(self.levels)

    def values(self) -> torch.Tensor:
        """Return what the levels stand for, float32 [num_rows, in]."""
        blocks = self.levels.view(*self.scales.shape, COLUMNS) * self.scales[..., None]
        return blocks.view(self.levels.shape)


class BlockProduct:
    """Multiplies rows with one block matrix, which it keeps. Thread-safe."""

    def __init__(self, weights: BlockWeights) -> None:
        self.weights = weights
        self._run = _code("product_code", weights.layout)
        self._unpack = _code("unpacking_code", weights.layout)
        task = np.zeros(NUM_PLACES, np.int64)
        task[Place.NUM_OUT] = weights.num_out
        task[Place.NUM_BLOCKS] = weights.num_in // COLUMNS
        task[Place.LEVELS] = weights.levels.data_ptr()
        task[Place.SCALES] = weights.scales.data_ptr()
        if weights.minimums is not None:
            task[Place.MINIMUMS] = weights.minimums.data_ptr()
        self._task = task

    def __deepcopy__(self, memo: object) -> "BlockProduct":
        return self  # nothing ever changes it

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return rows @ weights.T, float32 [num_rows, out]."""
        num_rows = len(rows)
        if num_rows > FEW_ROWS or self._run is None:
            return self._multiply_unpacked(rows.values())
        out = torch.empty(num_rows, self.weights.num_out)
        task = self._task.copy()
        task[Place.NUM_ROWS] = num_rows
        task[Place.X] = rows.levels.data_ptr()
        task[Place.X_SCALES] = rows.scales.data_ptr()
        task[Place.X_SUMS] = rows.sums.data_ptr()
        task[Place.OUT] = out.data_ptr()
        self._run(task, self._num_threads(self.weights.num_out * num_rows))
        return out

    def _num_threads(self, num_rows: int) -> int:
        """Return how many threads pay; `num_rows` times the columns is the work."""
        worth = num_rows * self.weights.num_in // _WEIGHTS_PER_THREAD
        return min(torch.get_num_threads(), max(1, worth))

    def _multiply_unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [num_rows, in] float32 times the weights, unpacked tile by tile."""
        weights = self.weights
        out = x.new_empty(len(x), weights.num_out)
        step = max(1, _TILE_BYTES // (4 * weights.num_in))
        room = x.new_empty(min(step, weights.num_out), weights.num_in)
        for start in range(0, weights.num_out, step):
            end = min(start + step, weights.num_out)
            tile = self._unpacked(start, end, room[: end - start])
            torch.mm(x, tile.t(), out=out[:, start:end])
        return out

    def _unpacked(self, start: int, end: int, room: torch.Tensor) -> torch.Tensor:
        """Return rows [`start`, `end`) of the weights in float32; `room` may hold them."""
        if self._unpack is None:
            return dequantised(self.weights.rows(start, end))
        task = self._task.copy()
        task[Place.NEXT], task[Place.NUM_OUT] = start, end
        task[Place.OUT] = room.data_ptr() - start * self.weights.num_in * 4
        self._unpack(task, self._num_threads(end - start))
        return room

    def unpack(self, out: torch.Tensor) -> None:
        """Write the whole matrix to `out` [out, in], of any floating dtype, tile by tile."""
        weights = self.weights
        step = max(1, _TILE_BYTES // (4 * weights.num_in))
        room = torch.empty(min(step, weights.num_out), weights.num_in)
        for start in range(0, weights.num_out, step):
            end = min(start + step, weights.num_out)
            out[start:end] = self._unpacked(start, end, room[: end - start])


def rows_of(x: torch.Tensor) -> Rows:
    """Round activation rows x [num_rows, in] float32 to 16 bits; `in` is a multiple of 32."""
    x = x.contiguous()
    num_rows, num_in = x.shape
    round_rows = _code("rounding_code")
    if round_rows is None:
        return _rounded_plainly(x)
    levels = torch.empty(num_rows, num_in, dtype=torch.int16)
    scales, sums = torch.empty(2, num_rows, num_in // COLUMNS).unbind()
    task = np.zeros(NUM_PLACES, np.int64)
    task[Place.NUM_BLOCKS] = scales.numel()
    task[Place.OUT] = x.data_ptr()
    task[Place.X] = levels.data_ptr()
    task[Place.X_SCALES] = scales.data_ptr()
    task[Place.X_SUMS] = sums.data_ptr()
    round_rows(task, 1)
    return Rows(levels, scales, sums)


def _rounded_plainly(x: torch.Tensor) -> Rows:
    blocks = x.view(len(x), -1, COLUMNS)
    largest = blocks.abs().amax(dim=-1).clamp_(min=_LEAST)
    levels = (blocks * (_MOST / largest)[..., None]).round_()
    scales = largest / _MOST
    sums = levels.sum(dim=-1) * scales
    return Rows(levels.to(torch.int16).view(x.shape), scales, sums)


# Running compiled code


@cache
def _code(name: str, *layout: Any) -> Run | None:
    """Return what runs a task on a number of threads; None where nothing can be compiled."""
    try:
        from kvchat_kernels.linear import machine_code

        code = getattr(machine_code, name)(*layout)
    except (ImportError, RuntimeError) as error:  # llvmlite raises RuntimeError for its own faults
        _log.warning("low-bit weights are multiplied without compiled code: %s", error)
        return None
    address, parallel = ctypes.cast(code, ctypes.c_void_p).value, _parallel()

    def run(task: Any, num_threads: int) -> None:
        if num_threads == 1 or parallel is None:
            code(task.ctypes.data)
        else:
            parallel(address, task.ctypes.data, num_threads, 0)

    return run


@cache
def _parallel() -> Any:
    """Return GNU OpenMP's function that runs a C function on threads, of torch's own library.

    None where torch has another OpenMP; then one thread does the work.
    """
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not bundled:
        return None
    function = ctypes.CDLL(str(bundled[0])).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function
