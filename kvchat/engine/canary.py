"""Canaries: what a forward pass says about a context, for a later one to be held against.

A canary is the top logits of one token. They alone are blind to much of a model: that a middle
layer makes other keys hardly changes what one token finds among a thousand (measured on the demo
model: key weights off by a tenth, no logit changed). So the token's own keys and values are
compared as well, which need no canary: they are what was kept.

Tolerances are many times what one token's numbers moved when it was computed alone, beside 1 to
512 others, on one thread, and without oneDNN, the worst of a trained model of 8 layers and random
weights in the shape of 0.4 B parameters in 24:

    float32    logits 1.4e-6 of the largest, keys and values 2.1e-6
    bfloat16   logits 6.8e-3, keys and values 2.3e-2

Knows tensors and numbers; knows no tier and no request.
"""

import math
from dataclasses import dataclass

import torch

from kvchat.cache.codec import Canary

_NUM_LOGITS = 8


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a right forward may be off: its logits, and its keys and values."""

    logits: float
    kv: float

    def allows(self, logits: float, kv: float) -> bool:
        """Whether these deviations are rounding; what is no number is not."""
        return logits <= self.logits and kv <= self.kv


_TOLERANCES = {
    torch.float32: Tolerance(1e-3, 1e-3),
    torch.float16: Tolerance(8e-3, 2e-2),
    torch.bfloat16: Tolerance(6e-2, 0.2),
}


def tolerance(*dtypes: torch.dtype) -> Tolerance:
    """Return what the coarsest of the dtypes that take part allows."""
    coarsest = _TOLERANCES[torch.bfloat16]
    found = [_TOLERANCES.get(dtype, coarsest) for dtype in dtypes]
    return max(found, key=lambda each: each.kv)


def canary_of(logits: torch.Tensor) -> Canary | None:
    """Return the canary of a token's logits, [vocab_size] float32; None where one is no number."""
    values, token_ids = logits.topk(min(_NUM_LOGITS, len(logits)))
    found = [float(value) for value in values.tolist()]
    if not all(math.isfinite(value) for value in found):
        return None
    return Canary(tuple(token_ids.tolist()), tuple(found))


def deviation(canary: Canary, logits: torch.Tensor) -> float:
    """Return how far logits, [vocab_size] float32, lie from a canary: the largest distance, over
    the canary's largest logit. NaN or infinity where something is no number.
    """
    if max(canary.token_ids) >= len(logits):
        return math.inf
    found = logits[list(canary.token_ids)].tolist()
    distances = [abs(new - old) for new, old in zip(found, canary.values, strict=True)]
    if not all(math.isfinite(distance) for distance in distances):
        return math.inf
    largest = max(abs(value) for value in canary.values)
    return max(distances) / max(largest, 1e-6)
