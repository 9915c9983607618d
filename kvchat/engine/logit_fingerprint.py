"""Logit fingerprints, and KV errors: whether what a forward pass computes again is what was kept of
a context.

A checksum proves that KV came back as it was written. What it cannot prove is that it was right
then, and that it is this model's: that is what computing a few of its tokens once more is for.
Three things are compared:

- The top logits of the last token, with those that were kept: its *fingerprint*. They are blind to
much
  of a model: that a middle layer makes other keys hardly changes what one token finds among a
  thousand.
- The keys and values of each of these tokens, with those that came back: how far they lie apart.
- How much longer or shorter these are than those: an error of scale shows in the sum of many
  numbers long before it shows in any of them.

Tolerances are several times what right KV was off at most, computed alone and beside 5, 21 and 100
other rows after prefills and decoding, three tokens at a time; demo model of 8 layers, and random
weights in the shapes of llama, qwen3 and gemma3; `--weights` as they are:

    .             logits    farthest token   middle token   scale, of one token
    float32       1.4e-6    5.7e-6           1.9e-6         1.7e-7
    float16       -         4.7e-3           1.9e-3         4.0e-4
    bfloat16      6.8e-3    8.1e-2           1.8e-2         5.2e-3

Knows tensors and numbers; knows no tier and no request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvchat.cache.tier import LogitFingerprint

_NUM_LOGITS = 8
# Of fewer tokens the middle one may be the one that rounding has hit hardest.
_FEWEST_FOR_A_MIDDLE = 3


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the KV of a few tokens, computed again, is off; infinite where it is no number.

    `typical` is the distance of the middle token's keys or values, over the usual length, in the
    layer where that is largest: one of three may be far off, as where two experts score alike and
    rounding chooses between them (0.7, once in 400 right restores). Of fewer tokens `most` is that
    of the farthest. `scale` is the middle token's relative difference of length.
    """

    most: float = 0.0
    typical: float = 0.0
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a right forward may be off: its logits, and its keys and values."""

    logits: float
    kv: Deviation

    def allows(self, logits: float, kv: Deviation) -> bool:
        """Whether these deviations are rounding; what is no number is not."""
        is_near = kv.most <= self.kv.most and kv.typical <= self.kv.typical
        return logits <= self.logits and is_near and kv.scale <= self.kv.scale


_TOLERANCES = {
    torch.float32: Tolerance(1e-4, Deviation(1e-4, 4e-5, 1e-5)),
    torch.float16: Tolerance(8e-3, Deviation(2e-2, 8e-3, 2e-3)),
    torch.bfloat16: Tolerance(6e-2, Deviation(0.2, 6e-2, 1.5e-2)),
}


def tolerance(*dtypes: torch.dtype) -> Tolerance:
    """Return what the coarsest of the dtypes that take part allows."""
    coarsest = _TOLERANCES[torch.bfloat16]
    found = [_TOLERANCES.get(dtype, coarsest) for dtype in dtypes]
    return max(found, key=lambda each: each.kv.most)


def fingerprint_of(logits: torch.Tensor) -> LogitFingerprint | None:
    """Return the fingerprint of a token's logits, [vocab_size] float32; None where one is no
    number.
    """
    values, token_ids = logits.topk(min(_NUM_LOGITS, len(logits)))
    found = [float(value) for value in values.tolist()]
    if not all(math.isfinite(value) for value in found):
        return None
    return LogitFingerprint(tuple(token_ids.tolist()), tuple(found))


def logit_deviation(fingerprint: LogitFingerprint, logits: torch.Tensor) -> float:
    """Return how far logits, [vocab_size] float32, lie from a fingerprint: the largest distance,
    over the fingerprint's largest logit. Infinity where something is no number.
    """
    if max(fingerprint.token_ids) >= len(logits):
        return math.inf
    found = logits[list(fingerprint.token_ids)].tolist()
    distances = [abs(new - old) for new, old in zip(found, fingerprint.values, strict=True)]
    if not all(math.isfinite(distance) for distance in distances):
        return math.inf
    largest = max(abs(value) for value in fingerprint.values)
    return max(distances) / max(largest, 1e-6)


def kv_deviation(kv_errors: Sequence[torch.Tensor]) -> Deviation:
    """Return how far tokens are off, of which `CacheManager.kv_error` has told one each."""
    if not kv_errors:
        return Deviation()
    squares, products, own = torch.stack(list(kv_errors)).unbind(dim=2)  # [num_tokens, num_tensors]
    distances = squares.sqrt()
    if not bool(distances.isfinite().all() and products.isfinite().all()):
        return Deviation(math.inf, math.inf, math.inf)
    is_enough = len(kv_errors) >= _FEWEST_FOR_A_MIDDLE
    # Where a token has values of next to nothing rounding would be taken for an error of scale.
    scales = products / own.clamp_min(0.5)
    return Deviation(
        most=float(distances.max()) if not is_enough else 0.0,
        typical=float(distances.median(dim=0).values.max()) if is_enough else 0.0,
        scale=float(scales.median(dim=0).values.abs().max()),
    )
