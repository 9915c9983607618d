"""Blocks of GGUF files whose weights are points of a grid, as BlockWeights of the same size.

Compiled code looks the points up (`kvchat_kernels/linear/grids.py` has the form of records); the
package gguf has the grids. The digits of TQ1_0 are put in another order; for a GPU, and where
columns are moved, they become levels of 2 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from kvchat_kernels.linear.blocks import (
    COLUMNS,
    STEP_COLUMNS,
    BlockWeights,
    in_planes,
    interleaved,
    with_codes,
)
from kvchat_kernels.linear.cpu import rounding_beside
from kvchat_kernels.linear.grids import (
    BLOCKS,
    DIGITS,
    TERNARY,
    Grid,
    Moves,
    Signs,
    digits_of,
    records_of,
)

# Weights whose levels are there at once.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Form:
    """A format of blocks of 256 columns, and its grid.

    num_bytes  of a block
    numbers, signs, width, block, moves   as of Grid
    points     returns the low bytes of the numbers of points [n, points of a block], of stored
               blocks; `high` the bits above them, in bytes
    sign_bits  returns the signs of each 32 weights [n, 8], a bit each in 32: where the last of 8
               weights needs no bit, that bit is one of the scale
    scales     returns the 4 bits of scales of each part that are not beside signs, [n, 8]
    step       returns the float16 [n, 1] that scales are multiplied with, of stored blocks
    moved      returns a bit for each point that is moved down [n, 32]
    unit       what scales are multiplied with
    """

    num_bytes: int
    numbers: tuple[int, ...]
    points: Callable[[torch.Tensor], torch.Tensor]
    step: Callable[[torch.Tensor], torch.Tensor]
    high: Callable[[torch.Tensor], torch.Tensor] | None = None
    signs: Signs = Signs.NONE
    width: int = 8
    sign_bits: Callable[[torch.Tensor], torch.Tensor] | None = None
    scales: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    block: int = COLUMNS
    moves: Moves = Moves.NONE
    moved: Callable[[torch.Tensor], torch.Tensor] | None = None
    unit: float = 1.0


def _bits(words: torch.Tensor, step: int, fields: int, count: int) -> torch.Tensor:
    """Return fields of words [n, w], `step` bits apart and the lowest first: [n, w * fields]."""
    shifts = torch.arange(0, fields * step, step).to(words.dtype)
    return ((words[..., None] >> shifts) & ((1 << count) - 1)).flatten(1)


def _copied(blocks: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return bytes that can be viewed as numbers: those of a single block may lie anywhere."""
    return blocks[:, start:end].clone(memory_format=torch.contiguous_format)


def _shorts(blocks: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return _copied(blocks, start, end).view(torch.int16).int() & 0xFFFF


def _words(blocks: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return _copied(blocks, start, end).view(torch.int32)


def _apart(words: torch.Tensor) -> torch.Tensor:
    """Return words of 4 x 7 signs and 4 bits of a scale as bytes of 7 signs and a bit."""
    total = torch.zeros_like(words)
    for number in range(4):
        signs = ((words >> (7 * number)) & 0x7F) | (((words >> (28 + number)) & 1) << 7)
        total |= signs << (8 * number)
    return total


def _iq2_xs_signs(blocks: torch.Tensor) -> torch.Tensor:
    """Return signs whose last bits are those of the first scale of each block."""
    bits = _bits(blocks[:, 66:74], 1, 4, 1) << 7
    return ((blocks[:, 3:67:2] >> 1) | bits).view(torch.int32)


def _iq1_m_scales(blocks: torch.Tensor) -> torch.Tensor:
    return _bits(_shorts(blocks, 48, 56), 3, 4, 3)


def _half_at(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: _copied(blocks, start, start + 2).view(torch.float16)


def _scattered_step(blocks: torch.Tensor) -> torch.Tensor:
    """Return the step of IQ1_M, of which each of four words has four bits."""
    bits = (_shorts(blocks, 48, 56) >> 12) << torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    return bits.sum(dim=1, keepdim=True).to(torch.int16).view(torch.float16)


def _part(start: int, end: int, step: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks[:, start:end:step]


def _low(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks[:, start : start + 8] & 15


def _high(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks[:, start : start + 8] >> 4


_THREE = (0x08, 0x19, 0x2B, 0)
_EIGHTHS = (-8, 0, 8, 0)  # moved by an eighth
_FORMS = {
    "IQ3_S": _Form(
        110,
        tuple(range(1, 16, 2)),
        _part(2, 66),
        _half_at(0),
        lambda blocks: _bits(blocks[:, 66:74], 1, 8, 1),
        Signs.ALL,
        width=4,
        sign_bits=lambda blocks: _words(blocks, 74, 106),
        scales=(lambda blocks: _bits(blocks[:, 106:110], 4, 2, 4),),
    ),
    "IQ3_XXS": _Form(
        98,
        (4, 12, 20, 28, 36, 44, 52, 62),
        _part(2, 66),
        _half_at(0),
        signs=Signs.EVEN,
        width=4,
        sign_bits=lambda blocks: _apart(_words(blocks, 66, 98)),
        unit=0.25,
    ),
    "IQ2_S": _Form(
        82,
        _THREE,
        _part(2, 34),
        _half_at(0),
        lambda blocks: _bits(blocks[:, 66:74], 2, 4, 2),
        Signs.ALL,
        sign_bits=lambda blocks: _words(blocks, 34, 66),
        scales=(_low(74), _high(74)),
        block=16,
        unit=0.125,
    ),
    "IQ2_XS": _Form(
        74,
        _THREE,
        _part(2, 66, 2),
        _half_at(0),
        lambda blocks: blocks[:, 3:67:2] & 1,
        Signs.EVEN,
        sign_bits=_iq2_xs_signs,
        scales=(_high(66),),
        block=16,
        unit=0.125,
    ),
    "IQ2_XXS": _Form(
        66,
        _THREE,
        lambda blocks: blocks[:, 2:].unflatten(1, (8, 8))[..., :4].flatten(1),
        _half_at(0),
        signs=Signs.EVEN,
        sign_bits=lambda blocks: _apart(_words(blocks, 2, 66)[:, 1::2]),
        unit=0.125,
    ),
    "IQ1_S": _Form(
        50,
        _EIGHTHS,
        _part(2, 34),
        _half_at(0),
        lambda blocks: _bits(_shorts(blocks, 34, 50), 3, 4, 3).to(torch.uint8),
        scales=(lambda blocks: _shorts(blocks, 34, 50) >> 12,),
        moves=Moves.BLOCKS,
        unit=0.125,
    ),
    "IQ1_M": _Form(
        56,
        _EIGHTHS,
        _part(0, 32),
        _scattered_step,
        lambda blocks: _bits(blocks[:, 32:48], 4, 2, 3),
        scales=(
            lambda blocks: _iq1_m_scales(blocks)[:, 0::2],
            lambda blocks: _iq1_m_scales(blocks)[:, 1::2],
        ),
        block=16,
        moves=Moves.POINTS,
        moved=lambda blocks: _bits(blocks[:, 32:48] >> 3, 4, 2, 1),
        unit=0.125,
    ),
}
# Of TQ1_0: bytes of a block, and of them those with weights; the rest are its step.
_FIVES_BYTES, _FIVES = 54, 52
GRID_FORMATS = frozenset((*_FORMS, "TQ1_0"))


@cache
def _grid(name: str) -> Grid:
    from gguf import quants

    form, kind = _FORMS[name], getattr(quants, name)
    kind.init_grid()
    numbers = torch.from_numpy(kind.grid[0, 0]).int()
    if form.moves is not Moves.NONE:
        numbers = numbers * 8
    codes = torch.zeros(256, dtype=torch.int64)
    for code, number in reversed(list(enumerate(form.numbers))):
        codes[number + 128] = code
    bits = len(form.numbers).bit_length() - 1
    points = (codes[(numbers + 128).long()] << torch.arange(0, form.width * bits, bits)).sum(1)
    of_grid = (form.width, form.signs, form.block, form.moves)
    return Grid(name, form.numbers, tuple(points.tolist()), *of_grid)


def grid_bytes(num_bytes: int, name: str) -> int:
    """Return the bytes of memory of weights that take `num_bytes` in a file, on a CPU."""
    if name == "TQ1_0":
        one = _fives(torch.zeros(1, _FIVES_BYTES, dtype=torch.uint8), in_records=True)
        return num_bytes // _FIVES_BYTES * one.num_bytes
    step_bytes = torch.float16.itemsize
    return num_bytes // _FORMS[name].num_bytes * (_grid(name).num_bytes + step_bytes)


def read_grids(
    data: torch.Tensor, name: str, pool: Any, is_interleaved: bool, in_codes: bool = False
) -> BlockWeights:
    """Return the weights of stored rows [out, bytes of a row], uint8; `pool` has the threads.

    `in_codes`: points become codes of 3 or 4 bits, as kernels of a GPU read them.
    """
    num_bytes, tile_of = _FIVES_BYTES, partial(_fives, in_records=is_interleaved)
    if name != "TQ1_0":  # before the threads begin: each would make a grid
        num_bytes, tile_of = _FORMS[name].num_bytes, partial(_tile, _FORMS[name], _grid(name))
    num_in = data.shape[1] // num_bytes * STEP_COLUMNS
    step = max(1, _AT_ONCE // num_in)

    def read(start: int) -> BlockWeights:
        tile = tile_of(data[start : start + step])
        tile = with_codes(tile) if in_codes and tile.grid is not None else tile
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


def _tile(form: _Form, grid: Grid, data: torch.Tensor) -> BlockWeights:
    num_out, blocks = len(data), data.reshape(-1, form.num_bytes)
    order = grid.places.argsort()
    parts = [_ordered(form.points(blocks), order)]
    if form.high is not None:
        high = _ordered(form.high(blocks), order)
        parts += [_packed((high >> bit) & 1) for bit in range(grid.high_bits)]
    if form.sign_bits is not None:
        parts.append(_turned(form.sign_bits(blocks)).view(torch.uint8))
    if form.moved is not None:
        of_blocks = form.moved(blocks).view(-1, BLOCKS, COLUMNS // 8)
        parts.append(_packed(of_blocks.transpose(1, 2).flatten(1)))
    for scales in form.scales:
        whole = scales(blocks).to(torch.uint8)
        parts.append(whole[:, ::2] | (whole[:, 1::2] << 4))
    records = torch.cat(parts, dim=1).view(num_out, -1)
    steps = form.step(blocks).view(num_out, -1)
    return BlockWeights(8, form.block, records, steps, None, unit=form.unit, grid=grid)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Return bits [n, count] as bytes, the first in the lowest bit: uint8 [n, count / 8]."""
    return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))


def _ordered(columns: torch.Tensor, order: Any) -> torch.Tensor:
    # 4 to 8 times as fast as by torch
    return torch.from_numpy(columns.numpy().take(order, axis=1))


def _turned(words: torch.Tensor) -> torch.Tensor:
    """Return words of 8 x 4 bits as words of 4 x 8 bits: bit 4 * w + c becomes bit 8 * c + w.

    Each round moves the lowest bit of a bit's number to its top.
    """
    swaps = ((1, 0x2222_2222), (2, 0x0C0C_0C0C), (4, 0x00F0_00F0), (8, 0x0000_FF00))
    for shift, mask in swaps * 2:
        other = (words ^ (words >> shift)) & mask
        words = words ^ other ^ (other << shift)
    return words


def _fives(data: torch.Tensor, *, in_records: bool) -> BlockWeights:
    """Return the weights of rows in TQ1_0, as records or as levels of 2 bits, for a GPU."""
    num_out, blocks = len(data), data.reshape(-1, _FIVES_BYTES)
    stored = blocks.numpy()
    parts = [digits_of(stored[:, at : at + size], count) for at, size, count in DIGITS]
    digits, steps = np.concatenate(parts, axis=1), _half_at(_FIVES)(blocks).view(num_out, -1)
    if in_records:
        records = torch.from_numpy(records_of(digits)).view(num_out, -1)
        return BlockWeights(8, COLUMNS, records, steps, None, grid=TERNARY)
    levels = in_planes(torch.from_numpy(digits).view(num_out, -1, COLUMNS), 2)
    return BlockWeights(2, STEP_COLUMNS, levels.view(num_out, -1), steps, None, zero=1)
