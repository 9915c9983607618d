"""Draws token ids from logits on the host, by numpy, with the meaning of `sampler.sample_tokens`.

A step's logits are a row of up to 262,144 numbers, of which a few can be drawn. So a row is read
two or three times to find these, and only they are sorted and get noise. torch's operators, which
sort and sum whole rows, took 2 to 3 ms for each token of a model of 10 ms a step, and up to 44 ms
where the likeliest 1,024 tokens did not decide. Plain twin: `sample_tokens_reference`.
"""

import math
from typing import Any

import numpy as np

from kvchat_kernels.sampler import RowDraw

Array = np.ndarray[Any, Any]

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
# No noise is larger: that of the smallest uniform number, 2**-33.
MOST_NOISE = 22.875
# So many of the likeliest tokens are looked at first, where no top-k says how many.
_FEW = 128
# A row is cut into so many groups for each token that is looked for.
_GROUPS = 8
_LOWEST = float(np.finfo(np.float32).min)
_TINY = float(np.finfo(np.float32).tiny)
# Of logits at both ends of float32, of a tiny temperature, and of a logit that is infinite.
_quiet = np.errstate(over="ignore", invalid="ignore")


@_quiet
def draw_token(logits: Array, draw: RowDraw, position: int) -> int:
    """Draw the token of one row, [vocab_size] float32, which stays as it is; -1 if one is NaN."""
    likeliest = int(logits.argmax())
    largest = float(logits[likeliest])
    if math.isnan(largest):
        return -1
    if draw.temperature == 0 or math.isinf(largest):
        return likeliest
    return _Draw(logits, draw, position, largest).token()


class _Draw:
    """The draw of one row whose largest logit is finite. `scaled` logits are of the row's
    temperature, and the largest of them is 0.
    """

    def __init__(self, logits: Array, draw: RowDraw, position: int, largest: float) -> None:
        self._logits = logits
        self._largest = largest
        self._temperature = max(draw.temperature, _TINY)
        self._draw = draw
        self._key = row_key(draw.seed, position)
        self._mass: float | None = None

    def token(self) -> int:
        """Return the best kept token of the likeliest, or of all that can be better than that."""
        least = _LOWEST
        if self._draw.min_p > 0 and not self._has_share:
            least = self._logit(math.log(self._draw.min_p))
        bound = max(least, _reached(self._logits, self._draw.top_k or _FEW))
        token, score, has_end = self._best(bound)
        if has_end or self._draw.top_k or bound <= least:
            return token
        better = self._logit(score - MOST_NOISE)
        return token if better >= bound else self._best(max(least, better))[0]

    def _logit(self, scaled: float) -> float:
        """Return a little less than the logit of a scaled one, and a finite number."""
        return max(_LOWEST, self._largest + self._temperature * (scaled - 1e-3))

    def _best(self, bound: float) -> tuple[int, float, bool]:
        """Return the best kept token of those with a logit from `bound` on, its scaled logit with
        noise, and whether the filters refuse one of them.
        """
        tokens, scaled = self._likeliest(bound)
        num_kept = self._num_kept(scaled)
        scores = scaled[:num_kept] + gumbel_noise(*self._key, tokens[:num_kept])
        best = int(scores.argmax())
        return int(tokens[best]), float(scores[best]), num_kept < len(tokens)

    def _likeliest(self, bound: float) -> tuple[Array, Array]:
        """Return the tokens with a logit from `bound` on, and their scaled logits; the most likely
        are first where that matters to a filter.
        """
        if self._filters:
            tokens, distances = _in_order(self._logits, self._largest, bound)
        else:
            tokens, distances = _from(self._logits, self._largest, bound)
        return tokens, distances.astype(np.float64) / -self._temperature

    @property
    def _has_share(self) -> bool:
        """Whether top-p is a share of the top-k's probability: all of these must be known then."""
        return self._draw.top_k > 0 and self._draw.top_p < 1

    @property
    def _filters(self) -> bool:
        return self._draw.top_k > 0 or self._draw.top_p < 1 or self._draw.min_p > 0

    def _num_kept(self, scaled: Array) -> int:
        """Return how many of the likeliest tokens the filters keep: always a first part."""
        if not self._filters:
            return len(scaled)
        top_k, top_p = self._draw.top_k, self._draw.top_p
        weights = np.exp(scaled[:top_k] if top_k else scaled)
        is_kept = weights >= self._draw.min_p
        if top_p < 1:
            before = weights.cumsum() - weights
            is_kept &= before < top_p * (weights.sum() if self._has_share else self._total())
        return max(1, int(np.count_nonzero(is_kept)))

    def _total(self) -> float:
        """Return the sum of the exponentials of all scaled logits."""
        if self._mass is None:
            scaled = (self._logits - np.float32(self._largest)) / np.float32(self._temperature)
            self._mass = float(np.exp(scaled, out=scaled).sum())
        return self._mass


def _reached(logits: Array, count: int) -> float:
    """Return a logit that at least `count` tokens reach and not many more: the `count`-th largest
    of the largest of groups; -inf for a row that has not enough tokens for that.
    """
    num_groups = _GROUPS * count
    depth = len(logits) // num_groups
    if depth < 2:
        return -math.inf
    largest = logits[: depth * num_groups].reshape(depth, num_groups).max(axis=0)
    largest.partition(num_groups - count)
    return float(largest[num_groups - count])


def _from(logits: Array, largest: float, bound: float) -> tuple[Array, Array]:
    """Return the tokens with a logit from `bound` on, and their distances to the largest."""
    tokens = np.flatnonzero(logits >= np.float32(bound))
    return tokens, np.float32(largest) - logits.take(tokens)


def _in_order(logits: Array, largest: float, bound: float) -> tuple[Array, Array]:
    """Return the same with the most likely first, of equals the lower id.

    A distance is not negative, so its bits, read as an integer, grow with it.
    """
    tokens, distances = _from(logits, largest, bound)
    keys = distances.view(np.uint32).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= tokens.view(np.uint64)
    keys.sort()
    tokens = (keys & np.uint64(_MASK_32)).view(np.int64)
    return tokens, (keys >> np.uint64(32)).astype(np.uint32).view(np.float32)


@_quiet
def token_logprobs(
    logits: Array, token_id: int, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return the logprob of a token of one row, [vocab_size] float32, which stays as it is, and the
    `num_top` likeliest tokens with theirs. All are NaN if one logit is.
    """
    largest = float(logits.max())
    scaled = logits - np.float32(largest)
    own = float(scaled[token_id])
    log_total = float(np.log(np.exp(scaled, out=scaled).sum()))
    if not num_top:
        return own - log_total, []
    tokens, distances = _in_order(logits, largest, max(_LOWEST, _reached(logits, num_top)))
    values = -log_total - distances[:num_top].astype(np.float64)
    return own - log_total, list(zip(tokens[:num_top].tolist(), values.tolist(), strict=True))


def gumbel_noise(first: int, second: int, token_ids: Array) -> Array:
    """Return standard Gumbel noise of a row with this `row_key`, float64 [num_candidates].

    token_ids   int64 [num_candidates]

    Adding it to log-probabilities and taking the largest draws from the distribution.
    """
    bits = _mix(_mix(token_ids.astype(np.uint32) ^ np.uint32(first)) ^ np.uint32(second))
    # Half a step above 0, and one float32 step below 1: both logarithms stay finite.
    uniform = ((bits + 0.5) * 2.0**-32).astype(np.float32).clip(max=np.float32(1 - 2.0**-24))
    noise: Array = -np.log(-np.log1p(-uniform.astype(np.float64)))
    return noise


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Return two 32-bit keys for a seed and a position (splitmix64: Steele et al., OOPSLA 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + position + 1) & _MASK_64
    state = splitmix(splitmix(state) ^ (seed & _MASK_64))
    return state & _MASK_32, state >> 32


def splitmix(state: int) -> int:
    """Mix 64 bits."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _mix(bits: Array) -> Array:
    """Mix uint32 numbers in place (the finaliser of MurmurHash3, Appleby)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    return bits
