"""What the sampler's kernels must draw, on any device that runs them: what their twin draws.

Called where Triton interprets, with tensors on the CPU, and on a CUDA device.
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.sampler import SamplerRows, sample_tokens
from support.rounding import poisoned_memory


@dataclass(frozen=True)
class Drawing:
    """One set of parameters, as a request has them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


DRAWINGS = {
    "plain": Drawing(),
    "greedy": Drawing(temperature=0.0),
    "hot": Drawing(temperature=2.5),
    "next to no temperature": Drawing(temperature=1e-38),
    "top-k 1": Drawing(top_k=1),
    "top-k 7": Drawing(top_k=7),
    "top-k beyond the vocabulary": Drawing(top_k=10**6),
    "top-p next to 0": Drawing(top_p=1e-6),
    "top-p 0.5": Drawing(temperature=0.7, top_p=0.5),
    "top-p 0.95": Drawing(top_p=0.95),
    "min-p 0.1": Drawing(min_p=0.1),
    "min-p 1": Drawing(min_p=1.0),
    "all": Drawing(temperature=1.3, top_k=12, top_p=0.8, min_p=0.02),
    "top-k 200 and top-p": Drawing(top_k=200, top_p=0.99),
    "fewer above min-p than top-k": Drawing(top_k=200, top_p=0.9, min_p=0.2),
}


def sampler_rows(drawings: list[Drawing], first_position: int, device: str) -> SamplerRows:
    """Rows with these parameters; seeds of all sizes, positions one after another."""
    count = len(drawings)
    seeds = torch.arange(count) * 0x1234_5678_9ABC_DEF1 - 7
    columns = [
        torch.tensor([drawing.temperature for drawing in drawings]),
        torch.tensor([drawing.top_k for drawing in drawings], dtype=torch.int32),
        torch.tensor([drawing.top_p for drawing in drawings]),
        torch.tensor([drawing.min_p for drawing in drawings]),
        seeds,
        torch.arange(first_position, first_position + count),
    ]
    return SamplerRows(*(column.to(device) for column in columns))


def some_logits(num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Random logits; every third row has many equal ones, every fourth a few forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    logits[2::3] = logits[2::3].round()
    logits[3::4, 1::3] = float("-inf")
    return logits


def _drawn(
    logits: torch.Tensor, rows: SamplerRows, max_candidates: int | None = None
) -> torch.Tensor:
    """Draw with the kernels, sorting at most so many candidates; None for as many as usual.

    On a CPU that is few, because the interpreter takes ten times as long to sort 1,024.
    """
    from kvchat_kernels import sampler as kernel

    usual = kernel._MAX_CANDIDATES
    kernel._MAX_CANDIDATES = max_candidates or (usual if logits.is_cuda else 32)
    try:
        return sample_tokens(logits, rows, impl="triton")
    finally:
        kernel._MAX_CANDIDATES = usual


def check_draws(
    vocab: int,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
    max_candidates: int | None = None,
) -> None:
    """All kinds of rows side by side draw the tokens that the twin draws.

    With a `max_candidates` of 2, nearly all are drawn as in a row with too many candidates.
    """
    drawings = list(DRAWINGS.values())
    rows = sampler_rows(drawings, 40 * seed, device)
    logits = some_logits(len(drawings), vocab, seed).to(dtype).to(device)

    with poisoned_memory():
        drawn = _drawn(logits, rows, max_candidates)
    expected = sample_tokens(logits, rows, impl="reference")

    wrong = [name for name, same in zip(DRAWINGS, drawn == expected, strict=True) if not same]
    assert not wrong, (wrong, drawn.tolist(), expected.tolist())


def check_bounds_of_filters(device: str = "cpu") -> None:
    """Among equal logits the lower ids are kept, and next to nothing below min-p is too little."""
    equal = torch.zeros(4, 2100)
    few = _drawn(equal.to(device), sampler_rows([Drawing(top_k=10, top_p=0.35)] * 4, 1, device))
    assert (few < 4).all(), few  # three tenths are less than 0.35, four are not
    assert few.unique().numel() > 1, few

    nearly = torch.full((4, 2100), 0.5).log() - 5e-4
    nearly[:, 1234] = 0.0
    rows = sampler_rows([Drawing(min_p=0.5)] * 4, 1, device)
    assert (_drawn(nearly.to(device), rows) == 1234).all()


def check_broken_logits(device: str = "cpu") -> None:
    """NaN gives -1; infinities give a token, and no row disturbs another."""
    logits = some_logits(6, 2500, 3)
    logits[0, 2300] = float("nan")
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 2400] = float("inf")
    logits[4, 1:] = float("-inf")
    rows = sampler_rows([Drawing(top_k=5, top_p=0.9)] * 6, 3, device)

    drawn = _drawn(logits.to(device), rows).tolist()

    expected = sample_tokens(logits, sampler_rows([Drawing(top_k=5, top_p=0.9)] * 6, 3, "cpu"))
    assert drawn[:2] == [-1, -1], drawn
    assert drawn[3:5] == [2400, 0], drawn
    assert drawn == expected.tolist(), (drawn, expected.tolist())
