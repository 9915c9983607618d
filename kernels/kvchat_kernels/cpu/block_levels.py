"""Levels of weights in blocks: read from stored bytes, where they are nibbles, bytes or bit planes.

The planes of a level hold some of its bits each (`linear/blocks.py`); codes are looked up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from kvchat_kernels.cpu.code import I8, I16, I32, I64, Code, Value, constant, has_feature
from kvchat_kernels.linear.blocks import PLANES, WORD, Layout

# The matrix of bits that gives the upper 4 bits of a byte: a row of 8 bits for each bit, the row of
# the lowest in the highest byte.
_HIGH_BITS = 0x1020_4080_0000_0000
# What a byte with a sign gets to be one without.
SIGN = 128


@dataclass(frozen=True, slots=True)
class Place:
    """Where a vector of a group's levels is.

    start    the columns before it in the group, as bytes: of levels in planes 8 bits for each, of
             others as they lie
    turn     of levels in planes in a group of 8 blocks: the word of columns is `turn` plus a
             multiple of the first plane's bits
    words    of levels in planes: that multiple, or in smaller groups all words of the vector
    """

    start: Value | int
    turn: Value | None = None
    words: Sequence[int] = ()


def vectors_of(
    code: Code, layout: Layout, size: int, place: Place, stored: Sequence[Value]
) -> tuple[Value, ...]:
    """Return the vectors of levels that stored bytes hold, see `WeightRow.vectors`."""
    if layout.are_nibbles:
        (packed,) = stored
        return packed & 15, _high_bits(code, packed)
    if layout.rounding.is_beside_unsigned:
        if not layout.has_planes:
            (whole,) = stored
            return (whole ^ -SIGN,)
        levels = levels_of(code, layout.bits, size, place, stored)
        if layout.codes is not None:
            levels = looked_up(code, [number ^ -SIGN for number in layout.codes], levels)
        return (levels,)
    halves = stored
    if layout.has_planes:
        levels = levels_of(code, layout.bits, size, place, stored)
        halves = code.halves(signed(code, layout, levels))
    return as_shorts(code, halves)


def as_shorts(code: Code, halves: Sequence[Value]) -> tuple[Value, ...]:
    """Return two vectors of bytes with signs in 16 bits."""
    first, second = (
        code.convert("sext", half, ir.VectorType(I16, half.type.count)) for half in halves
    )
    return first, second


def zero_of(layout: Layout) -> int:
    """Return how much too high the bytes without signs are that `vectors_of` returns."""
    if not layout.rounding.is_beside_unsigned:
        return 0
    if layout.grid is not None and layout.grid.is_ternary:
        return 1
    are_whole = layout.has_planes and layout.codes is None and layout.grid is None
    return layout.zero if are_whole else SIGN


def levels_of(code: Code, bits: int, size: int, place: Place, stored: Sequence[Value]) -> Value:
    """Return levels without signs, 8 bits each, of vectors of their planes."""
    total, low, turns = None, 0, PLANES[bits][0]
    for plane, data in zip(PLANES[bits], stored, strict=True):
        if place.turn is None:
            part = _bits_of_words(code, data, plane, size, place.words, low)
        else:
            turn = place.turn & -plane if plane < turns else None
            part = bits_at(code, data, plane, place.words[0], low, turn)
        total = part if total is None else total | part
        low += plane
    assert total is not None
    return total


def bits_at(
    code: Code, data: Value, count: int, shift: int, low: int, turn: Value | None = None
) -> Value:
    """Return `count` bits of each byte from bit `shift` plus `turn` on, moved to bit `low`.

    Bytes are shifted in words, whose bits beyond a byte are none of those.
    """
    words = code.as_bits(data, ir.VectorType(I16, data.type.count // 2))
    if shift > low:
        words = words >> (shift - low)
    elif low > shift:
        words = words << (low - shift)
    if turn is not None:
        words = words >> code.spread(code.convert("trunc", turn, I16), words.type.count)
    mask = ((1 << count) - 1) << low
    return code.as_bits(words, data.type) & (mask if mask < 128 else mask - 256)


def _bits_of_words(
    code: Code, data: Value, count: int, size: int, words: Sequence[int], low: int
) -> Value:
    """Return `count` bits of each byte for some words of a small group, moved to bit `low`.

    `data` has the bytes of these words, of one row or of two side by side. Where several words are
    in the same bytes, these are repeated, and each copy has a shift of its own.
    """
    word_bytes, num_loaded = WORD * size, min(len(words), count)
    rows = range(data.type.count // (word_bytes * num_loaded))
    lanes = [
        (row * num_loaded + number % num_loaded) * word_bytes + byte
        for row in rows
        for number in range(len(words))
        for byte in range(word_bytes)
    ]
    repeated = data if num_loaded == len(words) else code.picked(data, lanes)
    shifts = [word // count * count for _ in rows for word in words for _ in range(size)]
    kind = ir.VectorType(I32, len(shifts))
    bits, least, most = code.as_bits(repeated, kind), min(shifts), max(shifts)
    first = low if most <= low or least >= low else least
    steps = Value(code, ir.Constant(kind, [abs(shift - first) for shift in shifts]))
    bits = bits << steps if most <= first else bits >> steps
    mask = ((1 << count) - 1) << first
    part = code.as_bits(bits, repeated.type) & (mask if mask < 128 else mask - 256)
    return part << (low - first) if low > first else part


def signed(code: Code, layout: Layout, levels: Value) -> Value:
    """Return what levels without signs stand for, 8 bits each."""
    if layout.codes is not None:
        return looked_up(code, layout.codes, levels)
    return levels - layout.zero if layout.zero else levels


def looked_up(code: Code, codes: Sequence[int], levels: Value) -> Value:
    """Return what each level of 0 to 15 stands for, in bytes."""
    count = levels.type.count
    names = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}
    needed = {16: "ssse3", 32: "avx2", 64: "avx512bw"}
    if count in names and has_feature(needed[count]):
        table = Value(code, ir.Constant(levels.type, list(codes) * (count // len(codes))))
        return code.call(f"llvm.x86.{names[count]}", levels.type, table, levels)
    if count > 16 and has_feature("ssse3"):
        return code.joined(*(looked_up(code, codes, half) for half in code.halves(levels)))
    return _chosen(code, codes, levels)


def _chosen(code: Code, codes: Sequence[int], levels: Value) -> Value:
    """Do the same by choosing between the halves of the codes, for any processor."""
    if len(codes) == 1:
        return Value(code, constant(codes[0], levels.type))
    half = len(codes) // 2
    low, high = (_chosen(code, part, levels) for part in (codes[:half], codes[half:]))
    return code.select((levels & half) > 0, high, low)


def _high_bits(code: Code, packed: Value) -> Value:
    """Return the upper 4 bits of bytes."""
    count = packed.type.count
    if count < 64 or not has_feature("gfni"):
        return packed >> 4  # a shift of 16 bits, and a mask
    matrix = Value(code, constant(_HIGH_BITS, ir.VectorType(I64, count // 8)))
    name, zero = f"llvm.x86.vgf2p8affineqb.{8 * count}", Value(code, constant(0, I8))
    return code.call(name, packed.type, packed, code.as_bits(matrix, packed.type), zero)
