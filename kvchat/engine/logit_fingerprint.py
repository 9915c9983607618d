"""Logit fingerprints and KV errors: compare recomputed tokens of a context with its stored KV.

A checksum proves that KV was read as it was written. It does not prove that the KV was right when
written, or that it belongs to this model. For that, a few tokens are recomputed. Three things are
compared:

- The top logits of the last token with the stored ones, its *fingerprint*. They miss many errors:
  wrong keys in a middle layer hardly change the logits of one token among a thousand.
- The recomputed keys and values of each token with the restored ones: their distance.
- The lengths of these vectors: an error of scale shows in the sum of many numbers long before it
  shows in a single number.

Tolerances are several times the largest deviations of right KV. Those were measured alone and
beside 5, 21 and 100 other rows, after prefill and after decoding, three tokens at a time. The
models were the demo model (8 layers) and random weights in the shapes of llama, qwen3 and gemma3;
`--weights` as they are:

    .             logits    farthest token   middle token   scale, of one token
    float32       1.4e-6    5.7e-6           1.9e-6         1.7e-7
    float16       -         4.7e-3           1.9e-3         4.0e-4
    bfloat16      6.8e-3    8.1e-2           1.8e-2         5.2e-3
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvchat.cache.tier import LogitFingerprint

_NUM_LOGITS = 8
# With fewer tokens, the median may be the token with the largest rounding error.
_FEWEST_FOR_A_MIDDLE = 3


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the recomputed KV of a few tokens is off; infinite if a value is not finite.

    Distances are relative to the usual length of a key or value. `typical` is the median distance
    over three or more tokens, in the tensor where it is largest. One of three tokens may be far off
    in right KV: where two experts score alike, rounding chooses between them (a distance of 0.7,
    once in 400 right restores). With fewer tokens, `most` is the largest distance instead. `scale`
    is the median relative difference of length.
    """

    most: float = 0.0
    typical: float = 0.0
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a right forward pass may be off: its logits, and its keys and values."""

    logits: float
    kv: Deviation

    def allows(self, logits: float, kv: Deviation) -> bool:
        """Whether these deviations can be rounding; NaN and infinity cannot."""
        is_near = kv.most <= self.kv.most and kv.typical <= self.kv.typical
        return logits <= self.logits and is_near and kv.scale <= self.kv.scale


_TOLERANCES = {
    torch.float32: Tolerance(1e-4, Deviation(1e-4, 4e-5, 1e-5)),
    torch.float16: Tolerance(8e-3, Deviation(2e-2, 8e-3, 2e-3)),
    torch.bfloat16: Tolerance(6e-2, Deviation(0.2, 6e-2, 1.5e-2)),
}


def tolerance(*dtypes: torch.dtype) -> Tolerance:
    """Return the tolerance of the coarsest of `dtypes`; others count as bfloat16."""
    coarsest = _TOLERANCES[torch.bfloat16]
    found = [_TOLERANCES.get(dtype, coarsest) for dtype in dtypes]
    return max(found, key=lambda each: each.kv.most)


def fingerprint_of(logits: torch.Tensor) -> LogitFingerprint | None:
    """Return the fingerprint of a token's logits, [vocab_size] float32.

    Returns None if one of its top logits is not finite.
    """
    values, token_ids = logits.topk(min(_NUM_LOGITS, len(logits)))
    found = [float(value) for value in values.tolist()]
    if not all(math.isfinite(value) for value in found):
        return None
    return LogitFingerprint(tuple(token_ids.tolist()), tuple(found))


def logit_deviation(fingerprint: LogitFingerprint, logits: torch.Tensor) -> float:
    """Return how far logits, [vocab_size] float32, are from a fingerprint.

    The result is the largest difference over the fingerprint's largest absolute logit. It is
    infinite if a value is not finite, or a token id is not in the vocabulary.
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
    """Return how far tokens are off; `kv_errors` has one `CacheManager.kv_error` for each."""
    if not kv_errors:
        return Deviation()
    squares, products, own = torch.stack(list(kv_errors)).unbind(dim=2)  # [num_tokens, num_tensors]
    distances = squares.sqrt()
    if not bool(distances.isfinite().all() and products.isfinite().all()):
        return Deviation(math.inf, math.inf, math.inf)
    is_enough = len(kv_errors) >= _FEWEST_FOR_A_MIDDLE
    # Without the bound, rounding of a token with tiny values would look like an error of scale.
    scales = products / own.clamp_min(0.5)
    return Deviation(
        most=float(distances.max()) if not is_enough else 0.0,
        typical=float(distances.median(dim=0).values.max()) if is_enough else 0.0,
        scale=float(scales.median(dim=0).values.abs().max()),
    )
