"""Blocks of GGUF files whose weights are points of a grid, as BlockWeights.

A grid has few different numbers: with their signs 16 at most. So a weight is a code of 3 or 4 bits
beside the scale of its block, exactly, which takes 1.2 to 2.1 times the bytes of the file: an index
into a grid stands for 4 or 8 weights there. TQ1_0 has 5 weights in a byte, and takes 2 bits here.
Products that looked the points up would be bound by that: about 4 billion weights a second and core
where codes are read at 15.

The levels of 8 weights are a word of 64 bits: those of a point, and to each the bit of its sign is
added. The package gguf has the grids.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kvchat_kernels.linear.blocks import COLUMNS, STEP_COLUMNS, BlockWeights, in_planes, interleaved
from kvchat_kernels.linear.cpu import rounding_beside

# Weights whose levels are there at once.
_AT_ONCE = 1 << 21
_WORD_BYTES = 8
# IQ1's points are moved by an eighth, by one sign or the other.
_NUM_IQ1 = 2048


@dataclass(frozen=True, slots=True)
class _Grid:
    """A format of blocks of 256 columns.

    num_bytes  of a block
    codes      what weights are, as multiples of their scale, padded to 8 or 16; where signs are
               apart, each number is followed by its negative
    points     returns the place of each point in the grid [n, points of a block], of stored blocks
    signs      returns the signs of 8 weights [n, 32], a bit each; None: points have them
    scale      returns the byte and the lowest bit of the scale of a part
    step       returns the float16 [n, 1] that scales are multiplied with, of stored blocks
    bits       of a scale `s`, which counts as 2 * s + 1; 0: there is the step alone
    block      columns of a part
    unit       what scales are multiplied with
    """

    num_bytes: int
    codes: tuple[int, ...]
    points: Callable[[torch.Tensor], torch.Tensor]
    signs: Callable[[torch.Tensor], torch.Tensor] | None
    scale: Callable[[int], tuple[int, int]]
    step: Callable[[torch.Tensor], torch.Tensor]
    bits: int = 4
    block: int = COLUMNS
    unit: float = 1.0


def _bits(words: torch.Tensor, step: int, fields: int, count: int) -> torch.Tensor:
    """Return fields of words [n, w], `step` bits apart and the lowest first: [n, w * fields]."""
    shifts = torch.arange(0, fields * step, step, dtype=torch.int32)
    return ((words.int()[..., None] >> shifts) & ((1 << count) - 1)).flatten(1)


def _shorts(blocks: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return blocks[:, start:end].contiguous().view(torch.int16).int() & 0xFFFF


def _with_parity(signs: torch.Tensor) -> torch.Tensor:
    """Return signs of 8 weights, of 7 stored bits: the number of all is even."""
    parity = signs ^ (signs >> 4)
    parity ^= parity >> 2
    return signs | (((parity ^ (parity >> 1)) & 1) << 7)


def _signs_of_words(words: torch.Tensor) -> torch.Tensor:
    """Return the signs of 32 weights each that words of 32 bits have, [n, 8, 4] bytes."""
    return _with_parity(_bits(words.clone().view(torch.int32)[..., 0], 7, 4, 7))


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:34].int() | (_bits(blocks[:, 66:74], 2, 4, 2) << 8)


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:66].int() | (_bits(blocks[:, 66:74], 1, 8, 1) << 8)


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _shorts(blocks, 34, 50)
    moved = (high >> 15).repeat_interleave(4, dim=1)
    return blocks[:, 2:34].int() + (_bits(high, 3, 4, 3) << 8) + moved * _NUM_IQ1


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, :32].int() + (
        _bits(blocks[:, 32:48], 4, 2, 4) << 8
    )  # the sign is above 3 bits


def _half_at(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks[:, start : start + 2].contiguous().view(torch.float16)


def _scattered_step(blocks: torch.Tensor) -> torch.Tensor:
    """Return the step of IQ1_M, of which each of four words has four bits."""
    bits = (_shorts(blocks, 48, 56) >> 12) << torch.tensor([0, 4, 8, 12], dtype=torch.int32)
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
    "IQ3_S": _Grid(
        110,
        _signed(*range(1, 16, 2)),
        _iq3_s,
        lambda blocks: blocks[:, 74:106],
        _nibbles(106),
        step=_half_at(0),
    ),
    "IQ3_XXS": _Grid(
        98,
        _signed(4, 12, 20, 28, 36, 44, 52, 62),
        lambda blocks: blocks[:, 2:66],
        lambda blocks: _signs_of_words(blocks[:, 66:].unflatten(1, (8, 4))),
        lambda part: (69 + 4 * part, 4),
        unit=0.25,
        step=_half_at(0),
    ),
    "IQ2_S": _Grid(
        82,
        _THREE,
        _iq2_s,
        lambda blocks: blocks[:, 34:66],
        _nibbles(74),
        block=16,
        unit=0.125,
        step=_half_at(0),
    ),
    "IQ2_XS": _Grid(
        74,
        _THREE,
        lambda blocks: _shorts(blocks, 2, 66) & 511,
        lambda blocks: _with_parity(_shorts(blocks, 2, 66) >> 9),
        _nibbles(66),
        block=16,
        unit=0.125,
        step=_half_at(0),
    ),
    "IQ2_XXS": _Grid(
        66,
        _THREE,
        lambda blocks: blocks[:, 2:].unflatten(1, (8, 8))[..., :4].flatten(1),
        lambda blocks: _signs_of_words(blocks[:, 2:].unflatten(1, (8, 8))[..., 4:]),
        lambda part: (9 + 8 * part, 4),
        unit=0.125,
        step=_half_at(0),
    ),
    "IQ1_S": _Grid(
        50,
        _EIGHTHS,
        _iq1_s,
        None,
        lambda part: (35 + 2 * part, 4),
        bits=3,
        unit=0.125,
        step=_half_at(0),
    ),
    "IQ1_M": _Grid(
        56,
        _EIGHTHS,
        _iq1_m,
        None,
        lambda part: (48 + 2 * (part // 4), 3 * (part % 4)),
        bits=3,
        block=16,
        unit=0.125,
        step=_scattered_step,
    ),
    "TQ1_0": _Grid(
        54,
        (-1, 0, 1, 2),
        lambda blocks: blocks[:, :52],
        None,
        lambda part: (0, 0),
        bits=0,
        block=STEP_COLUMNS,
        step=_half_at(52),
    ),
}
GRID_FORMATS = frozenset(_GRIDS)


@cache
def _points(name: str) -> torch.Tensor:
    """Return the levels of each point without signs: int64, or int32 of 4 weights each."""
    from gguf import quants

    if name == "TQ1_0":  # a byte is 5 numbers of 0 to 2, the first in its highest part
        numbers = np.arange(256)[:, None] * np.array([1, 3, 9, 27, 81, 0, 0, 0]) % 256 * 3 // 256
        return torch.from_numpy(numbers.astype(np.uint8)).view(torch.int64)[:, 0]
    kind = getattr(quants, name)
    kind.init_grid()
    grid = torch.from_numpy(kind.grid[0, 0]).int()
    if name.startswith("IQ1"):
        grid = torch.cat((8 * grid + 1, 8 * grid - 1))
    codes = torch.zeros(256, dtype=torch.uint8)
    for level, code in reversed(list(enumerate(_GRIDS[name].codes))):
        codes[code + 128] = level
    levels = codes[(grid + 128).long()]
    return levels.view(torch.int64 if levels.shape[1] == _WORD_BYTES else torch.int32)[:, 0]


@cache
def _sign_words() -> torch.Tensor:
    """Return the bits of each byte, one a byte of int64."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return bits.to(torch.uint8).view(torch.int64)[:, 0]


def _levels(blocks: torch.Tensor, name: str) -> torch.Tensor:
    """Return the levels of stored blocks, uint8 [n, 256]."""
    grid = _GRIDS[name]
    words = _points(name)[grid.points(blocks).int()]
    if name == "TQ1_0":
        fives = words.view(torch.uint8).view(len(blocks), -1, _WORD_BYTES)
        runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # bytes, and the numbers of each
        parts = [fives[:, first:end, :count].transpose(1, 2) for first, end, count in runs]
        return torch.cat([part.flatten(1) for part in parts], dim=1)
    if grid.signs is not None:
        words = words.view(torch.int64) + _sign_words()[grid.signs(blocks).int()]
    return words.view(torch.uint8)


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
        return interleaved(tile, rounding_beside(tile)) if is_interleaved else tile

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
    grid, num_out = _GRIDS[name], len(data)
    blocks = data.reshape(-1, grid.num_bytes)
    step, is_even = grid.step(blocks), grid.bits == 0
    scales = step if is_even else _scales(blocks, grid)
    bits = len(grid.codes).bit_length() - 1
    levels = in_planes(_levels(blocks, name).view(num_out, -1, COLUMNS), bits)
    return BlockWeights(
        bits,
        grid.block,
        levels.view(num_out, -1),
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
