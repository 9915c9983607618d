"""Which draws top-k, top-p and min-p refuse, decided by counting; passes over one row's logits.

Tokens stand in the order of their scaled logits, equal ones in that of their ids: `above` a token
are those before it. Whatever the filters keep is the beginning of that order.
"""

import triton
import triton.language as tl

from kvchat_kernels.sampler.noise import gumbel, row_key, scaled_logits


@triton.jit
def decide(
    row_ptr, drawn, mass, largest, temperature, top_k, top_p, min_p, seed, position,
    VOCAB: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return the draw from what the filters keep, beginning with a draw from more than that.

    drawn   the id with the best noisy score among a superset of what is kept
    mass    the sum of all scaled logits' exponentials
    """
    first, second = row_key(seed, position)
    if (top_k > 0) & (top_k < VOCAB) & (top_p < 1.0):
        mass = _mass_of_top_k(row_ptr, top_k, largest, temperature, VOCAB, BLOCK_V)
    is_refused = True
    while is_refused:
        logit = tl.load(row_ptr + drawn).to(tl.float32)
        scaled = scaled_logits(logit, largest, temperature)
        num_above, mass_above = _above(row_ptr, drawn, scaled, largest, temperature, VOCAB, BLOCK_V)
        is_refused = (top_k > 0) & (num_above >= top_k)
        is_refused |= mass_above >= top_p * mass
        is_refused |= tl.exp(scaled) < min_p
        is_refused &= num_above > 0
        if is_refused:
            # What stands below a refused token would be refused as well.
            drawn = _draw_above(
                row_ptr, drawn, scaled, largest, temperature, first, second, VOCAB, BLOCK_V
            )
    return drawn


@triton.jit
def _tile(row_ptr, start, largest, temperature, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr):
    token = start + tl.arange(0, BLOCK_V)  # [V]
    logits = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return token, scaled_logits(logits, largest, temperature)


@triton.jit
def _above(
    row_ptr, drawn, scaled, largest, temperature, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Count the tokens above one, and sum their exponentials."""
    count = tl.zeros((BLOCK_V,), dtype=tl.int32)
    mass = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK_V):
        token, other = _tile(row_ptr, start, largest, temperature, VOCAB, BLOCK_V)
        is_above = (other > scaled) | ((other == scaled) & (token < drawn))
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(other), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _draw_above(
    row_ptr, drawn, scaled, largest, temperature, first, second, VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return the id of the best noisy score above a token; there is one above it."""
    best = tl.full((BLOCK_V,), float("-inf"), dtype=tl.float32)
    best_id = tl.full((BLOCK_V,), 2147483647, dtype=tl.int32)
    for start in range(0, VOCAB, BLOCK_V):
        token, other = _tile(row_ptr, start, largest, temperature, VOCAB, BLOCK_V)
        is_above = (other > scaled) | ((other == scaled) & (token < drawn))
        if tl.sum(is_above.to(tl.int32), axis=0) > 0:
            scores = tl.where(is_above, other + gumbel(token, first, second), float("-inf"))
            best_id = tl.where(scores > best, token, best_id)
            best = tl.maximum(scores, best)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_id, 2147483647), axis=0)


@triton.jit
def _mass_of_top_k(
    row_ptr, top_k, largest, temperature, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Sum the exponentials of the `top_k` largest scaled logits.

    Finds the top_k-th among them by its bits: a scaled logit is no more than 0, so the bits of its
    absolute value, read as an integer, grow as the logit falls.
    """
    low = tl.full((), -1, tl.int32)  # fewer than top_k tokens have at most these bits
    high = tl.full((), 0x7F800000, tl.int32)  # at least top_k have: these are infinity's
    num_high = tl.full((), VOCAB, tl.int32)
    while (high - low > 1) & (num_high != top_k):
        middle = low + (high - low) // 2
        count, _ = _within(row_ptr, middle, largest, temperature, VOCAB, BLOCK_V)
        if count >= top_k:
            high = middle
            num_high = count
        else:
            low = middle
    count, mass = _within(row_ptr, high, largest, temperature, VOCAB, BLOCK_V)
    # Of tokens that are equal to the top_k-th, only some are among the top_k.
    last = tl.exp(-high.to(tl.float32, bitcast=True))
    return mass - (count - top_k).to(tl.float32) * last


@triton.jit
def _within(row_ptr, bits, largest, temperature, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr):
    """Count the tokens whose bits are no more than `bits`, and sum their exponentials."""
    count = tl.zeros((BLOCK_V,), dtype=tl.int32)
    mass = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK_V):
        token, other = _tile(row_ptr, start, largest, temperature, VOCAB, BLOCK_V)
        is_within = (tl.abs(other).to(tl.int32, bitcast=True) <= bits) & (token < VOCAB)
        count += is_within.to(tl.int32)
        mass += tl.where(is_within, tl.exp(other), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)
