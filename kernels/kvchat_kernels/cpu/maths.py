"""Vector mathematics for CPU kernels: stored floats of any dtype, exp, tanh, erf.

exp follows Cephes' expf (S. Moshier): x is split into n * ln 2 + r, and exp(r) is a polynomial of
degree 7, right to about 1e-7; of 16 floats at once it has a shorter way. erf is formula 7.1.26 of
Abramowitz and Stegun, right to 1.5e-7.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import reduce

import torch
from llvmlite import ir

from kvchat_kernels.cpu.code import (
    F16,
    F32,
    F32S,
    I8,
    I16,
    I32,
    I32S,
    LANES,
    Code,
    Value,
    has_feature,
)

I8S = ir.VectorType(I8, LANES)
_I16S = ir.VectorType(I16, LANES)
_F16S = ir.VectorType(F16, LANES)
_BYTES = ir.VectorType(I8, 2 * LANES)
# The bytes of 8 floats whose upper halves are bytes 0 to 15; 128 stands for a byte of zeros.
_UPPER_HALVES = [byte for at in range(0, 16, 2) for byte in (128, 128, at, at + 1)]

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Below the first the result counts as 0; above the second it would overflow.
_LEAST, _MOST = -87.0, 88.0
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
# 2^f less 1 over f, by least squares whose weights grow where the error is largest; then 1.
_EXP2 = (1.3264728e-3, 9.6715132e-3, 5.5507337e-2, 2.4022242e-1, 6.9314698e-1, 1.0)
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_LN2, _ROOT_2 = 0.69314718055994531, 1.41421356237309505
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERF_P = 0.3275911


class Stored(StrEnum):
    """How numbers lie in memory. INT8 are whole numbers, E4M3 floats of 8 bits: both mean nothing
    without a scale.
    """

    FLOAT = "float32"
    BFLOAT = "bfloat16"
    HALF = "float16"
    INT8 = "int8"
    E4M3 = "e4m3"

    @property
    def num_bytes(self) -> int:
        return {Stored.FLOAT: 4, Stored.INT8: 1, Stored.E4M3: 1}.get(self, 2)


_OF_FLOATS = {
    torch.float32: Stored.FLOAT,
    torch.bfloat16: Stored.BFLOAT,
    torch.float16: Stored.HALF,
}
_LOADED = {Stored.FLOAT: F32, Stored.INT8: I8, Stored.E4M3: I8}


def stored_as(dtype: torch.dtype) -> Stored | None:
    """Return how floats of this dtype lie in memory, None for a dtype that no kernel reads."""
    return _OF_FLOATS.get(dtype)


def load_floats(
    code: Code, address: Value, offset: Value | int, stored: Stored, count: int = LANES
) -> Value:
    """Load `count` stored numbers as float32, 8 or 16."""
    if stored is Stored.BFLOAT and count == LANES and has_feature("avx2"):
        return _load_bfloats(code, address, offset)
    loaded = code.load(address, offset, ir.VectorType(_LOADED.get(stored, I16), count))
    return as_floats(code, loaded, stored)


def load_stored(
    code: Code, address: Value, offset: Value | int, stored: Stored, count: int = 1
) -> Value:
    """Load a stored float as float32, or a vector of `count` of them."""
    floats, ints, halves, shorts = (
        kind if count == 1 else ir.VectorType(kind, count) for kind in (F32, I32, F16, I16)
    )
    if stored is Stored.FLOAT:
        return code.load(address, offset, floats)
    if stored is Stored.HALF:
        return code.convert("fpext", code.load(address, offset, halves), floats)
    assert stored is Stored.BFLOAT
    bits = code.convert("zext", code.load(address, offset, shorts), ints)
    return code.as_bits(bits << 16, floats)


def _load_bfloats(code: Code, address: Value, offset: Value | int) -> Value:
    """Load 8 bfloat16, the upper halves of float32, with AVX2's shuffle of bytes.

    It works in halves of 128 bits, so both get all that is loaded. Widening and shifting take four
    times as long on processors that have AVX2 in halves.
    """
    loaded = code.load(address, offset, _BYTES)
    both = code.picked(loaded, [*range(16), *range(16)])
    order = Value(code, ir.Constant(both.type, _UPPER_HALVES))
    bits = code.call("llvm.x86.avx2.pshuf.b", both.type, both, order)
    return code.as_bits(bits, F32S)


def turned(code: Code, vectors: Sequence[Value]) -> list[Value]:
    """Return the numbers of vectors of 8 times a Hadamard matrix, as `kv_code.turned`."""
    found, step = list(vectors), 1
    while step < LANES:  # pairs of one vector: the first gets the sum, the second the difference
        lanes = [lane ^ step for lane in range(LANES)]
        signs = [-1.0 if lane & step else 1.0 for lane in range(LANES)]
        factors = Value(code, ir.Constant(F32S, signs))
        found = [code.picked(vector, lanes) + vector * factors for vector in found]
        step *= 2
    step = 1
    while step < len(found):
        pairs = [(found[i & ~step], found[i | step]) for i in range(len(found))]
        found = [
            first - second if i & step else first + second
            for i, (first, second) in enumerate(pairs)
        ]
        step *= 2
    return found


def load_floats_of_group(code: Code, address: Value, first: Value, group: int) -> list[Value]:
    """Load `group` float32 from number `first` on, as vectors of 8."""
    return [code.load(address, (first + part) * 4, F32S) for part in range(0, group, LANES)]


def write_turned(code: Code, address: Value, width: int, group: int) -> None:
    """Write: turn `width` float32 in place, as `kv_code.turned_queries`."""
    factor = code.floats(1 / group)
    with code.loop(0, width, group) as first:
        vectors = load_floats_of_group(code, address, first, group)
        for part, value in enumerate(turned(code, vectors)):
            code.store(value * factor, address, (first + part * LANES) * 4)


def as_floats(code: Code, loaded: Value, stored: Stored) -> Value:
    """Return a vector of stored numbers, floats of 16 bits given as whole numbers, as float32."""
    if stored is Stored.FLOAT:
        return loaded
    halves, floats, ints = (ir.VectorType(kind, loaded.type.count) for kind in (F16, F32, I32))
    if stored is Stored.INT8:
        return code.convert("sitofp", code.convert("sext", loaded, ints), floats)
    if stored is Stored.E4M3:
        return from_e4m3_by_256(code, loaded) * 256.0
    if stored is Stored.HALF:
        return code.convert("fpext", code.as_bits(loaded, halves), floats)
    return code.as_bits(code.convert("zext", loaded, ints) << 16, floats)


def from_e4m3_by_256(code: Code, loaded: Value) -> Value:
    """Return floats of 8 bits as float32 divided by 256: as float16, of exponents 8 more."""
    shorts, halves, floats = (ir.VectorType(kind, loaded.type.count) for kind in (I16, F16, F32))
    # The sign is twice in front of what follows it; the second is no bit of the exponent.
    bits = (code.convert("sext", loaded, shorts) << 7) & -0x4001
    return code.convert("fpext", code.as_bits(bits, halves), floats)


def as_stored(code: Code, values: Value, stored: Stored) -> Value:
    """Round 8 floats to the nearest float that memory can hold, ties to even.

    Returns them as they lie there: float32, or whole numbers of 16 bits.
    """
    if stored is Stored.HALF:
        return code.as_bits(code.convert("fptrunc", values, _F16S), _I16S)
    if stored is Stored.BFLOAT:
        bits = code.as_bits(values, I32S)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return code.convert("trunc", bits >> 16, _I16S)
    return values


def store_floats(
    code: Code, values: Value, address: Value, offset: Value | int, stored: Stored
) -> None:
    """Round 8 floats as `as_stored` does, and store them."""
    code.store(as_stored(code, values, stored), address, offset)


def copy_floats(code: Code, source: Value, target: Value, count: Value | int) -> None:
    """Write: copy `count` float32, whole vectors, from one address to another."""
    with code.loop(0, count, LANES) as index:
        code.store(code.load(source, index * 4, F32S), target, index * 4)


def exp(code: Code, x: Value) -> Value:
    """Return exp of a vector of floats; 0 far below -87, no infinity above 88. A NaN stays one."""
    count = x.type.count

    def floats(value: float) -> Value:
        return code.floats(value, count)

    if count == 2 * LANES and has_feature("avx512f"):
        return _scaled_exp(code, x)
    is_zero = x < _LEAST
    # In this order a NaN fails both comparisons and stays: bounds first, at no further instruction.
    x = code.least(floats(_MOST), code.greatest(floats(_LEAST), x))
    n = code.call(f"llvm.rint.v{count}f32", x.type, x * floats(_LOG2_E))
    r = x - n * floats(_LN2_HIGH)
    r = r - n * floats(_LN2_LOW)
    polynomial = reduce(lambda total, factor: total * r + floats(factor), _EXP[1:], floats(_EXP[0]))
    value = polynomial * (r * r) + r + floats(1.0)
    power = (code.convert("fptosi", n, ir.VectorType(I32, count)) + 127) << 23
    value = value * code.as_bits(power, x.type)
    return code.select(is_zero, floats(0.0), value)


def _scaled_exp(code: Code, x: Value) -> Value:
    """Return exp of 16 floats: 2^n * 2^f, by half as many instructions, as one multiplies by 2^n.

    2^f is a polynomial of degree 5, right to 1e-7 between -1/2 and 1/2. Far from 0 the rounding
    of x in units of log 2 shows: the result is off by up to 6e-7 of it at -10, 4e-6 at -80.
    """
    count, kind = x.type.count, x.type
    x = code.least(code.floats(_MOST, count), x)
    n = code.call(f"llvm.rint.v{count}f32", kind, x * code.floats(_LOG2_E, count))
    rest = x * code.floats(_LOG2_E, count) - n
    first = code.floats(_EXP2[0], count)
    power = reduce(lambda total, each: total * rest + code.floats(each, count), _EXP2[1:], first)
    mask = Value(code, ir.Constant(ir.IntType(16), -1))
    rounding = Value(code, ir.Constant(I32, 4))
    return code.call("llvm.x86.avx512.mask.scalef.ps.512", kind, power, n, power, mask, rounding)


def log_of_one_and(code: Code, x: Value) -> Value:
    """Return log(1 + x) of 8 floats from 0 to 1, right to about 1e-7.

    After Cephes' logf: of a number above the root of 2, half, whose logarithm is less by that of 2.
    """
    number = x + code.floats(1.0)
    is_large = number > _ROOT_2
    rest = code.select(is_large, number * code.floats(0.5), number) - code.floats(1.0)
    polynomial = reduce(
        lambda total, factor: total * rest + code.floats(factor), _LOG[1:], code.floats(_LOG[0])
    )
    square = rest * rest
    value = rest + (polynomial * rest * square - square * code.floats(0.5))
    return value + code.select(is_large, code.floats(_LN2), code.floats(0.0))


def softplus(code: Code, x: Value) -> Value:
    """Return log(1 + exp(x)) of 8 floats."""
    zero = code.floats(0.0)
    size = code.greatest(x, zero - x)
    return code.greatest(x, 0.0) + log_of_one_and(code, exp(code, zero - size))


def sigmoid(code: Code, x: Value) -> Value:
    one, zero = (code.floats(value, x.type.count) for value in (1.0, 0.0))
    return one / (one + exp(code, zero - x))


def tanh(code: Code, x: Value) -> Value:
    """Return tanh of a vector of floats, right to about 1e-7."""
    one, two = (code.floats(value, x.type.count) for value in (1.0, 2.0))
    return sigmoid(code, x * two) * two - one


def erf(code: Code, x: Value) -> Value:
    """Return erf of 8 floats, right to 1.5e-7."""
    size = code.call("llvm.fabs.v8f32", F32S, x)
    one = code.floats(1.0)
    t = one / (one + size * code.floats(_ERF_P))
    series = reduce(
        lambda total, factor: total * t + code.floats(factor), _ERF[1:], code.floats(_ERF[0])
    )
    value = one - series * t * exp(code, code.floats(0.0) - size * size)
    return code.call("llvm.copysign.v8f32", F32S, value, x)


def reciprocal_root(code: Code, x: Value) -> Value:
    """Return 1 / sqrt(x) of one float."""
    return code.single(1.0) / code.call("llvm.sqrt.f32", F32, x)
