"""The torch reference of the sampler: sort, filter, add noise, take the largest.

The noise is a hash of seed, position and token id, with the same bits as the engine's sampler.
"""

import torch

from kvchat_kernels.sampler.operands import SamplerRows

_MASK_32 = 0xFFFFFFFF


def sample_tokens_reference(logits: torch.Tensor, rows: SamplerRows) -> torch.Tensor:
    """Draw one token id per row; see `sample_tokens`."""
    logits = logits.float()
    largest, likeliest = logits.max(dim=-1)
    temperature = rows.temperature.clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (logits - largest[:, None]) / temperature[:, None]
    values, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    scores = values.masked_fill(~_kept(values, rows), float("-inf"))
    scores += gumbel_noise(rows.seeds, rows.positions, token_ids)
    drawn = token_ids.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1)
    is_greedy = (rows.temperature == 0) | largest.isinf()
    return torch.where(is_greedy, likeliest, drawn).masked_fill(largest.isnan(), -1)


def _kept(values: torch.Tensor, rows: SamplerRows) -> torch.Tensor:
    """Return which of the descending logits the filters keep: [num_rows, vocab_size] bool."""
    rank = torch.arange(values.shape[-1], device=values.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, values.shape[-1])
    kept = rank < top_k[:, None]
    probabilities = torch.softmax(values.masked_fill(~kept, float("-inf")), dim=-1)
    kept &= probabilities.cumsum(dim=-1) - probabilities < rows.top_p[:, None]
    kept &= probabilities >= rows.min_p[:, None] * probabilities[:, :1]
    kept[:, 0] = True
    return kept


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise, [num_rows, num_candidates] float32.

    seeds, positions   [num_rows] int64
    token_ids          [num_rows, num_candidates] int64

    The uniform number is at least 2**-33 and at most 1 - 2**-24, so both logarithms are finite.
    """
    state = _times(seeds, 0x9E3779B97F4A7C15) + positions + 1
    state = _splitmix(_splitmix(state) ^ seeds)
    first, second = state & _MASK_32, _shifted(state, 32)
    bits = _mix(_mix(token_ids ^ first[:, None]) ^ second[:, None])
    uniform = ((bits.double() + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _splitmix(state: torch.Tensor) -> torch.Tensor:
    """Mix 64 bits (Steele et al., OOPSLA 2014); relies on the wrap-around of int64 arithmetic."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = _times(state ^ _shifted(state, 30), 0xBF58476D1CE4E5B9)
    state = _times(state ^ _shifted(state, 27), 0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits held in int64 (the finaliser of MurmurHash3, Appleby)."""
    bits = bits & _MASK_32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _MASK_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _MASK_32
    return bits ^ (bits >> 16)


def _times(state: torch.Tensor, factor: int) -> torch.Tensor:
    return state * _signed(factor)


def _shifted(state: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right logically, as an unsigned number."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
