"""Constraints in the engine: only allowed tokens, and otherwise the same draws."""

from dataclasses import replace

import pytest
import torch

from kvchat.core.errors import GenerationError
from kvchat.core.events import RequestEvent, RequestFailed, TokensGenerated
from kvchat.core.types import FinishReason, SamplingParams, TokenConstraint
from kvchat.engine.drafters import Offer
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request import Request, RequestSpec
from kvchat.engine.sampler import SamplingRow, sample
from kvchat.engine.speculation import Speculation
from support.engine_harness import EngineHarness
from support.fixed_drafts import FixedDraftPolicy
from support.remembering_model import GREEDY, RisingTokens
from support.stateful_models import load_stateful, open_engine, words
from support.trial_drafters import OracleDrafter

SAMPLED = SamplingParams(temperature=1.3, top_p=0.95, seed=11)


def limited(sampling: SamplingParams, num_samples: int = 1) -> RequestSpec:
    return RequestSpec(
        (5, 6, 7), sampling, max_tokens=30, num_samples=num_samples, new_constraint=RisingTokens
    )


@pytest.fixture(params=["host", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to sample: as on a CPU, and as on a GPU, with the twin in place of the kernels."""
    if request.param == "device":
        monkeypatch.setattr("kvchat.engine.sampler.uses_triton", lambda device, impl: True)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SAMPLED,
        SamplingParams(temperature=2.0, top_k=50),
        SamplingParams(temperature=0.7, min_p=0.3, seed=9),
    ],
)
@pytest.mark.usefixtures("way")
def test_a_limited_row_draws_what_it_would_if_the_others_had_no_probability(params):
    generator = torch.Generator().manual_seed(4)
    for position in range(50):
        logits = torch.randn(1, 70, generator=generator)
        allowed = [3, 8, 40, 69] if position % 2 else [17]
        bits = sum(1 << token for token in allowed).to_bytes(9, "little")
        plain = torch.full((1, 70), float("-inf"))
        plain[0, allowed] = logits[0, allowed]

        [drawn] = sample(logits, [SamplingRow(params, 1, position, allowed=bits)])

        assert drawn in allowed
        assert [drawn] == sample(plain, [SamplingRow(params, 1, position)])


@pytest.mark.usefixtures("way")
def test_ids_beyond_the_bits_are_refused_and_bits_beyond_the_logits_are_ignored() -> None:
    row = SamplingRow(GREEDY, 0, 0)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]])

    assert sample(logits.clone(), [replace(row, allowed=b"\x86")]) == [7]
    assert sample(logits.clone(), [replace(row, allowed=b"\x04\xfe\xff")]) == [9]
    with pytest.raises(GenerationError, match="allows no token"):
        sample(logits.clone(), [replace(row, allowed=b"\x00\x00\xff")])


class _Choosy(OracleDrafter):
    """Must not be asked for the tokens of limited requests."""

    def offer(self, request: Request, most: int) -> Offer | None:
        assert request.constraint is None
        return super().offer(request, most)


def test_limited_requests_share_steps_with_others_and_have_no_drafts() -> None:
    speculation = Speculation([_Choosy()], policy=FixedDraftPolicy(4))
    engine = EngineHarness(speculation=speculation)
    free = RequestSpec((5, 6, 7), SAMPLED, max_tokens=30)
    specs = [
        limited(GREEDY),
        free,
        limited(SAMPLED, num_samples=3),
        limited(replace(SAMPLED, seed=2)),
    ]
    numbers = [engine.submit(spec) for spec in specs]

    engine.run()

    assert not speculation.failures
    for number, spec in zip(numbers, specs, strict=True):
        engine.assert_complete(number)
        usage = engine.ending(number).usage
        assert (usage.drafted_tokens > 0) == (spec is free)


def test_a_constraint_after_which_no_token_can_follow_ends_the_answer() -> None:
    engine = EngineHarness()
    number = engine.submit(limited(SAMPLED))

    engine.run()

    tokens = engine.generated(number)
    assert tokens == sorted(set(tokens))
    assert tokens[-1] >= 37
    assert engine.ending(number).reason is FinishReason.STOP


class _Broken(RisingTokens):
    """Fails at the given place."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__()
        self._place, self._error = place, error

    def allowed(self) -> bytes:
        if self._place == "allowed":
            raise self._error
        return super().allowed()

    def accept(self, token_id: int) -> bool:
        if self._place == "accept":
            raise self._error
        return super().accept(token_id)


@pytest.mark.parametrize("place", ["allowed", "accept"])
@pytest.mark.parametrize(
    ("error", "sentence"),
    [(GenerationError("Too deep."), "Too deep."), (RuntimeError("what"), "failed")],
)
def test_a_constraint_that_fails_ends_its_own_request_only(place, error, sentence):
    def broken() -> TokenConstraint:
        return _Broken(place, error)

    engine = EngineHarness()
    bad = engine.submit(replace(limited(SAMPLED), new_constraint=broken))
    good = engine.submit(limited(SAMPLED))

    engine.run()

    [failed] = engine.failures(bad)
    assert sentence in str(failed.error)
    engine.assert_complete(good)


@pytest.mark.parametrize("speculates", [False, True])
def test_with_recurrent_state_too_it_ends_its_own_request_only(speculates, tmp_path):
    """The step ran again for each request alone, from states that had read its tokens already."""

    def broken() -> TokenConstraint:
        return _Broken("allowed", RuntimeError("what"))

    _, loaded = load_stateful("lfm2", tmp_path)
    spec = RequestSpec(tuple(words(20, 1)), GREEDY, max_tokens=12)

    def answers(*specs: RequestSpec) -> list[list[RequestEvent]]:
        drafts = Speculation([NgramDrafter()], policy=FixedDraftPolicy(3)) if speculates else None
        engine = open_engine(loaded, None, speculation=drafts)
        numbers = [engine.submit(spec) for spec in specs]
        events: list[RequestEvent] = []
        while engine.has_work:
            events += engine.step()
        engine.close()
        return [[e for e in events if e.request_id == number] for number in numbers]

    bad = replace(spec, prompt_ids=tuple(words(30, 2)), new_constraint=broken)
    [alone] = answers(spec)
    failed, beside = answers(bad, spec)

    assert tokens_of(beside) == tokens_of(alone)
    assert len(tokens_of(beside)) == 12
    assert [type(event) for event in failed[-1:]] == [RequestFailed]


def tokens_of(events: list[RequestEvent]) -> list[int]:
    return [t for event in events if isinstance(event, TokensGenerated) for t in event.token_ids]
