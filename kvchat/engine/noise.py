"""Counter-based noise: the same seed, position and token id always draw the same number.

Nothing is consumed and no state is kept, so a sampled text does not depend on what else ran in the
batch, on chunking or on preemption. Knows hashing; knows no logits.
"""

import torch

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def gumbel_noise(seeds: list[int], positions: list[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise for each candidate token of each row.

    seeds, positions   one per row; `positions` is the index of the token to be drawn
    token_ids          [num_rows, num_candidates] or [num_candidates] int64

    Returns [num_rows, num_candidates] float32. Adding it to log-probabilities and taking the
    largest draws from the distribution (the Gumbel-max trick).
    """
    keys = torch.tensor(
        [row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)],
        device=token_ids.device,
    )
    bits = _mix(_mix(token_ids ^ keys[:, :1]) ^ keys[:, 1:])
    # Half a step away from 0, and from 1 by float32's last place: both logarithms stay finite.
    uniform = ((bits.double() + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Return two 32-bit keys for a seed and a position (splitmix64: Steele et al., OOPSLA 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + position + 1) & _MASK_64
    state = _splitmix(_splitmix(state) ^ (seed & _MASK_64))
    return state & _MASK_32, state >> 32


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of the `sample`-th completion of one prompt; sample 0 keeps the seed.

    The seed is scrambled before the sample is added: neighbouring seeds must not share samples.
    """
    return seed if sample == 0 else _splitmix((_splitmix(seed & _MASK_64) + sample) & _MASK_64)


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit integers held in int64 (the finaliser of MurmurHash3, Appleby)."""
    bits = bits & _MASK_32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _MASK_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _MASK_32
    return bits ^ (bits >> 16)
