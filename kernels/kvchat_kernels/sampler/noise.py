"""The sampler's noise and scale inside Triton kernels; `reference.py` has the same in torch.

Knows hashing and one division.
"""

import triton
import triton.language as tl


@triton.jit
def scaled_logits(logits, largest, temperature):
    """Divide by the temperature; a tiny one overflows to -inf only."""
    return tl.div_rn(logits - largest, tl.maximum(temperature, 1.1754943508222875e-38))


@triton.jit
def row_key(seed, position):
    """Return two uint32 keys for an int64 seed and position."""
    seed = seed.to(tl.uint64, bitcast=True)
    state = seed * 0x9E3779B97F4A7C15 + position.to(tl.uint64, bitcast=True) + 1
    state = _splitmix(_splitmix(state) ^ seed)
    return (state & 0xFFFFFFFF).to(tl.uint32), (state >> 32).to(tl.uint32)


@triton.jit
def gumbel(token, first, second):
    """Return standard Gumbel noise for int32 token ids, float32.

    In float64 up to the first logarithm: near 1, where the largest noise comes from, a fast
    logarithm of float32 is off by a share of its result.
    """
    bits = _mix(_mix(token.to(tl.uint32, bitcast=True) ^ first) ^ second)
    uniform = ((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32)
    uniform = tl.minimum(uniform, 0.99999994039535522)
    return -tl.log((-tl.log(1.0 - uniform.to(tl.float64))).to(tl.float32))


@triton.jit
def _splitmix(state):
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)
