"""The sampler against a plain twin that treats one row at a time, and its noise against chance."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvchat.core.types import SamplingParams
from kvchat.engine.sampler import SamplingRow, parameters_of, sample, sample_seed
from kvchat_kernels import host_sampler
from kvchat_kernels.host_sampler import draw_token, gumbel_noise, row_key, token_logprobs
from kvchat_kernels.sampler import RowDraw

CHI_SQUARE_9_DEGREES = 27.88  # exceeded by chance once in a thousand


@pytest.fixture(autouse=True, params=["host", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to sample: as on a CPU, and as on a GPU, with the twin in place of the kernels."""
    if request.param == "device":
        monkeypatch.setattr("kvchat.engine.sampler.uses_triton", lambda device, impl: True)


def plain_sample(logits: list[float], row: SamplingRow) -> int:
    """Draw as the documentation says, in float64, candidate by candidate."""
    params = row.params
    scores = list(logits)
    if row.context_ids is not None:
        for token in set(row.context_ids.tolist()):
            penalty = params.repetition_penalty
            scores[token] = (
                scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            )
        for token, times in Counter(row.context_ids.tolist()[row.num_prompt :]).items():
            scores[token] -= params.presence_penalty + times * params.frequency_penalty
    for token, bias in params.logit_bias:
        scores[token] += bias
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    if params.temperature == 0.0:
        return order[0]
    scaled = {token: scores[token] / params.temperature for token in order}
    kept = order[: params.top_k] if params.top_k else order
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in kept}
    total = sum(weights.values())
    before, nucleus = 0.0, []
    for token in kept:
        if before >= params.top_p:
            break
        nucleus.append(token)
        before += weights[token] / total
    likely = [t for t in nucleus if weights[t] >= params.min_p * weights[order[0]]]
    noise = gumbel_noise(*row_key(row.seed, row.position), np.arange(len(logits))).tolist()
    return max(likely, key=lambda token: scaled[token] + noise[token])


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 7, 1024, 1500, 3000]),
        top_p=rng.choice([1.0, 1.0, 0.2, 0.9, 0.97]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.25, -1.0]),
        logit_bias=rng.choice([(), (), ((2, 3.0), (7, -100.0)), ((0, 1.25),)]),
    )


def random_row(rng: random.Random, vocab_size: int) -> SamplingRow:
    params = random_params(rng)
    context = None
    if params.penalises:
        common = rng.randrange(vocab_size)
        drawn = (rng.choice([common, rng.randrange(vocab_size)]) for _ in range(30))
        context = torch.tensor(list(drawn))
    place = rng.randrange(1000)
    return SamplingRow(params, rng.randrange(1 << 62), place, context, rng.randrange(31))


@pytest.mark.parametrize(("vocab_size", "spread"), [(10, 2.0), (1024, 1.5), (3000, 0.3), (3000, 3)])
def test_every_mixture_of_filters_draws_what_the_plain_twin_draws(vocab_size, spread):
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        rows = [random_row(rng, vocab_size) for _ in range(8)]
        logits = spread * torch.randn(8, vocab_size, generator=generator)
        expected = [
            plain_sample(line, row) for line, row in zip(logits.tolist(), rows, strict=True)
        ]

        assert sample(logits.clone(), rows) == expected, rows


def test_top_p_is_a_share_of_what_a_long_top_k_leaves() -> None:
    """With top-k beyond the candidates looked at first, top-p was once taken of the whole
    vocabulary, and kept tokens that the two filters in order do not."""
    logits = torch.full((1, 20_000), -3.0)
    logits[0, :400] = torch.linspace(5.0, 4.9, 400)
    params = SamplingParams(temperature=1.0, top_k=1500, top_p=0.99)
    rows = [SamplingRow(params, seed=3, position=p) for p in range(400)]
    weights = torch.softmax(logits[0].double().topk(1500).values, 0)
    num_kept = int((weights.cumsum(0) - weights < 0.99).sum())
    of_everything = torch.softmax(logits[0].double(), 0)
    assert int((of_everything.cumsum(0) - of_everything < 0.99).sum()) > num_kept

    drawn = sample(logits.expand(400, -1).clone(), rows)

    assert max(drawn) < num_kept


def test_a_row_draws_the_same_whatever_rows_stand_beside_it() -> None:
    """Low-precision logits tie; the two ways to sort them order ties differently, and once a flat
    neighbour decided which way a row went."""
    tied = torch.randn(4000, generator=torch.Generator().manual_seed(2)).mul(2).round()
    flat = torch.zeros(4000)
    few = SamplingParams(temperature=1.0, top_k=50)
    nucleus = SamplingParams(temperature=1.0, top_p=0.99)
    for position in range(60):
        row = SamplingRow(few, seed=9, position=position)
        neighbour = SamplingRow(nucleus, seed=1, position=position)

        [alone] = sample(tied[None].clone(), [row])
        beside, _ = sample(torch.stack([tied, flat]), [row, neighbour])

        assert beside == alone


def test_logits_of_a_real_forward_pass_can_be_penalised() -> None:
    """They are tensors of inference mode, which refuse to be changed outside it: every request with
    a repetition penalty failed, and no test saw it, for their logits were ordinary ones."""
    with torch.inference_mode():
        logits = torch.tensor([[2.0, 1.9]])
    row = SamplingRow(
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        seed=0,
        position=0,
        context_ids=torch.tensor([0]),
    )

    assert sample(logits, [row]) == [1]


def test_a_penalty_counts_a_token_once_however_often_it_occurred() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    row = SamplingRow(
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        seed=0,
        position=0,
        context_ids=torch.tensor([0, 0, 0, 2]),
    )

    assert sample(logits, [row]) == [0]
    assert logits[0].tolist() == pytest.approx([2.0 / 1.2, 1.5, -1.2])


def test_presence_counts_a_generated_token_once_and_frequency_each_time() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0]])
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    row = SamplingRow(params, 0, 6, torch.tensor([3, 3, 0, 1, 1, 1]), num_prompt=2)

    assert sample(logits, [row]) == [2]
    assert logits[0].tolist() == [1.25, 0.75, 2.0, 2.0]


def test_a_bias_of_a_token_beyond_a_narrow_draft_model_is_left_out() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((1, 5.0), (9, 100.0)))

    assert sample(torch.zeros(1, 4), [SamplingRow(params, 0, 0)]) == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-8])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_smallest_temperatures_draw_the_likeliest_token(temperature: float, top_k: int) -> None:
    """Dividing by a temperature that is 0 in float32 once gave NaN, and NaN wins every argmax."""
    logits = torch.tensor([[0.0, -3.0, 2.0, 1.9], [-5.0, -1.0, -2.0, -9.0]])
    params = SamplingParams(temperature=temperature, top_k=top_k)
    for position in range(50):
        rows = [SamplingRow(params, 1, position), SamplingRow(params, 2, position)]
        assert sample(logits.clone(), rows) == [2, 1]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 50), float("-inf"))
    logits[0, [3, 30]] = torch.tensor([0.0, 1.0])
    for params in (SamplingParams(temperature=5.0), SamplingParams(temperature=5.0, top_p=0.999)):
        drawn = {
            sample(logits.clone(), [SamplingRow(params, 4, position)])[0] for position in range(100)
        }
        assert drawn == {3, 30}


@pytest.mark.parametrize(
    ("params", "by_seed"),
    [
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=0.6), False),
        (SamplingParams(temperature=1.7, top_k=10), True),
        (SamplingParams(temperature=1.0, top_p=0.99999), False),
    ],
    ids=["plain, many seeds", "plain", "cold", "filtered, many seeds", "nucleus of everything"],
)
def test_frequencies_are_those_of_softmax(params: SamplingParams, by_seed: bool) -> None:
    count = 20_000
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 2.0, -1.0, 0.2, 0.9, -0.3, 1.4])
    rows = [
        SamplingRow(params, seed=i if by_seed else 5, position=17 if by_seed else i)
        for i in range(count)
    ]
    expected = torch.softmax(logits.double() / params.temperature, 0) * count

    drawn = torch.tensor(sample(logits.expand(count, -1).clone(), rows)).bincount(minlength=10)

    chi_square = ((drawn - expected) ** 2 / expected).sum().item()
    assert chi_square < CHI_SQUARE_9_DEGREES


@pytest.mark.parametrize("way", ["host"], indirect=True)  # both ways have this noise
def test_consecutive_draws_are_independent() -> None:
    """Pairs of neighbours in position, and of samples at one position, fall evenly."""
    count = 20_000
    coins, others = (
        torch.tensor([gumbel_noise(*row_key(seed, n), np.arange(2)).argmax() for n in range(count)])
        for seed in (7, sample_seed(7, 1))
    )

    for one, other in ((coins[:-1], coins[1:]), (coins, others)):
        counts = torch.bincount(2 * one + other, minlength=4).double()
        expected = len(one) / 4
        assert ((counts - expected) ** 2 / expected).sum().item() < 16.3  # 3 degrees, p = 0.001


def test_noise_is_finite_and_named_by_seed_position_and_token() -> None:
    tokens = np.arange(200_000)
    noise, later, other = (
        gumbel_noise(*row_key(seed, position), tokens)
        for seed, position in ((1, 10), (1, 11), (2, 10))
    )

    assert np.isfinite(noise).all()
    assert noise[777] == gumbel_noise(*row_key(1, 10), np.array([777]))[0]
    assert not np.array_equal(noise, later)
    assert not np.array_equal(noise, other)
    # Mean of a Gumbel variable is Euler's constant, its variance pi^2 / 6.
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_the_extremes_of_the_hash_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row looks only at tokens that can be drawn, so no noise is larger than it says."""
    extremes = np.array([0, 1, 0xFFFFFFFF, 0xFFFFFFFE], np.uint32)
    monkeypatch.setattr(host_sampler, "_mix", lambda _: extremes.copy())

    noise = gumbel_noise(0, 0, np.arange(4))

    assert np.isfinite(noise).all()
    assert noise.max() == noise[0] <= host_sampler.MOST_NOISE < noise[0] + 0.01


def test_seeds_and_positions_do_not_collide() -> None:
    keys = {row_key(seed, position) for seed in range(100) for position in range(100)}
    assert len(keys) == 10_000
    assert sample_seed(123, 0) == 123


def test_neighbouring_seeds_share_no_samples() -> None:
    """Sample 2 of seed 1 once was sample 1 of seed 2, so trying seeds in turn repeated answers."""
    assert len({sample_seed(seed, n) for seed in range(50) for n in range(8)}) == 400


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=5)])
def test_logits_that_are_no_numbers_draw_no_token(params: SamplingParams) -> None:
    """NaN is the largest of all to argmax: a model whose float16 had overflowed answered with the
    token of the first NaN, over and over."""
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    logits[1, 40] = float("nan")

    with pytest.raises(ValueError, match="not numbers"):
        sample(logits, [SamplingRow(params, 1, 0)] * 2)


def test_greedy_rows_ignore_every_filter_and_the_noise() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    params = replace(SamplingParams(temperature=0.0), top_k=5, top_p=0.1, min_p=0.4)

    drawn = sample(logits.clone(), [SamplingRow(params, seed, 0) for seed in range(3)])

    assert drawn == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("num_rows", range(1, 10))
def test_what_kernels_are_given_lies_alike_for_any_number_of_rows(num_rows: int) -> None:
    """A column that begins elsewhere had the sampler compiled again in the middle of an answer."""
    rng = random.Random(num_rows)
    rows = [
        SamplingRow(
            SamplingParams(rng.random(), rng.randrange(5000), rng.random(), rng.random()),
            rng.randrange(1 << 64),
            rng.randrange(1000),
        )
        for _ in range(num_rows)
    ]

    given = parameters_of(rows, 4000, torch.device("cpu"))

    columns = (given.temperature, given.top_k, given.top_p, given.min_p, given.seeds)
    assert all(column.data_ptr() % 16 == 0 for column in (*columns, given.positions))
    params = [row.params for row in rows]
    assert given.temperature.tolist() == pytest.approx([each.temperature for each in params])
    assert given.top_k.tolist() == [min(each.top_k, 4000) for each in params]
    assert given.top_p.tolist() == pytest.approx([each.top_p for each in params])
    assert given.min_p.tolist() == pytest.approx([each.min_p for each in params])
    assert [seed % (1 << 64) for seed in given.seeds.tolist()] == [row.seed for row in rows]
    assert given.positions.tolist() == [row.position for row in rows]


def test_the_likeliest_tokens_are_those_that_torch_finds() -> None:
    """numpy looks for them on a CPU: the first of equal logits, and NaN wherever it stands."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-4, 5, (40, 37), generator=generator).float()
    logits[7] = float("-inf")
    row = SamplingRow(SamplingParams(temperature=0.0), seed=0, position=0)

    assert sample(logits.clone(), [row] * 40) == logits.argmax(dim=-1).tolist()
    for place in (0, 20, 36):
        broken = logits.clone()
        broken[11, place] = float("nan")
        with pytest.raises(ValueError, match="not numbers"):
            sample(broken, [row] * 40)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ends", [(3.4e38, -3.4e38), (math.inf, 0.0), (math.nan, 0.0)])
def test_no_warning_is_written_about_logits_that_no_sound_model_has(ends):
    """numpy's lines on standard error stood in the terminal's display."""
    logits = np.array([0.0, *ends], dtype=np.float32)
    for draw in (RowDraw(1.0), RowDraw(2.0, top_p=0.9), RowDraw(1e-30, top_k=2, min_p=0.1)):
        assert draw_token(logits, draw, position=1) in ((1,) if ends[0] == ends[0] else (-1,))
    logprob, _ = token_logprobs(logits, 1, num_top=2)
    assert logprob == 0.0 if math.isfinite(ends[0]) else math.isnan(logprob)
