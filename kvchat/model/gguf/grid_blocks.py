"""Blocks of GGUF files whose weights are points of a grid, as BlockWeights.

A grid has few different numbers: with their signs 16 at most. So a weight is a code of 3 or 4 bits
beside the scale of its block, exactly, which takes 1.2 to 2.1 times the bytes of the file: an index
into a grid stands for 4 or 8 weights there. TQ1_0 has 5 weights in a byte, and takes 2 bits here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvchat_kernels.linear.blocks import COLUMNS, STEP_COLUMNS, BlockWeights, in_planes, interleaved

# Weights whose floats are there at once.
_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True)
class _Grid:
    """A format of blocks of 256 columns.

    num_bytes  of a block
    codes      what weights are, as multiples of their scale, padded to 8 or 16
    scale      returns the byte and the lowest bit of the scale of a part
    bits       of a scale `s`, which counts as 2 * s + 1; 0: there is the step alone
    block      columns of a part
    unit       what scales are multiplied with
    step       returns the float16 [n, 1] that they are multiplied with, of stored blocks
    """

    num_bytes: int
    codes: tuple[int, ...]
    scale: Callable[[int], tuple[int, int]]
    bits: int
    block: int
    unit: float
    step: Callable[[torch.Tensor], torch.Tensor]


def _half_at(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks[:, start : start + 2].contiguous().view(torch.float16)


def _scattered_step(blocks: torch.Tensor) -> torch.Tensor:
    """Return the step of IQ1_M, of which each of four words has four bits."""
    words = blocks[:, 48:56].contiguous().view(torch.int16).int() & 0xFFFF
    bits = (words >> 12) << torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    return bits.sum(dim=1, keepdim=True).to(torch.int16).view(torch.float16)


def _nibbles(start: int) -> Callable[[int], tuple[int, int]]:
    return lambda part: (start + part // 2, 4 * (part % 2))


def _signed(*numbers: int) -> tuple[int, ...]:
    """Return numbers with both signs, padded with zeros to a power of two."""
    codes = [sign * number for number in numbers for sign in (1, -1)]
    return tuple(codes + [0] * (-len(codes) % 8))


_THREE = _signed(0x08, 0x19, 0x2B)
_EIGHTHS = _signed(1, 7, 9)  # -1, 0 and 1, moved by an eighth
_GRIDS = {
    "IQ3_S": _Grid(110, _signed(*range(1, 16, 2)), _nibbles(106), 4, COLUMNS, 1.0, _half_at(0)),
    "IQ3_XXS": _Grid(
        98,
        _signed(4, 12, 20, 28, 36, 44, 52, 62),
        lambda part: (69 + 4 * part, 4),
        4,
        COLUMNS,
        0.25,
        _half_at(0),
    ),
    "IQ2_S": _Grid(82, _THREE, _nibbles(74), 4, 16, 0.125, _half_at(0)),
    "IQ2_XS": _Grid(74, _THREE, _nibbles(66), 4, 16, 0.125, _half_at(0)),
    "IQ2_XXS": _Grid(66, _THREE, lambda part: (9 + 8 * part, 4), 4, COLUMNS, 0.125, _half_at(0)),
    "IQ1_S": _Grid(50, _EIGHTHS, lambda part: (35 + 2 * part, 4), 3, COLUMNS, 0.125, _half_at(0)),
    "IQ1_M": _Grid(
        56,
        _EIGHTHS,
        lambda part: (48 + 2 * (part // 4), 3 * (part % 4)),
        3,
        16,
        0.125,
        _scattered_step,
    ),
    "TQ1_0": _Grid(54, (-1, 0, 1, 2), lambda part: (0, 0), 0, STEP_COLUMNS, 1.0, _half_at(52)),
}
GRID_FORMATS = frozenset(_GRIDS)


def grid_bytes(num_bytes: int, name: str) -> int:
    """Return the bytes of memory of weights that take `num_bytes` in a file."""
    grid = _GRIDS[name]
    one = _tile(torch.zeros(1, grid.num_bytes, dtype=torch.uint8), name)
    return num_bytes // grid.num_bytes * one.num_bytes


def read_grids(data: torch.Tensor, name: str, pool: Any, is_interleaved: bool) -> BlockWeights:
    """Return the weights of stored rows [out, bytes of a row], uint8; `pool` has the threads."""
    grid = _GRIDS[name]
    num_in = data.shape[1] // grid.num_bytes * STEP_COLUMNS
    step = max(1, _AT_ONCE // num_in)

    def read(start: int) -> BlockWeights:
        tile = _tile(data[start : start + step], name)
        return interleaved(tile) if is_interleaved else tile

    whole: BlockWeights | None = None
    for start, tile in zip(
        range(0, len(data), step), pool.map(read, range(0, len(data), step)), strict=True
    ):
        if whole is None:
            whole = tile.changed(lambda part: part.new_empty(len(data), *part.shape[1:]))
        for key, part in whole.parts().items():
            part[start : start + step] = tile.parts()[key]
    assert whole is not None, "no rows"
    return replace(whole, is_interleaved=is_interleaved)


def _tile(data: torch.Tensor, name: str) -> BlockWeights:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    grid, num_out = _GRIDS[name], len(data)
    blocks = data.reshape(-1, grid.num_bytes)
    step = grid.step(blocks)
    scales = step if not grid.bits else _scales(blocks, grid)
    each = scales.float() if not grid.bits else scales.float() * step.float() * grid.unit
    stored = np.ascontiguousarray(data.numpy())
    values = torch.from_numpy(dequantize(stored, GGMLQuantizationType[name]))
    ratios = values.view(len(blocks), -1, grid.block) / each[..., None]
    table = torch.zeros(256, dtype=torch.uint8)
    # Of a scale of 0 any code will do.
    for level, code in reversed(list(enumerate(grid.codes))):
        table[code + 128] = level
    levels = table[(ratios.nan_to_num(0, 0, 0).round().long() + 128).clamp_(0, 255)]
    bits = len(grid.codes).bit_length() - 1
    is_even = grid.bits == 0
    return BlockWeights(
        bits,
        grid.block,
        in_planes(levels.view(num_out, -1, COLUMNS), bits).view(num_out, -1),
        scales.view(num_out, -1),
        None,
        None if is_even else step.view(num_out, -1, 1),
        zero=1 if is_even else 0,
        codes=None if is_even else grid.codes,
        unit=grid.unit,
    )


def _scales(blocks: torch.Tensor, grid: _Grid) -> torch.Tensor:
    """Return the whole scales of the parts of stored blocks, int8 [n, parts]."""
    places = [grid.scale(part) for part in range(STEP_COLUMNS // grid.block)]
    at, shifts = (torch.tensor(part) for part in zip(*places, strict=True))
    behind = (at + 1).clamp(max=grid.num_bytes - 1)
    words = blocks[:, at].int() | (blocks[:, behind].int() << 8)
    numbers = (words >> shifts.int()) & ((1 << grid.bits) - 1)
    return (2 * numbers + 1).to(torch.int8)
