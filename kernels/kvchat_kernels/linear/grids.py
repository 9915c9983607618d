"""Weights that are points of a grid, at the size that they have in a file: records of 256 columns.

A point stands for 4 or 8 neighbouring weights of few different numbers, which may have signs apart.
Compiled code looks the points up (`cpu/grid_levels.py`); here is its plain twin, in numpy. A record
is, of 8 blocks of 32 columns:

low bytes    of the numbers of the points, in the order of `Grid.places`
high bits    of these: a run of bits for each bit above 8, in the same order
signs        of each block 4 bytes, for its columns by their remainders by 4: a bit for each word
moves        of points, where these have one: a byte for each 8 columns, a bit for each block
scales       4 bits for each block, then of second halves of blocks that have two scales

If the number of signs of 8 weights is even, the last needs no bit, and the scale of the block is
there instead, its lowest bit in its first 8 columns.

Weights of three numbers have no points and no scales: a byte has five digits of 0 to 2, the highest
first, as TQ1_0 has them. `DIGITS` says which words of 4 columns, of all blocks, are where.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

COLUMNS, STEP_COLUMNS = 32, 256
BLOCKS = STEP_COLUMNS // COLUMNS
# Weights whose signs and numbers are read as one word.
WORD = 4
WORDS = COLUMNS // WORD
_WORD_BYTES = 4
# Points whose numbers one bit plane, and one run of low bytes, has for compiled code.
PASS_POINTS = 32
# Of the signs of a block, those bits that stand for its scale where their number is even.
FREE_BITS = 0xAA00_0000

Array = np.ndarray[Any, Any]

# Runs of bytes of a record of digits, and which digits are in them, one behind another: half a word
# of all blocks is 16 digits.
DIGITS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
_POWERS = (1, 3, 9, 27, 81)


class Signs(Enum):
    """Which signs weights have beside their points. `EVEN`: their number is even in 8 weights."""

    NONE = "none"
    EVEN = "even"
    ALL = "all"


class Moves(Enum):
    """What numbers are moved by, 1 up or down: nothing, or a bit of each block or point."""

    NONE = "none"
    BLOCKS = "blocks"
    POINTS = "points"


@dataclass(frozen=True, eq=False)
class Grid:
    """A grid and the form of records; two are the same only if they are one object.

    numbers   what codes stand for: 4 or 8
    points    the codes of a point, the first in the lowest bits; their number is a power of two
    width     weights of a point: 8, or 4
    block     columns of a scale: 32 or 16
    is_ternary  weights are digits of the three numbers
    """

    name: str
    numbers: tuple[int, ...]
    points: tuple[int, ...] = field(repr=False)
    width: int
    signs: Signs
    block: int = COLUMNS
    moves: Moves = Moves.NONE
    is_ternary: bool = False
    digest: str = field(init=False)  # so that forms of compiled code say which points these are

    def __post_init__(self) -> None:
        digest = sha256(repr(self.points).encode()).hexdigest()[:16]
        object.__setattr__(self, "digest", digest)

    @property
    def code_bits(self) -> int:
        return len(self.numbers).bit_length() - 1

    @property
    def high_bits(self) -> int:
        return len(self.points).bit_length() - 9

    @property
    def num_points(self) -> int:
        """How many a record has."""
        return STEP_COLUMNS // self.width

    @property
    def num_passes(self) -> int:
        return self.num_points // PASS_POINTS

    @property
    def high_at(self) -> int:
        return self.num_points

    @property
    def signs_at(self) -> int:
        return self.high_at + self.high_bits * self.num_points // 8

    @property
    def moves_at(self) -> int:
        return self.signs_at + (0 if self.signs is Signs.NONE else _WORD_BYTES * WORDS)

    @property
    def scales_at(self) -> int:
        return self.moves_at + (BLOCKS // 2 if self.moves is Moves.POINTS else 0)

    @property
    def num_parts(self) -> int:
        """How many scales a block has."""
        return COLUMNS // self.block

    def part_at(self, part: int) -> int | None:
        """Where the scales of all first or second halves of blocks are; None: beside signs."""
        if self.signs is Signs.EVEN:
            return None if part == 0 else self.scales_at
        return self.scales_at + part * _WORD_BYTES

    @property
    def num_bytes(self) -> int:
        if self.is_ternary:
            return sum(count for _, count, _ in DIGITS)
        num_apart = self.num_parts - (self.signs is Signs.EVEN)
        return self.scales_at + num_apart * _WORD_BYTES

    @property
    def scale_mask(self) -> int:
        """The bits of a scale: the highest may say how its block is moved."""
        return 7 if self.moves is not Moves.NONE else 15

    def place(self, block: int, point: int) -> int:
        """Return the place of a block's point among the points of a record.

        A qword of compiled code's vectors has two neighbouring blocks.
        """
        pair, side = divmod(block, 2)
        if self.width == 2 * WORD:
            return 8 * pair + 2 * point + side
        number, of_pass = divmod(point, WORD)
        unpacked, word = divmod(of_pass, 2)
        start = PASS_POINTS * number + 16 * (pair // 2) + 8 * unpacked + 4 * (pair % 2)
        return start + 2 * word + side

    @property
    def all_numbers(self) -> list[int]:
        """All numbers that weights may be, with their signs and moves."""
        signs = (1,) if self.signs is Signs.NONE else (1, -1)
        moves = (0,) if self.moves is Moves.NONE else (1, -1)
        return sorted({sign * n + move for n in self.numbers for sign in signs for move in moves})

    @cached_property
    def places(self) -> Array:
        """The place of each point in the order of columns, [points of a record]."""
        each = range(COLUMNS // self.width)
        return np.array([self.place(block, point) for block in range(BLOCKS) for point in each])

    @cached_property
    def numbers_of_points(self) -> Array:
        """The numbers of each point without signs and moves, int8 [points, width]."""
        shifts = np.arange(self.width) * self.code_bits
        codes = (np.array(self.points)[:, None] >> shifts) & (len(self.numbers) - 1)
        numbers: Array = np.array(self.numbers, np.int8)[codes]
        return numbers


TERNARY = Grid("ternary", (-1, 0, 1), (), WORD, Signs.NONE, is_ternary=True)


def digits_of(stored: Array, count: int) -> Array:
    """Return the first digits of bytes [n, bytes], one behind another: uint8 [n, count * bytes]."""
    powers = np.array(_POWERS[:count], np.uint8)[:, None]
    digits = ((stored[:, None] * powers).astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return digits.reshape(len(stored), -1)


def bytes_of(digits: Array, count: int) -> Array:
    """Return the bytes that have so many digits each, as of `digits_of`."""
    powers = np.array(_POWERS[: -1 - count : -1], np.uint16)[:, None]
    total = (digits.reshape(len(digits), count, -1) * powers).sum(axis=1, dtype=np.uint16)
    stored: Array = ((total * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8)
    return stored


def records_of(digits: Array) -> Array:
    """Return records of digits [n, 256] in the order of columns: uint8 [n, bytes]."""
    words = digits.reshape(-1, BLOCKS, WORDS, WORD).transpose(0, 2, 1, 3).reshape(-1, STEP_COLUMNS)
    parts, end = [], 0
    for _, num_bytes, count in DIGITS:
        start, end = end, end + num_bytes * count
        parts.append(bytes_of(words[:, start:end], count))
    return np.concatenate(parts, axis=1)


def _ternary_numbers(records: Array) -> Array:
    words = [digits_of(records[:, at : at + size], count) for at, size, count in DIGITS]
    numbers = np.concatenate(words, axis=1).reshape(-1, WORDS, BLOCKS, WORD).transpose(0, 2, 1, 3)
    return numbers.reshape(len(records), -1).astype(np.int8) - 1


def numbers_of(records: Array, grid: Grid) -> Array:
    """Return the numbers of records [n, bytes], uint8, in the order of columns: int8 [n, 256]."""
    if grid.is_ternary:
        return _ternary_numbers(records)
    points = records[:, : grid.num_points].astype(np.int32)
    for bit in range(grid.high_bits):
        size = grid.num_points // 8
        start = grid.high_at + bit * size
        flags = np.unpackbits(records[:, start : start + size], axis=1, bitorder="little")
        points |= flags.astype(np.int32) << (8 + bit)
    numbers = grid.numbers_of_points[points[:, grid.places]].reshape(len(records), -1)
    if grid.signs is not Signs.NONE:
        numbers = np.where(_signs_of(records, grid), -numbers, numbers)
    if grid.moves is not Moves.NONE:
        moves = _moves_of(records, grid).repeat(2 * WORD, 1)
        numbers = numbers + np.where(moves, np.int8(1), np.int8(-1))
    return numbers


def _signs_of(records: Array, grid: Grid) -> Array:
    """Return whether each weight is below zero, bool [n, 256]."""
    signs = _sign_bits(records, grid).transpose(0, 1, 3, 2).astype(bool)
    signs = signs.reshape(-1, STEP_COLUMNS // 8, 8).copy()
    if grid.signs is Signs.EVEN:
        signs[..., 7] = signs[..., :7].sum(axis=2) & 1
    return signs.reshape(-1, STEP_COLUMNS)


def _sign_bits(records: Array, grid: Grid) -> Array:
    """Return the stored bits, uint8 [n, blocks, columns of a word, words]."""
    stored = np.ascontiguousarray(records[:, grid.signs_at : grid.moves_at])
    return np.unpackbits(stored, axis=1, bitorder="little").reshape(-1, BLOCKS, WORD, WORDS)


def _moves_of(records: Array, grid: Grid) -> Array:
    """Return whether each 8 weights are moved up, bool [n, 32]."""
    if grid.moves is Moves.BLOCKS:
        return (_nibbles(records, grid.scales_at) < 8).repeat(WORD, 1)
    stored = np.ascontiguousarray(records[:, grid.moves_at : grid.scales_at])
    bits = np.unpackbits(stored, axis=1, bitorder="little")
    return bits.reshape(-1, WORD, BLOCKS).transpose(0, 2, 1).reshape(len(records), -1) == 0


def _nibbles(records: Array, at: int) -> Array:
    """Return the 8 numbers of 4 bits at a place of records, uint8 [n, 8]."""
    stored = records[:, at : at + _WORD_BYTES, None] >> np.array([0, 4], np.uint8)
    return (stored & 15).reshape(len(records), BLOCKS)


def scales_of(records: Array, grid: Grid) -> Array:
    """Return the whole scales of records, int8 [n, 256 / block], in the order of columns."""
    if grid.is_ternary:
        return np.ones((len(records), BLOCKS), np.int8)
    parts = []
    for part in range(grid.num_parts):
        at = grid.part_at(part)
        parts.append(_scales_beside_signs(records, grid) if at is None else _nibbles(records, at))
    stored: Array = np.stack(parts, axis=2).reshape(len(records), -1)
    return (2 * (stored & grid.scale_mask) + 1).astype(np.int8)


def _scales_beside_signs(records: Array, grid: Grid) -> Array:
    bits = _sign_bits(records, grid)[:, :, 3, 1::2]
    scales: Array = (bits << np.arange(4, dtype=np.uint8)).sum(axis=2)
    return scales.astype(np.uint8)
