"""Draws token ids from logits on the device: temperature, top-k, top-p, min-p, hashed noise.

sampler.md describes how the kernels filter without sorting.
"""

from dataclasses import dataclass, fields

import torch

from kvchat_kernels.launch import Launch, next_power_of_2, uses_triton

_CHUNK = 2048
# The groups of a chunk whose largest logits are known. A top-k of up to as many tokens as a row has
# groups gives a bound: 62 for 32,000 tokens.
_GROUPS = 4
_TILE = 4096
# The most candidates that are sorted.
_MAX_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class RowDraw:
    """The sampling parameters of one row, without its position; see SamplerRows.

    `seed` must fit int64, `top_k` int32.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """Parameters of each row, all [num_rows] on the device of the logits.

    temperature   float32; 0 takes the most likely token
    top_k         int32, the number of tokens to draw from; 0 for all
    top_p         float32, the share of the probability to draw from; 1 for all
    min_p         float32, the smallest probability relative to the most likely token's; 0 for any
    seeds         int64, the low 64 bits of each seed
    positions     int64, the index in its sequence of the token to draw
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        dtypes = [torch.float32, torch.int32, torch.float32, torch.float32]
        dtypes += [torch.int64, torch.int64]
        for field, dtype in zip(fields(self), dtypes, strict=True):
            tensor = getattr(self, field.name)
            assert tensor.dtype == dtype, (field.name, tensor.dtype)
            assert tensor.shape == self.temperature.shape, (field.name, tensor.shape)
            assert tensor.is_contiguous(), field.name


def sample_tokens(logits: torch.Tensor, rows: SamplerRows, *, impl: str = "auto") -> torch.Tensor:
    """Draw one token id per row.

    logits   [num_rows, vocab_size] float32, bfloat16 or float16, last dimension dense; not changed
    rows     each row's parameters
    impl     auto, triton or reference

    Returns [num_rows] int64 on the device, owned by the caller; -1 for a row with a NaN. A row's
    token depends only on its own logits and parameters. The filters apply in the order top-k,
    top-p, min-p, each to the probabilities that the previous one left. They always keep the most
    likely token. Of equal logits the lower id counts as more likely.
    """
    assert logits.ndim == 2, logits.shape
    assert logits.shape[0] == rows.temperature.shape[0]
    assert logits.shape[1] < 2**31
    if uses_triton(logits.device, impl):
        chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        for launch in sampler_launches(logits, rows, chosen):
            launch.run()
        return chosen
    return sample_tokens_reference(logits, rows)


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


def sampler_launches(
    logits: torch.Tensor, rows: SamplerRows, chosen: torch.Tensor
) -> tuple[Launch, Launch, Launch]:
    """Return the launches that fill `chosen`, [num_rows] int64, in their order."""
    from kvchat_kernels.sampler_kernels import decide_kernel, draw_kernel, likeliest_kernel

    assert logits.stride(1) == 1
    num_rows, vocab = logits.shape
    num_chunks = -(-vocab // _CHUNK)

    def scratch(dtype: torch.dtype, width: int = num_chunks) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    shared = {
        "logits_ptr": logits,
        "peak_ptr": scratch(torch.float32, num_chunks * _GROUPS),
        "count_ptr": scratch(torch.int32, 1),
        "row_stride": logits.stride(0),
        "num_chunks": num_chunks,
        "VOCAB": vocab,
        "GROUPS": _GROUPS,
    }
    likeliest = {
        **shared,
        "peak_id_ptr": scratch(torch.int32, num_chunks * _GROUPS),
        "BLOCK_V": _CHUNK,
    }
    draw = {
        **shared,
        "temperature_ptr": rows.temperature,
        "top_k_ptr": rows.top_k,
        "min_p_ptr": rows.min_p,
        "seed_ptr": rows.seeds,
        "position_ptr": rows.positions,
        "mass_ptr": scratch(torch.float32),
        "score_ptr": scratch(torch.float32),
        "drawn_ptr": scratch(torch.int32),
        "key_ptr": scratch(torch.int64, _MAX_CANDIDATES),
        "BLOCK_V": _CHUNK,
        "BLOCK_G": next_power_of_2(num_chunks * _GROUPS),
        "MOST": _MAX_CANDIDATES,
    }
    decide = {
        **draw,
        "top_p_ptr": rows.top_p,
        "peak_id_ptr": likeliest["peak_id_ptr"],
        "chosen_ptr": chosen,
        "BLOCK_V": _TILE,
        "BLOCK_C": next_power_of_2(num_chunks),
    }
    grid = (num_rows, num_chunks)
    return (
        Launch(likeliest_kernel, grid, likeliest),
        Launch(draw_kernel, grid, draw, num_warps=8),
        Launch(decide_kernel, (num_rows,), decide, num_warps=16),
    )
