"""The sampler as three Triton kernels: likeliest tokens, draws, decisions.

Tokens are ordered by descending scaled logit, then by id; `above` a token are the tokens before it.
The filters keep a prefix of this order. Where few tokens can be kept, these candidates are sorted
and cut. Otherwise a drawn token is accepted or refused by counting, in passes over the row.

Shapes: V elements of a chunk or tile of a row's logits, G groups of a chunk, C chunks or groups of
a row, K candidates. `scaled` logits are divided by the temperature, and the largest of them is 0.
"""

import triton
import triton.language as tl


@triton.jit
def scaled_logits(logits, largest, temperature):
    """Divide by the temperature; with a tiny temperature the result may be -inf, never NaN."""
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

    Computes in float64 up to the first logarithm. The largest noise comes from the smallest uniform
    numbers, where a fast float32 logarithm of 1 - u has a large relative error.
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


@triton.jit
def decide(
    row_ptr, drawn, mass, largest, temperature, top_k, top_p, min_p, seed, position,
    VOCAB: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return the draw from the tokens the filters keep, starting with a draw from a superset.

    drawn   the id with the best noisy score in a superset of the kept tokens
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
            # The filters refuse every token below a refused one, so draw from those above it.
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
    """Return the number of tokens above `drawn`, and the sum of their exponentials."""
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
    """Return the id of the best noisy score above `drawn`; there must be a token above it."""
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
    """Return the sum of the exponentials of the `top_k` largest scaled logits.

    Finds the top_k-th one by bisection of its bits: a scaled logit is at most 0, so the bits of its
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
    # Of the tokens equal to the top_k-th, only some are among the top_k: subtract the others.
    last = tl.exp(-high.to(tl.float32, bitcast=True))
    return mass - (count - top_k).to(tl.float32) * last


@triton.jit
def _within(row_ptr, bits, largest, temperature, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the number of tokens whose bits are at most `bits`, and their exponentials' sum."""
    count = tl.zeros((BLOCK_V,), dtype=tl.int32)
    mass = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK_V):
        token, other = _tile(row_ptr, start, largest, temperature, VOCAB, BLOCK_V)
        is_within = (tl.abs(other).to(tl.int32, bitcast=True) <= bits) & (token < VOCAB)
        count += is_within.to(tl.int32)
        mass += tl.where(is_within, tl.exp(other), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def draw_candidate(
    keys, mass, top_k, top_p, min_p, seed, position, VOCAB: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return the draw from the candidates that the filters keep.

    keys   [K] int64 from `candidate_key`, the largest int64 where there is no candidate
    mass   the sum of all scaled logits' exponentials, those of the other tokens too
    """
    keys = tl.sort(keys)
    rank = tl.arange(0, BLOCK_K)
    scaled = -(keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    token = (keys & 0xFFFFFFFF).to(tl.int32)
    is_kept = keys < 0x7FFFFFFFFFFFFFFF
    weights = tl.where(is_kept, tl.exp(scaled), 0.0)
    if (top_k > 0) & (top_k < VOCAB):
        is_kept &= rank < top_k
        weights = tl.where(is_kept, weights, 0.0)
        mass = tl.sum(weights, axis=0)
    is_kept &= tl.cumsum(weights, axis=0) - weights < top_p * mass
    is_kept &= weights >= min_p
    is_kept |= rank == 0
    first, second = row_key(seed, position)
    scores = tl.where(is_kept, scaled + gumbel(token, first, second), float("-inf"))
    return tl.min(tl.where(scores == tl.max(scores, axis=0), token, 2147483647), axis=0)


@triton.jit
def candidate_key(scaled, token):
    """Return int64 numbers in the order of the tokens: a scaled logit is at most 0, so the bits of
    its absolute value, read as an integer, grow as the logit falls.
    """
    return (tl.abs(scaled).to(tl.int32, bitcast=True).to(tl.int64) << 32) | token


@triton.jit
def likeliest_kernel(
    logits_ptr, peak_ptr, peak_id_ptr, count_ptr, row_stride, num_chunks, VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk) finds the largest logit of each group of a chunk and its id, or -1 if a
    logit is NaN. It sets the row's number of candidates to 0.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tl.store(count_ptr + row, 0, mask=chunk == 0)
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
    inside = token < VOCAB
    logits = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    groups = tl.reshape(logits, (GROUPS, BLOCK_V // GROUPS))
    peaks = tl.max(groups, axis=1)  # [G]
    is_peak = (groups == peaks[:, None]) & tl.reshape(inside, groups.shape)
    peak_ids = tl.min(tl.where(is_peak, tl.reshape(token, groups.shape), 2147483647), axis=1)
    num_broken = tl.sum((groups != groups).to(tl.int32), axis=1)
    places = (row * num_chunks + chunk) * GROUPS + tl.arange(0, GROUPS)
    tl.store(peak_ptr + places, peaks)
    tl.store(peak_id_ptr + places, tl.where(num_broken > 0, -1, peak_ids))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, min_p_ptr, seed_ptr, position_ptr, peak_ptr, mass_ptr,
    score_ptr, drawn_ptr, count_ptr, key_ptr, row_stride, num_chunks, VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr, GROUPS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk) sums a chunk's exponentials, draws from a superset of its kept tokens,
    and adds these to the row's candidates if there is a bound. Their order differs from run to run.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0:
        return
    column = tl.arange(0, BLOCK_G)  # [C]
    num_groups = num_chunks * GROUPS
    peaks = tl.load(peak_ptr + row * num_groups + column, mask=column < num_groups,
                    other=float("-inf"))  # fmt: skip
    largest = tl.max(peaks, axis=0)
    # At least `top_k` logits are no less than the top_k-th largest of the groups' largest.
    top_k = tl.load(top_k_ptr + row)
    bound = tl.sum(tl.where(column == top_k - 1, tl.sort(peaks, descending=True), 0.0), axis=0)
    bound = tl.where((top_k > 0) & (top_k <= num_groups), bound, float("-inf"))
    least = scaled_logits(bound, largest, temperature)
    least = tl.maximum(least, tl.log(tl.load(min_p_ptr + row)) - 1e-3)
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
    logits = tl.load(logits_ptr + row * row_stride + token, mask=token < VOCAB,
                     other=float("-inf"))  # fmt: skip
    scaled = scaled_logits(logits.to(tl.float32), largest, temperature)
    tl.store(mass_ptr + row * num_chunks + chunk, tl.sum(tl.exp(scaled), axis=0))
    score = float("-inf")
    drawn = 2147483647
    if tl.max(scaled, axis=0) >= least:
        is_candidate = (scaled >= least) & (token < VOCAB)
        first, second = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        scores = tl.where(is_candidate, scaled + gumbel(token, first, second), float("-inf"))
        score = tl.max(scores, axis=0)
        drawn = tl.min(tl.where(scores == score, token, 2147483647), axis=0)
        if least > float("-inf"):
            places = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
            number = tl.sum(is_candidate.to(tl.int32), axis=0)
            places += tl.atomic_add(count_ptr + row, number)
            is_stored = is_candidate & (places < MOST)
            tl.store(key_ptr + row * MOST + places, candidate_key(scaled, token), mask=is_stored)
        else:
            tl.store(count_ptr + row, MOST + 1)
    tl.store(score_ptr + row * num_chunks + chunk, score)
    tl.store(drawn_ptr + row * num_chunks + chunk, drawn)


@triton.jit
def decide_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, peak_ptr,
    peak_id_ptr, mass_ptr, score_ptr, drawn_ptr, count_ptr, key_ptr, chosen_ptr, row_stride,
    num_chunks, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr, GROUPS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Program (row,) draws from the row's candidates. If they are too many or have no bound, it
    takes the best draw, and draws again while the filters refuse it.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)  # [C]
    is_group = group < num_chunks * GROUPS
    group_places = row * num_chunks * GROUPS + group
    peaks = tl.load(peak_ptr + group_places, mask=is_group, other=float("-inf"))
    peak_ids = tl.load(peak_id_ptr + group_places, mask=is_group, other=2147483647)
    largest = tl.max(peaks, axis=0)
    temperature = tl.load(temperature_ptr + row)
    is_drawn = (temperature > 0) & (tl.abs(largest) < float("inf"))
    if tl.min(peak_ids, axis=0) < 0:
        tl.store(chosen_ptr + row, tl.full((), -1, tl.int64))
    elif is_drawn:
        column = tl.arange(0, BLOCK_C)  # [C]
        inside = column < num_chunks
        places = row * num_chunks + column
        mass = tl.sum(tl.load(mass_ptr + places, mask=inside, other=0.0), axis=0)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        count = tl.load(count_ptr + row)
        # Top-p is a share of the top-k's probability, for which all of these must be known.
        has_share = (top_k <= count) | (top_k >= VOCAB) | (top_p >= 1.0)
        if (count <= MOST) & has_share:
            rank = tl.arange(0, MOST)
            keys = tl.load(key_ptr + row * MOST + rank, mask=rank < count, other=0x7FFFFFFFFFFFFFFF)
            chosen = draw_candidate(keys, mass, top_k, top_p, min_p, seed, position, VOCAB, MOST)
        else:
            scores = tl.load(score_ptr + places, mask=inside, other=float("-inf"))
            drawn_ids = tl.load(drawn_ptr + places, mask=inside, other=2147483647)
            best = tl.min(tl.where(scores == tl.max(scores, axis=0), drawn_ids, 2147483647), axis=0)
            chosen = decide(
                logits_ptr + row * row_stride, best, mass, largest, temperature, top_k, top_p,
                min_p, seed, position, VOCAB, BLOCK_V,
            )  # fmt: skip
        tl.store(chosen_ptr + row, chosen.to(tl.int64))
    else:
        likeliest = tl.min(tl.where(peaks == largest, peak_ids, 2147483647), axis=0)
        tl.store(chosen_ptr + row, likeliest.to(tl.int64))
