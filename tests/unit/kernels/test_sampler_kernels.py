"""The sampler: its twin draws what the engine's sampler draws, and the kernels what it draws."""

import numpy as np
import pytest
import torch

from kvchat.core.types import SamplingParams
from kvchat.engine.sampler import SamplingRow, sample
from kvchat_kernels.host_sampler import gumbel_noise, row_key
from kvchat_kernels.sampler import gumbel_noise as twin_noise
from kvchat_kernels.sampler import sample_tokens
from support.interpreter import Interpreter
from support.sampler_kernel_checks import (
    DRAWINGS,
    Drawing,
    check_bounds_of_filters,
    check_broken_logits,
    check_draws,
    sampler_rows,
    some_logits,
)

SEEDS = [0, 1, 2**31, 2**63, 2**64 - 1, -5, 12345678901234567890123]


def test_the_noise_is_that_of_the_host() -> None:
    positions = [0, 3, 10**5, 2**31, 7, 8, 9]
    token_ids = torch.cat([torch.arange(1000), torch.tensor([2**31 - 1])])
    low = [(seed & (2**64 - 1)) - (2**64 if seed & 2**63 else 0) for seed in SEEDS]

    noise = twin_noise(torch.tensor(low), torch.tensor(positions), token_ids.expand(7, -1))

    of_host = [
        gumbel_noise(*row_key(seed, position), token_ids.numpy())
        for seed, position in zip(SEEDS, positions, strict=True)
    ]
    assert noise.double().numpy() == pytest.approx(np.array(of_host), abs=2e-6, rel=2e-6)


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("vocab", [1, 40, 3000])
def test_the_twin_draws_what_the_engines_sampler_draws(name: str, vocab: int) -> None:
    drawing = DRAWINGS[name]
    rows = sampler_rows([drawing] * 8, 5, "cpu")
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    params = SamplingParams(
        temperature=drawing.temperature,
        top_k=drawing.top_k,
        top_p=drawing.top_p,
        min_p=drawing.min_p,
    )
    engine_rows = [
        SamplingRow(params, int(seed), int(position))
        for seed, position in zip(rows.seeds, rows.positions, strict=True)
    ]

    assert sample_tokens(logits, rows).tolist() == sample(logits.clone(), engine_rows)


@pytest.mark.parametrize(
    ("drawing", "count"),
    [
        (Drawing(top_k=3), 3),
        (Drawing(top_p=0.6), 2),
        (Drawing(min_p=0.45), 2),
        (Drawing(temperature=0.5, top_k=4, top_p=0.9, min_p=0.05), 3),
        (Drawing(), 5),
    ],
    ids=str,
)
def test_kept_tokens_are_drawn_as_often_as_they_are_likely(drawing: Drawing, count: int) -> None:
    """Chi-square at one in ten thousand; the seeds are fixed, so it passes always or never."""
    logits = torch.tensor([0.4, 0.05, 0.3, 0.1, 0.15]).log()
    rows = sampler_rows([drawing] * 20_000, 0, "cpu")
    kept = torch.softmax(logits / drawing.temperature, 0)
    kept[kept < kept.sort(descending=True).values[count - 1]] = 0
    expected = kept / kept.sum() * 20_000

    seen = torch.bincount(sample_tokens(logits.expand(20_000, -1), rows), minlength=5)

    assert (seen[expected == 0] == 0).all()
    likely = expected > 0
    distance = ((seen - expected).square()[likely] / expected[likely]).sum()
    assert distance < 23.5


def test_what_a_row_draws_does_not_depend_on_the_rows_beside_it() -> None:
    drawings = list(DRAWINGS.values())
    logits = some_logits(len(drawings), 500, 1)
    together = sample_tokens(logits, sampler_rows(drawings, 9, "cpu"))

    rows = sampler_rows(drawings, 9, "cpu")
    for index in range(len(drawings)):
        one = type(rows)(*(getattr(rows, name)[[index]] for name in rows.__slots__))
        assert sample_tokens(logits[[index]], one) == together[index]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (1, torch.float32),
        (63, torch.float32),
        (2048, torch.float16),
        (2049, torch.float32),
        (4100, torch.float32),
    ],
    ids=str,
)
def test_the_kernels_draw_what_the_twin_draws(interpreter, vocab, dtype):
    interpreter(check_draws, vocab, dtype, 1)


def test_without_candidates_the_kernels_draw_the_same(interpreter: Interpreter) -> None:
    interpreter(check_draws, 3000, torch.float32, 3, "cpu", 2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 42))
def test_the_kernels_draw_what_the_twin_draws_many_times(interpreter, seed):
    interpreter(check_draws, (5000, 300, 32000)[seed % 3], torch.float32, seed)


def test_logits_that_are_no_numbers_are_reported_and_infinite_ones_are_borne(interpreter):
    interpreter(check_broken_logits)


def test_filters_are_exact_at_their_bounds(interpreter: Interpreter) -> None:
    interpreter(check_bounds_of_filters)
