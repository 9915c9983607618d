"""Logprobs: those of the model's logits as they are, one for each token told."""

from dataclasses import replace

import pytest
import torch

from kvchat.core.events import TokensGenerated
from kvchat.core.types import SamplingParams, TokenLogprobs
from kvchat.engine.request import RequestSpec
from kvchat.engine.sampler import logprobs_of
from kvchat.engine.speculation import Speculation
from support.engine_harness import EngineHarness
from support.fixed_drafts import FixedDraftPolicy
from support.remembering_model import GREEDY, VOCAB_SIZE, RisingTokens, WatchFor, logits_of
from support.trial_drafters import OracleDrafter

PENALISED = SamplingParams(
    temperature=1.3, top_p=0.9, frequency_penalty=1.5, logit_bias=((3, 4.0),), seed=7
)
SPECS = {
    "greedy": RequestSpec((1, 2, 3), GREEDY, max_tokens=20, num_top_logprobs=3),
    "penalised": RequestSpec((1, 2, 3), PENALISED, max_tokens=20, num_top_logprobs=0),
    "samples": RequestSpec((4, 5), PENALISED, max_tokens=15, num_samples=3, num_top_logprobs=2),
    "different samples": RequestSpec(
        (4, 5), SamplingParams(temperature=3.0, seed=7), 9, num_samples=3, num_top_logprobs=1
    ),
    "constraint": RequestSpec(
        (4, 5), PENALISED, max_tokens=15, new_constraint=RisingTokens, num_top_logprobs=VOCAB_SIZE
    ),
    "stop": RequestSpec(
        (9, 8), GREEDY, max_tokens=40, new_stop_watcher=lambda: WatchFor(5, 1), num_top_logprobs=1
    ),
}


def told(engine: EngineHarness, number: int, sample: int) -> list[TokenLogprobs]:
    return [
        each
        for event in engine.events[number]
        if isinstance(event, TokensGenerated) and event.sample == sample
        for each in event.logprobs
    ]


@pytest.mark.parametrize("drafts", [False, True])
def test_each_token_has_the_logprob_that_the_plain_softmax_gives_it(drafts: bool) -> None:
    drafter = OracleDrafter(error=0.3)
    speculation = Speculation([drafter], policy=FixedDraftPolicy(4)) if drafts else None
    engine = EngineHarness(speculation=speculation)
    numbers = [engine.submit(spec) for spec in SPECS.values()]
    silent = engine.submit(RequestSpec((1, 2, 3), PENALISED, max_tokens=20))

    engine.run()

    assert told(engine, silent, 0) == []
    for number, spec in zip(numbers, SPECS.values(), strict=True):
        engine.assert_complete(number)
        for sample in range(spec.num_samples):
            tokens = engine.generated(number, sample)
            logprobs = told(engine, number, sample)
            assert [each.token_id for each in logprobs] == tokens
            for index, each in enumerate(logprobs):
                check(each, [*spec.prompt_ids, *tokens[:index]], spec.num_top_logprobs or 0)


def check(each: TokenLogprobs, context: list[int], num_top: int) -> None:
    plain = logits_of(context).double()
    plain -= plain.exp().sum().log()
    likeliest = plain.sort(descending=True).indices[:num_top].tolist()
    assert each.logprob == pytest.approx(plain[each.token_id].item(), abs=1e-5)
    assert [token for token, _ in each.top] == likeliest
    assert [value for _, value in each.top] == pytest.approx(plain[likeliest].tolist(), abs=1e-5)


def test_more_logprobs_than_tokens_are_all_there_are() -> None:
    [each] = logprobs_of(torch.tensor([[0.0, 1.0]]), [0], 20)

    assert [token for token, _ in each.top] == [1, 0]


def test_the_text_is_the_same_with_and_without_logprobs() -> None:
    for spec in SPECS.values():
        engine = EngineHarness()
        with_them = engine.submit(spec)
        without = engine.submit(replace(spec, num_top_logprobs=None))

        engine.run()

        assert engine.generated(with_them) == engine.generated(without)
