"""A few rows of a block matrix in float32, such as those of a step's tokens in a table, by numpy.

torch's operators for one row take 0.3 ms of a decode step: between two steps all code that they
run leaves the processor's caches. `dequantised` is the plain twin, and for many rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvchat_kernels.linear.block_order import in_order
from kvchat_kernels.linear.blocks import (
    CENTRE,
    COLUMNS,
    PLANES,
    STEP_COLUMNS,
    BlockWeights,
)
from kvchat_kernels.linear.grids import numbers_of, scales_of

Array = np.ndarray[Any, Any]

_DTYPES = frozenset((torch.float16, torch.float32, torch.int8, torch.uint8))


def can_read(weights: BlockWeights) -> bool:
    """Whether `TableRows` reads a matrix: it is on the host, and numpy has its dtypes."""
    is_known = weights.scales.dtype in _DTYPES and not weights.are_floats
    return is_known and weights.device.type == "cpu"


class TableRows:
    """Reads rows of a matrix that it `can_read`; shares its memory."""

    def __init__(self, weights: BlockWeights) -> None:
        self._weights = weights
        self._parts = {name: part.numpy() for name, part in weights.parts().items()}
        self._planes = () if weights.grid is not None else tuple(_planes(weights))
        self._codes = None if weights.codes is None else np.array(weights.codes, np.float32)

    def write(self, rows: Array, out: Array) -> None:
        """Write rows, int64 [num_rows], to `out`, float32 [num_rows, in].

        Raises IndexError for a row that is not there; those below zero count from the end.
        """
        weights = self._weights
        parts = {name: part.take(rows, 0) for name, part in self._parts.items()}
        if weights.grid is not None:
            records = parts["levels"].reshape(-1, weights.grid.num_bytes)
            scales = scales_of(records, weights.grid).reshape(len(rows), -1)
            steps = parts["scales"][..., None]
            parts = {"levels": numbers_of(records, weights.grid), "scales": scales, "steps": steps}
        scales, minimums = self._factors(parts)
        blocks = out.reshape(len(out), -1, weights.block)
        blocks[:] = self._levels(parts["levels"]).reshape(blocks.shape)
        if weights.zero:
            blocks -= np.float32(weights.zero)
        blocks *= scales[..., None]
        if minimums is not None:
            blocks += minimums[..., None]

    def _levels(self, stored: Array) -> Array:
        if not self._planes:
            return stored
        first, *others = (plane.read(stored) for plane in self._planes)
        for other in others:
            first |= other
        return first if self._codes is None else self._codes.take(first)

    def _factors(self, parts: dict[str, Array]) -> tuple[Array, Array | None]:
        """Return scales and minimums as `scales_and_minimums` does, by the same operations."""
        weights, scales, minimums = self._weights, parts["scales"], parts.get("minimums")
        if scales.dtype == np.uint8:
            scales, minimums = scales & 15, scales >> 4
        scales = scales.astype(np.float32)
        minimums = None if minimums is None else minimums.astype(np.float32)
        if "steps" in parts:
            each = parts["steps"].astype(np.float32).repeat(STEP_COLUMNS // weights.block, 1)
            scales = scales * each[..., 0]
            minimums = None if minimums is None else minimums * each[..., 1]
        if weights.unit != 1:
            scales = scales * np.float32(weights.unit)
        if weights.layout.is_centred:
            minimums = scales * np.float32(-CENTRE)
        return scales, minimums


@dataclass(frozen=True, slots=True)
class _Plane:
    """Some bits of all levels of a row: the bytes they are in, and how far these are shifted."""

    at: Array
    shifts: Array
    bits: int
    low: int

    def read(self, stored: Array) -> Array:
        """Return the bits of rows [num_rows, bytes] at their places: [num_rows, blocks, 32]."""
        data = stored.take(self.at, 1)
        if self.bits == 8:
            return data
        data >>= self.shifts
        data &= np.uint8((1 << self.bits) - 1)
        data <<= np.uint8(self.low)
        return data


def _planes(weights: BlockWeights) -> Iterator[_Plane]:
    """Yield the planes of a matrix, whose blocks may alternate."""
    width = weights.layout.block_bytes
    places = torch.arange(weights.levels.shape[1])[None]
    if weights.is_interleaved:
        places = in_order(places, width, weights.layout.rounding.word)
    places = places.view(-1, width)
    low = start = 0
    for bits in PLANES[weights.bits]:
        at = places[:, start : start + 4 * bits].repeat(1, 8 // bits)
        shifts = np.repeat(np.arange(0, 8, bits, dtype=np.uint8), 4 * bits)
        assert at.shape[1] == len(shifts) == COLUMNS
        yield _Plane(at.numpy(), shifts, bits, low)
        low, start = low + bits, start + 4 * bits
