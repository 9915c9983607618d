"""Products of pairs of bfloat16, whose sums are float32: one instruction for 32 products.

A *word* is a pair of bfloat16 in 32 bits, the first in the lower half. Processors with AVX-512 BF16
multiply 16 words with 16 others and add both products of each to a float32, at the rate at which
they multiply 16 float32. Denormal numbers count as zero.
"""

from collections.abc import Sequence

from llvmlite import ir

from kvchat_kernels.cpu.code import F32, I16, I32, Code, Value, has_feature

# Words and sums of a vector of 512 bits.
PAIR_LANES = 16
_WORDS = ir.VectorType(I32, PAIR_LANES)
_SUMS = ir.VectorType(F32, PAIR_LANES)
_SHORTS = ir.VectorType(I16, 2 * PAIR_LANES)
_UPPER_HALF = -1 << 16
# Shuffles work fast within 128 bits, which are 8 numbers of 16 bits or 4 sums.
_RUN = 4


class _Bfloat(ir.types.Type):
    """LLVM's type, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_BFLOATS = ir.VectorType(_Bfloat(), 2 * PAIR_LANES)


def are_pairs_multiplied() -> bool:
    """Return whether the processor has the instruction, in vectors of 512 bits."""
    return has_feature("avx512bf16") and has_feature("avx512vl")


def add_products(code: Code, sums: Value, words: Value, factors: Value) -> Value:
    """Add the products of 16 words with 16 others to sums, [16] float32."""
    pairs = (code.as_bits(each, _BFLOATS) for each in (words, factors))
    return code.call("llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, sums, *pairs)


def load_pairs(code: Code, address: Value, offset: Value) -> Value:
    """Load a word and return it in all lanes."""
    return code.spread(code.load(address, offset, I32), PAIR_LANES)


def rounded(code: Code, floats: Value) -> Value:
    """Round 16 float32 to numbers of bfloat16, ties to even; NaN is not kept."""
    bits = code.as_bits(floats, _WORDS)
    return code.as_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & _UPPER_HALF, _SUMS)


def store_halves(code: Code, numbers: Value, address: Value, offset: Value) -> None:
    """Store 16 `rounded` numbers as bfloat16."""
    halves = code.as_bits(numbers, _WORDS) >> 16
    code.store(code.convert("trunc", halves, ir.VectorType(I16, PAIR_LANES)), address, offset)


def interleaved(code: Code, heads: Sequence[Value], offset: int) -> tuple[Value, Value]:
    """Load 32 numbers at each of two addresses; return words of their pairs, in the order of which
    `in_order` makes that of the numbers.
    """
    first, second = (code.load(head, offset, _SHORTS) for head in heads)
    low = [
        2 * _RUN * run + number + 2 * PAIR_LANES * side
        for run in range(PAIR_LANES // _RUN)
        for number in range(_RUN)
        for side in (0, 1)
    ]
    high = [lane + _RUN for lane in low]
    one, other = (
        code.as_bits(code.shuffled(first, second, lanes), _WORDS) for lanes in (low, high)
    )
    return one, other


def in_order(code: Code, low: Value, high: Value) -> tuple[Value, Value]:
    """Return the sums of the words of `interleaved` in the order of their columns."""
    lanes = [
        _RUN * run + number + PAIR_LANES * side
        for run in range(PAIR_LANES // _RUN)
        for side in (0, 1)
        for number in range(_RUN)
    ]
    one, other = (code.shuffled(low, high, part) for part in (lanes[:16], lanes[16:]))
    return one, other
