"""Speculation changes the speed of a text and nothing else, whatever is drafted."""

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

import pytest
import torch

from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine import draft_policy, drafters, ngram, speculation
from kvchat.engine.draft_policy import DraftPolicy
from kvchat.engine.drafters import Drafter, DraftOrder
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request import Request, RequestSpec
from kvchat.engine.speculation import Mode, Speculation, accepted_len
from support.engine_harness import EngineHarness
from support.fixed_drafts import FixedDraftPolicy
from support.matrix import spread
from support.remembering_model import GREEDY, VOCAB_SIZE, WatchFor, complete_without_cache
from support.trial_drafters import FailingDrafter, FickleDrafter, GarbageDrafter, OracleDrafter
from support.virtual_time import VirtualClock

SAMPLED = SamplingParams(temperature=1.3, top_p=0.95, seed=11)
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.4, seed=3)
SPARSE = SamplingParams(
    temperature=0.9, presence_penalty=1.5, frequency_penalty=0.7, logit_bias=((4, -100.0), (5, 2.0))
)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "oracle": OracleDrafter,
    "nearly right": lambda: OracleDrafter(error=0.3),
    "garbage": GarbageDrafter,
    "fickle": FickleDrafter,
    "ngram": NgramDrafter,
}


def speculating(drafter: Drafter, num_tokens: int = 4) -> Speculation:
    return Speculation([drafter], policy=FixedDraftPolicy(num_tokens))


def conversations() -> list[RequestSpec]:
    return [
        RequestSpec((1, 2, 3) * 9, GREEDY, max_tokens=40),
        RequestSpec(tuple(range(30)), SAMPLED, max_tokens=35),
        RequestSpec((9, 8, 7), PENALISED, max_tokens=50),
        RequestSpec((9, 8, 7), SPARSE, max_tokens=50),
        RequestSpec(tuple(range(14)), replace(SAMPLED, seed=5), max_tokens=30, num_samples=3),
    ]


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_step_tokens"),
    spread([(4, 200, 16), (1, 700, 9), (16, 40, 64), (4, 34, 7), (2, 62, 5)], [(4, 34, 7)]),
)
def test_the_text_is_the_same_whatever_is_drafted(drafter, block_size, num_blocks, max_step_tokens):
    engine = EngineHarness(
        num_blocks, block_size, max_step_tokens=max_step_tokens, speculation=speculating(drafter())
    )
    numbers = [engine.submit(spec) for spec in conversations()]

    engine.run()

    for number in numbers:
        engine.assert_complete(number)


def test_a_drafter_that_is_right_saves_steps() -> None:
    plain, fast = EngineHarness(), EngineHarness(speculation=speculating(OracleDrafter()))
    spec = RequestSpec((1, 2, 3), SAMPLED, max_tokens=41)
    plain.complete(spec)
    [number] = [fast.submit(spec)]
    fast.run()

    fast.assert_complete(number)
    assert len(plain.steps) == 41
    assert len(fast.steps) == 1 + 40 / 5
    usage = fast.ending(number).usage
    assert (usage.drafted_tokens, usage.accepted_tokens) == (32, 32)
    assert usage.completion_tokens == 41


def test_with_speculation_off_no_line_of_the_drafting_code_runs() -> None:
    """Counting the drafts for the status ran it after every message."""
    engine = EngineHarness(speculation=Speculation([NgramDrafter()]))
    engine.complete(RequestSpec((1, 2, 3) * 9, GREEDY, max_tokens=40))
    engine.engine.speculation.switch("off")
    drafting = {speculation.__file__, draft_policy.__file__, ngram.__file__, drafters.__file__}
    entered: list[str] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename in drafting:
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(watch)
    try:
        engine.complete(RequestSpec((4, 5, 6) * 9, GREEDY, max_tokens=40))
        status = engine.engine.status()
    finally:
        sys.setprofile(None)

    assert entered == []
    assert status.speculation is not None
    assert status.speculation == engine.engine.speculation.status()
    assert (status.speculation.mode, status.speculation.drafters) == ("off", ("ngram",))


ENDLESS = RequestSpec(tuple(range(14)), replace(SAMPLED, seed=2), max_tokens=200)
FUTURE = complete_without_cache(ENDLESS, 0, 60)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": 9}, FinishReason.LENGTH),
        ({"max_tokens": None}, FinishReason.LENGTH),
        ({"stop_token_ids": frozenset({FUTURE[9]})}, FinishReason.STOP),
        ({"new_stop_watcher": lambda: WatchFor(FUTURE[9], 1)}, FinishReason.STOP),
    ],
    ids=["max tokens", "context's end", "stop token", "stop string"],
)
def test_an_accepted_run_ends_where_plain_decoding_does(change, reason, length):
    spec = replace(ENDLESS, **change)  # type: ignore[arg-type]
    oracle = OracleDrafter(max_context=60)
    engine = EngineHarness(max_context=60, speculation=speculating(oracle, length))
    number = engine.submit(spec)

    engine.run()

    engine.assert_complete(number)
    ending, generated = engine.ending(number), engine.generated(number)
    assert ending.reason is reason
    assert ending.usage.completion_tokens == len(generated) + (ending.stop_token is not None)
    assert ending.usage.accepted_tokens <= ending.usage.drafted_tokens
    # And what was kept of it is right: the next turn goes on from there.
    follow = RequestSpec((*spec.prompt_ids, *generated, 1)[:59], GREEDY, max_tokens=3)
    engine.assert_complete(_run(engine, follow))


def _run(engine: EngineHarness, spec: RequestSpec) -> int:
    number = engine.submit(spec)
    engine.run()
    return number


def test_a_run_accepted_whole_leaves_its_kv_for_the_next_turn() -> None:
    engine = EngineHarness(speculation=speculating(OracleDrafter()))
    spec = RequestSpec((1, 2, 3), GREEDY, max_tokens=30)
    [answer] = engine.complete(spec)

    number = _run(engine, RequestSpec((1, 2, 3, *answer, 5), GREEDY, max_tokens=1))

    assert engine.ending(number).usage.cached.device >= 3 + len(answer) - 1
    engine.assert_complete(number)


@pytest.mark.parametrize("step", range(2, 9))
def test_cancelling_keeps_what_was_said(step: int) -> None:
    engine = EngineHarness(speculation=speculating(OracleDrafter(error=0.2)))
    spec = RequestSpec((1, 2, 3), SAMPLED, max_tokens=60)
    number = engine.submit(spec)
    for _ in range(step):
        engine.step()
    engine.engine.cancel(number)
    engine.run()

    said = engine.generated(number)
    assert engine.ending(number).reason is FinishReason.CANCELLED
    assert said == complete_without_cache(spec, 0, 120)[: len(said)]
    again = replace(spec, prompt_ids=(*spec.prompt_ids, *said, 4))
    engine.assert_complete(_run(engine, again))


def test_drafts_make_no_request_give_way() -> None:
    """Two requests fill the cache to the last block; drafts would need more."""
    specs = [RequestSpec((n, 2, 3), GREEDY, max_tokens=29) for n in (1, 2)]
    engine = EngineHarness(num_blocks=1 + 2 * 8, speculation=speculating(OracleDrafter(), 8))
    numbers = [engine.submit(spec) for spec in specs]

    engine.run()

    assert engine.engine.status().num_preempted == 0
    for number in numbers:
        engine.assert_complete(number)


def test_drafts_stay_within_a_step() -> None:
    engine = EngineHarness(max_step_tokens=6, speculation=speculating(OracleDrafter(), 8))
    for n in range(4):
        engine.submit(RequestSpec((n, 2, 3), GREEDY, max_tokens=30))

    engine.run()  # the harness holds every step to its budget

    assert any(tokens > 1 for plan in engine.steps for _, tokens in plan)


class Late(OracleDrafter):
    """Has much to make up for at first, and takes a second for that."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock, self._is_late = clock, True

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        self._clock.advance(1.0 if self._is_late else 0.0)
        self._is_late = False

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        self._clock.advance(0.001)
        return super().propose(wanted)


def test_catching_up_is_no_measure_of_what_drafting_costs() -> None:
    """A draft that had not been asked for sixty tokens read them along with the first it guessed,
    and drafting was held to be five times as dear as it was: too dear, from then on."""
    noted: list[float] = []

    class Noting(FixedDraftPolicy):
        def note_drafting(self, num_requests: int, longest: int, seconds: float) -> None:
            noted.append(seconds)

    clock = VirtualClock()
    speculation = Speculation([Late(clock)], policy=Noting(4), clock=clock)
    engine = EngineHarness(speculation=speculation)
    engine.submit(RequestSpec((1, 2, 3), GREEDY, max_tokens=40))
    engine.run()

    assert len(noted) > 3
    assert noted == pytest.approx([0.001] * len(noted))


@pytest.mark.parametrize("method", ["offer", "prepare", "catch_up", "propose", "update", "close"])
@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_a_drafter_that_fails_is_asked_no_more(method: str, num_good: int) -> None:
    speculation = speculating(FailingDrafter(method, num_good))
    engine = EngineHarness(speculation=speculation)
    number = engine.submit(RequestSpec((1, 2, 3), SAMPLED, max_tokens=40))

    engine.run()
    engine.engine.close()

    engine.assert_complete(number)


class _Reading(FailingDrafter):
    def read_hidden(self, request: Request, rows: torch.Tensor) -> None:
        """Take nothing: it is asked whether it reads hidden states."""


def test_a_drafter_that_failed_gives_its_memory_back(caplog: pytest.LogCaptureFixture) -> None:
    """The list of readers, and the traceback of its failure, held a draft model until the end."""
    # A record of the failure would hold it too; "kvchat" may have a level that an earlier test set.
    caplog.set_level(logging.CRITICAL, logger="kvchat.engine.speculation")
    drafter = _Reading("propose", 1)
    seen = weakref.ref(drafter)
    engine = EngineHarness(speculation=speculating(drafter))
    del drafter
    number = engine.submit(RequestSpec((1, 2, 3), SAMPLED, max_tokens=40))
    assert seen() is not None

    engine.run()

    engine.assert_complete(number)
    gc.collect()
    assert seen() is None


def test_a_step_that_fails_with_drafts_is_tried_without() -> None:
    engine = EngineHarness(speculation=speculating(OracleDrafter()))
    run, num_failed = engine.engine._runner.run, 0

    def fails_with_drafts(plan, *others):  # type: ignore[no-untyped-def]
        nonlocal num_failed
        if any(scheduled.drafts for scheduled in plan):
            num_failed += 1
            raise MemoryError
        return run(plan, *others)

    engine.engine._runner.run = fails_with_drafts  # type: ignore[method-assign]
    number = engine.submit(RequestSpec((1, 2, 3), SAMPLED, max_tokens=20))
    engine.run()

    engine.assert_complete(number)
    assert num_failed > 5


def test_a_mode_asks_its_own_drafters() -> None:
    speculation = speculating(OracleDrafter())
    engine = EngineHarness(speculation=speculation)
    used = {}
    for mode in (Mode.OFF, Mode.AUTO, Mode.NGRAM, Mode.DRAFT):
        speculation.switch(mode)
        number = _run(engine, RequestSpec((1, 2, 3), GREEDY, max_tokens=20))
        engine.assert_complete(number)
        used[mode] = engine.ending(number).usage.drafted_tokens > 0

    assert used == {Mode.OFF: False, Mode.AUTO: True, Mode.NGRAM: False, Mode.DRAFT: True}
    with pytest.raises(UsageError, match="no head for the next token"):
        speculation.switch(Mode.MTP)
    with pytest.raises(UsageError, match="no kind of drafts"):
        speculation.switch("fast")


def test_switching_in_the_middle_of_an_answer_changes_nothing() -> None:
    speculation = speculating(OracleDrafter(error=0.1))
    engine = EngineHarness(speculation=speculation)
    number = engine.submit(RequestSpec((1, 2, 3), SAMPLED, max_tokens=80))
    modes = [Mode.OFF, Mode.AUTO, Mode.DRAFT, Mode.NGRAM]
    while engine.engine.has_work:
        speculation.switch(modes[len(engine.steps) % 4])
        engine.step()

    engine.assert_complete(number)


def test_a_text_may_be_guessed_by_several_drafters_in_one_step() -> None:
    drafters = [FickleDrafter(seed=4), GarbageDrafter(seed=5), NgramDrafter()]
    engine = EngineHarness(speculation=Speculation(drafters, policy=DraftPolicy()))
    numbers = [engine.submit(spec) for spec in conversations()]

    engine.run()

    for number in numbers:
        engine.assert_complete(number)


@pytest.mark.parametrize(
    ("drafts", "drawn", "expected"),
    [
        ((), [5], 0),
        ((5,), [5, 6], 1),
        ((5,), [4, 6], 0),
        ((5, 6, 7), [5, 9, 7, 8], 1),
        ((5, 6, 7), [5, 6, 7, 8], 3),
    ],
)
def test_accepted_is_what_is_right_from_the_beginning(drafts, drawn, expected):
    assert accepted_len(drafts, drawn) == expected
    assert max(drawn) < VOCAB_SIZE
