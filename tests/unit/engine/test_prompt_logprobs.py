"""Logprobs of prompts: those that the plain softmax gives, however a prompt is computed."""

from dataclasses import replace

import pytest

from kvchat.core.events import PromptScored, TokensGenerated
from kvchat.core.types import FinishReason, TokenLogprobs
from kvchat.engine import scheduler
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Speculation
from support.engine_harness import EngineHarness
from support.fixed_drafts import FixedDraftPolicy
from support.remembering_model import GREEDY, logits_of
from support.trial_drafters import OracleDrafter
from unit.engine.test_logprobs import check

PROMPT = tuple((7 * i) % 39 + 1 for i in range(50))
SPEC = RequestSpec(PROMPT, GREEDY, max_tokens=6, num_top_logprobs=2, scores_prompt=True)


def scored(engine: EngineHarness, number: int) -> list[TokenLogprobs]:
    events = engine.events[number]
    found = [each for e in events if isinstance(e, PromptScored) for each in e.logprobs]
    kinds = [type(e) for e in events if isinstance(e, PromptScored | TokensGenerated)]
    assert kinds == sorted(kinds, key=lambda kind: kind is TokensGenerated), (
        "the prompt comes first"
    )
    return found


def check_all(engine: EngineHarness, number: int) -> None:
    spec = engine.specs[number]
    told = scored(engine, number)
    assert tuple(each.token_id for each in told) == spec.prompt_ids[1:]
    for index, each in enumerate(told, start=1):
        check(each, list(spec.prompt_ids[:index]), spec.num_top_logprobs or 0)
    engine.assert_complete(number)


@pytest.mark.parametrize("most", [1, 3, 128])
def test_all_of_a_prompt_is_scored_in_chunks_beside_other_requests(monkeypatch, most):
    """`most` is how many tokens of all requests one step scores."""
    monkeypatch.setattr(scheduler, "_MAX_SCORED", most)
    speculation = Speculation([OracleDrafter(error=0.3)], policy=FixedDraftPolicy(3))
    engine = EngineHarness(speculation=speculation)
    plain = engine.submit(RequestSpec((9, 8, 7), GREEDY, max_tokens=30))
    numbers = [
        engine.submit(spec)
        for spec in (
            SPEC,
            replace(SPEC, prompt_ids=PROMPT[:21], num_samples=3, num_top_logprobs=0),
            replace(SPEC, prompt_ids=(5,)),
            replace(SPEC, prompt_ids=(5, 6), max_tokens=0),
        )
    ]
    engine.run()

    for number in numbers:
        check_all(engine, number)
    assert engine.generated(numbers[3]) == []
    engine.assert_complete(plain)


def test_what_is_cached_is_computed_again_and_then_cached() -> None:
    """KV gives no logits. A request that wants none finds what the scored one has computed."""
    engine = EngineHarness()
    engine.submit(RequestSpec(PROMPT, GREEDY, max_tokens=6))
    engine.run()
    number = engine.submit(SPEC)
    engine.run()
    after = engine.submit(replace(SPEC, scores_prompt=False))
    engine.run()

    check_all(engine, number)
    assert engine.ending(number).usage.cached.total == 0
    assert engine.ending(after).usage.cached.total == len(PROMPT) - 1


def test_a_prompt_that_gives_way_is_scored_on_from_where_it_was() -> None:
    """A pool too small for all: each token's logprobs are told once all the same."""
    engine = EngineHarness(num_blocks=26, max_step_tokens=8)
    growing = [engine.submit(RequestSpec((3 + n, 4, 5), GREEDY, max_tokens=40)) for n in range(2)]
    numbers = [engine.submit(replace(SPEC, prompt_ids=(n, *PROMPT))) for n in (1, 2)]
    siblings = engine.submit(replace(SPEC, prompt_ids=PROMPT[3:9], num_samples=4, max_tokens=12))
    engine.run()

    assert engine.engine.status().num_preempted > 0
    for number in (*numbers, siblings):
        check_all(engine, number)
    for number in growing:
        engine.assert_complete(number)


def test_a_stop_token_has_its_logprobs_in_the_end() -> None:
    """A program that scores texts asks for one token, and counts on an entry for it."""
    stop = int(logits_of(PROMPT).argmax())
    engine = EngineHarness()
    number = engine.submit(replace(SPEC, stop_token_ids=frozenset({stop})))
    engine.run()

    ending = engine.ending(number)
    assert engine.generated(number) == []
    assert ending.reason is FinishReason.STOP
    assert ending.stop_logprobs is not None
    assert ending.stop_logprobs.token_id == stop
    check(ending.stop_logprobs, list(PROMPT), 2)


def test_a_prompt_without_an_answer_is_computed_and_kept() -> None:
    engine = EngineHarness()
    number = engine.submit(RequestSpec(PROMPT, GREEDY, max_tokens=0))
    engine.run()

    usage = engine.ending(number).usage
    assert engine.ending(number).reason is FinishReason.LENGTH
    assert (usage.prefilled_tokens, usage.completion_tokens) == (len(PROMPT), 0)
    assert engine.cache.num_cached_tokens(PROMPT) >= len(PROMPT) - 4
