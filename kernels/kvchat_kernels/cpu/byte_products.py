"""Products of bytes with whole numbers of 16 bits.

One instruction (AVX-512 VNNI) multiplies 16 words with 16 others and adds the products of each to
32 bits, at the rate at which 16 float32 are multiplied: four of bytes without signs with bytes with
signs, of which a number has two, or two of numbers of 16 bits. A *word* has 32 bits.
"""

from collections.abc import Sequence

from llvmlite import ir

from kvchat_kernels.cpu.code import F32, I8, I16, I32, Code, Value, constant

# Words and sums of a vector of 512 bits.
WORD_LANES = 16
FLOATS, WHOLES = (ir.VectorType(kind, WORD_LANES) for kind in (F32, I32))
# The largest number of 16 bits whose bytes both have signs, and are 127 at most.
MOST_IN_BYTES = 127 * 256 + 127
# The largest number of 16 bits with a sign.
MOST_SHORT = 32767
# Added to a small float32, it leaves the nearest whole number in the lowest bits.
_TO_WHOLE, _BITS_OF_IT = 1.5 * 2**23, 0x4B400000
# Numbers of which the largest is less become zeros: one over them is too large.
_LEAST = 1e-33


def add_byte_products(code: Code, sums: Value, words: Value, factors: Value) -> Value:
    """Add products of 16 words of bytes without signs and 16 with signs to sums, [16] int32."""
    return code.call("llvm.x86.avx512.vpdpbusd.512", WHOLES, sums, words, factors)


def add_short_products(code: Code, sums: Value, words: Value, factors: Value) -> Value:
    """Add products of 16 words of two numbers of 16 bits and 16 others to sums, [16] int32."""
    return code.call("llvm.x86.avx512.vpdpwssd.512", WHOLES, sums, words, factors)


def whole(code: Code, number: int = 0) -> Value:
    """Return a whole number in all lanes."""
    return Value(code, constant(number, WHOLES))


def size_of(code: Code, numbers: Value) -> Value:
    """Return 16 float32 without their signs."""
    return code.call("llvm.fabs.v16f32", FLOATS, numbers)


def unit_of(code: Code, largest: Value, most: int) -> tuple[Value, Value]:
    """Return the unit in which `largest` is `most`, and one over it."""
    unit = code.greatest(largest, code.single(_LEAST)) * (1 / most)
    return unit, code.single(1.0) / unit


def store_in_bytes(
    code: Code, numbers: Value, address: Value, offset: Value | int, to_low: int
) -> Value:
    """Round 16 float32 in their unit; store the high bytes, and `to_low` bytes behind them the low
    ones. Returns the whole numbers, int32.
    """
    bits = code.as_bits(numbers + _TO_WHOLE, WHOLES)
    for part, to in ((bits + 128) >> 8, 0), (bits, to_low):
        code.store(code.convert("trunc", part, ir.VectorType(I8, WORD_LANES)), address + to, offset)
    return bits - _BITS_OF_IT


def store_short(code: Code, numbers: Value, address: Value, offset: Value) -> None:
    """Round 16 float32 in their unit; store them in 16 bits."""
    bits = code.as_bits(numbers + _TO_WHOLE, WHOLES)
    code.store(code.convert("trunc", bits, ir.VectorType(I16, WORD_LANES)), address, offset)


def interleaved_bytes(code: Code, heads: Sequence[Value], offset: Value, count: int) -> list[Value]:
    """Load `count` bytes with signs at both of two addresses, a multiple of 16; return words of the
    addresses' first ones in 16 bits, of the second ones, and so on.
    """
    kinds = [ir.VectorType(kind, count) for kind in (I8, I16)]
    one, other = (
        code.convert("sext", code.load(head, offset, kinds[0]), kinds[1]) for head in heads
    )
    order = [place // 2 + place % 2 * count for place in range(2 * count)]
    runs = (order[first : first + 2 * WORD_LANES] for first in range(0, 2 * count, 2 * WORD_LANES))
    return [code.as_bits(code.shuffled(one, other, run), WHOLES) for run in runs]
