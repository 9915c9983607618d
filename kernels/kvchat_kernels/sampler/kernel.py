"""The sampler as three Triton kernels: likeliest tokens, draws, decisions.

Legend: V elements of a chunk or tile of a row's logits, C chunks of a row. `scaled` logits are
divided by the temperature, and the largest of them is 0.
"""

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch, next_power_of_2
from kvchat_kernels.sampler.filters import decide
from kvchat_kernels.sampler.noise import gumbel, row_key, scaled_logits
from kvchat_kernels.sampler.operands import SamplerRows

_CHUNK = 2048
_TILE = 4096


@triton.jit
def likeliest_kernel(
    logits_ptr, peak_ptr, peak_id_ptr, row_stride, num_chunks, VOCAB: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk) finds a chunk's largest logit, and its id or -1 where one is a NaN."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
    inside = token < VOCAB
    logits = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    peak = tl.max(logits, axis=0)
    peak_id = tl.min(tl.where((logits == peak) & inside, token, 2147483647), axis=0)
    num_broken = tl.sum((logits != logits).to(tl.int32), axis=0)
    tl.store(peak_ptr + row * num_chunks + chunk, peak)
    tl.store(peak_id_ptr + row * num_chunks + chunk, tl.where(num_broken > 0, -1, peak_id))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, min_p_ptr, seed_ptr, position_ptr, peak_ptr, mass_ptr,
    score_ptr, drawn_ptr, row_stride, num_chunks, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk) sums a chunk's exponentials, and draws from what may be kept of it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0:
        return
    column = tl.arange(0, BLOCK_C)  # [C]
    peaks = tl.load(peak_ptr + row * num_chunks + column, mask=column < num_chunks,
                    other=float("-inf"))  # fmt: skip
    largest = tl.max(peaks, axis=0)
    # At least `top_k` logits are no less than the top_k-th largest of the chunks' largest.
    top_k = tl.load(top_k_ptr + row)
    bound = tl.sum(tl.where(column == top_k - 1, tl.sort(peaks, descending=True), 0.0), axis=0)
    bound = tl.where((top_k > 0) & (top_k <= num_chunks), bound, float("-inf"))
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
        first, second = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        scores = scaled + gumbel(token, first, second)
        scores = tl.where((scaled >= least) & (token < VOCAB), scores, float("-inf"))
        score = tl.max(scores, axis=0)
        drawn = tl.min(tl.where(scores == score, token, 2147483647), axis=0)
    tl.store(score_ptr + row * num_chunks + chunk, score)
    tl.store(drawn_ptr + row * num_chunks + chunk, drawn)


@triton.jit
def decide_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, peak_ptr,
    peak_id_ptr, mass_ptr, score_ptr, drawn_ptr, chosen_ptr, row_stride, num_chunks,
    VOCAB: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (row,) takes the best draw, and draws again as long as the filters refuse it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)  # [C]
    inside = column < num_chunks
    places = row * num_chunks + column
    peaks = tl.load(peak_ptr + places, mask=inside, other=float("-inf"))
    peak_ids = tl.load(peak_id_ptr + places, mask=inside, other=2147483647)
    largest = tl.max(peaks, axis=0)
    likeliest = tl.min(tl.where(peaks == largest, peak_ids, 2147483647), axis=0)
    temperature = tl.load(temperature_ptr + row)
    is_drawn = (temperature > 0) & (tl.abs(largest) < float("inf"))
    if tl.min(peak_ids, axis=0) < 0:
        tl.store(chosen_ptr + row, tl.full((), -1, tl.int64))
    elif is_drawn:
        mass = tl.sum(tl.load(mass_ptr + places, mask=inside, other=0.0), axis=0)
        scores = tl.load(score_ptr + places, mask=inside, other=float("-inf"))
        drawn_ids = tl.load(drawn_ptr + places, mask=inside, other=2147483647)
        best = tl.min(tl.where(scores == tl.max(scores, axis=0), drawn_ids, 2147483647), axis=0)
        chosen = decide(
            logits_ptr + row * row_stride, best, mass, largest, temperature,
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row),
            tl.load(seed_ptr + row), tl.load(position_ptr + row), VOCAB, BLOCK_V,
        )  # fmt: skip
        tl.store(chosen_ptr + row, chosen.to(tl.int64))
    else:
        tl.store(chosen_ptr + row, likeliest.to(tl.int64))


def sampler_launches(
    logits: torch.Tensor, rows: SamplerRows, chosen: torch.Tensor
) -> tuple[Launch, Launch, Launch]:
    """Return the launches that fill `chosen`, [num_rows] int64, in their order."""
    assert logits.stride(1) == 1
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)

    def scratch(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, num_chunks, dtype=dtype, device=logits.device)

    shape = {"row_stride": logits.stride(0), "VOCAB": vocab, "num_chunks": num_chunks}
    likeliest = {
        "logits_ptr": logits,
        "peak_ptr": scratch(torch.float32),
        "peak_id_ptr": scratch(torch.int32),
        **shape,
        "BLOCK_V": _CHUNK,
    }
    draw = {
        "logits_ptr": logits,
        "temperature_ptr": rows.temperature,
        "top_k_ptr": rows.top_k,
        "min_p_ptr": rows.min_p,
        "seed_ptr": rows.seeds,
        "position_ptr": rows.positions,
        "peak_ptr": likeliest["peak_ptr"],
        "mass_ptr": scratch(torch.float32),
        "score_ptr": scratch(torch.float32),
        "drawn_ptr": scratch(torch.int32),
        **shape,
        "BLOCK_V": _CHUNK,
        "BLOCK_C": next_power_of_2(num_chunks),
    }
    decide = {
        **draw,
        "top_p_ptr": rows.top_p,
        "peak_id_ptr": likeliest["peak_id_ptr"],
        "chosen_ptr": chosen,
        "BLOCK_V": _TILE,
    }
    grid = (num_rows, num_chunks)
    return (
        Launch(likeliest_kernel, grid, likeliest),
        Launch(draw_kernel, grid, draw),
        Launch(decide_kernel, (num_rows,), decide, num_warps=16),
    )
