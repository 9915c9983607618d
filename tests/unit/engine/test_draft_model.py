"""A draft model keeps its KV as the target does, and no request waits for it."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvchat.cache import chain as kv_chain
from kvchat.core.types import SamplingParams
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.request import Request, RequestSpec
from kvchat.engine.speculation import Speculation
from support.chains import be_patient, compute_at, new_chain
from support.engine_harness import EngineHarness
from support.fixed_drafts import FixedDraftPolicy
from support.memory_tier import MemoryTier
from support.remembering_model import (
    GREEDY,
    VOCAB_SIZE,
    RememberingModel,
    new_cache,
    new_windowed_cache,
    runner_over,
)

SAMPLED = SamplingParams(temperature=1.1, top_k=20, seed=11)
WINDOW = 9
LONG = tuple(random.Random(3).randrange(VOCAB_SIZE) for _ in range(90))


WINDOWS = pytest.mark.parametrize("draft_windows", [0, 30], ids=["whole", "windows"])


class Drafting(EngineHarness):
    """An engine whose draft model is its own twin: every draft is right, if its KV is.

    `forwards[i]` counts the draft's forward passes before step i ended.
    """

    def __init__(
        self,
        draft_blocks: int = 200,
        vocab_size: int = VOCAB_SIZE,
        tier: MemoryTier | None = None,
        num_tokens: int = 4,
        fails: Callable[[], None] = lambda: None,
        piece_rows: int | None = None,
        draft_windows: int = 0,
        **shape: Any,
    ) -> None:
        self.num_draft_forwards = 0
        self.forwards: list[int] = []
        size = shape.get("block_size", 4)
        self.draft_cache = new_cache(draft_blocks, size)
        if draft_windows:
            self.draft_cache = new_windowed_cache(draft_blocks, draft_windows, WINDOW, size)
        self.draft_model = RememberingModel(self.draft_cache, lambda: self._count(fails))
        chain = None
        if tier is not None:
            chain = new_chain(self.draft_cache, lambda: tier)
            be_patient(chain)
        self.chain = chain
        self.drafter = ModelDrafter(
            runner_over(self.draft_model, self.draft_cache),
            self.draft_cache,
            vocab_size,
            shape.get("max_context", 120),
            chain,
            piece_rows=piece_rows,
        )
        speculation = Speculation([self.drafter], policy=FixedDraftPolicy(num_tokens))
        super().__init__(speculation=speculation, **shape)  # type: ignore[arg-type]

    def _count(self, fails: Callable[[], None]) -> None:
        self.num_draft_forwards += 1
        fails()

    def check(self) -> None:
        super().check()
        self.forwards.append(self.num_draft_forwards)
        assert not self.draft_model.broken_promises, self.draft_model.broken_promises
        self.draft_cache.check([state.table for state in self.drafter._states.values()])

    def run_checked(self, *specs: RequestSpec) -> list[int]:
        numbers = [self.submit(spec) for spec in specs]
        self.hear_from_tier()
        self.run()
        for number in numbers:
            self.assert_complete(number)
        return numbers

    def hear_from_tier(self) -> None:
        """Make the first step, and wait until the draft's tier has answered all that asked it.

        A request that ends before that is never drafted for, and leaves no KV of the draft's.
        """
        self.step()
        for arrival in self.drafter.chain.arrivals.live:
            assert arrival.feed is not None
            assert arrival.feed.has_all.wait(60.0)

    def accepted_share(self, number: int) -> float:
        usage = self.ending(number).usage
        return usage.accepted_tokens / usage.drafted_tokens


def test_a_twin_is_always_right_and_its_kv_is_never_mixed_up() -> None:
    engine = Drafting(num_tokens=5)
    [number] = engine.run_checked(RequestSpec((1, 2, 3), SAMPLED, max_tokens=60))

    assert engine.accepted_share(number) == 1.0
    assert len(engine.steps) == 1 + 59 // 6 + 1


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("draft_blocks", [9, 200])
@WINDOWS
def test_batches_forks_and_little_room_change_no_text(block_size, draft_blocks, draft_windows):
    engine = Drafting(
        draft_blocks,
        draft_windows=min(draft_windows, draft_blocks) and max(draft_windows, draft_blocks // 2),
        block_size=block_size,
        num_blocks=240 // block_size,
    )
    numbers = engine.run_checked(
        RequestSpec((1, 2, 3) * 5, GREEDY, max_tokens=40),
        RequestSpec(tuple(range(20)), SAMPLED, max_tokens=35, num_samples=3),
        RequestSpec((9, 8), replace(SAMPLED, repetition_penalty=1.3), max_tokens=50),
        RequestSpec((1, 2, 3) * 4, SAMPLED, max_tokens=20),
    )

    if draft_blocks == 200:
        assert all(engine.accepted_share(number) == 1.0 for number in numbers)


def test_the_first_token_does_not_wait_for_the_draft() -> None:
    engine = Drafting()
    engine.submit(RequestSpec(LONG, GREEDY, max_tokens=20))
    while not any(engine.generated(1)):
        assert engine.num_draft_forwards == 0
        engine.step()
    engine.run()

    assert engine.num_draft_forwards > 0
    engine.assert_complete(1)


def test_what_the_draft_lacks_is_made_up_for_a_little_in_each_step() -> None:
    engine = Drafting()
    engine.submit(RequestSpec(LONG, GREEDY, max_tokens=30))
    engine.run()

    plain = [plan for plan in engine.steps if plan == [(1, 1)]]
    verifying = [plan for plan in engine.steps if plan == [(1, 5)]]
    assert 0 < len(plain) <= 4
    assert len(verifying) >= 4


@pytest.mark.parametrize(("piece_rows", "pieces"), [(None, [48]), (12, [12] * 4)])
def test_the_little_that_is_missing_is_computed_in_pieces(monkeypatch, piece_rows, pieces):
    """One pass took ten milliseconds of a tiny model, as long as five tokens of its target."""
    engine = Drafting(piece_rows=piece_rows, block_size=64)
    computed: list[int] = []
    compute = engine.drafter._compute

    def noted(request: Request, state: object, start: int, end: int) -> None:
        computed.append(end - start)
        compute(request, state, start, end)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.drafter, "_compute", noted)
    [number] = engine.run_checked(RequestSpec(LONG[:48], GREEDY, max_tokens=20))

    assert computed == pieces
    assert engine.accepted_share(number) == 1.0


def test_the_next_turn_and_a_branch_draft_at_once() -> None:
    engine = Drafting()
    [first] = engine.run_checked(RequestSpec(LONG, GREEDY, max_tokens=9))
    answer = engine.generated(first)
    computed = engine.draft_cache.num_cached_tokens((*LONG, *answer))
    assert computed >= len(LONG)

    for prompt in ((*LONG, *answer, 4, 5), (*LONG[:80], 7), (*LONG, *answer[:3], 9)):
        before = len(engine.steps)
        [number] = engine.run_checked(RequestSpec(prompt, GREEDY, max_tokens=11))
        assert [rows for [(_, rows)] in engine.steps[before:] if rows == 5], "nothing was drafted"
        assert engine.accepted_share(number) == 1.0
        assert (number, 1) not in [plan[0] for plan in engine.steps[before + 1 :]], "a plain step"


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(block_size=4, image_bytes=32)


@WINDOWS
def test_a_restored_conversation_drafts_as_well_as_before(draft_windows: int) -> None:
    tier = MemoryTier(block_size=4, image_bytes=64 if draft_windows else 32)
    yesterday = Drafting(tier=tier, draft_windows=draft_windows)
    [number] = yesterday.run_checked(RequestSpec(LONG, GREEDY, max_tokens=9))
    answer = yesterday.generated(number)
    yesterday.engine.close()
    assert tier.blocks

    today = Drafting(tier=tier, draft_windows=draft_windows)
    number = today.submit(RequestSpec((*LONG, *answer, 3), GREEDY, max_tokens=11))
    today.hear_from_tier()
    today.run()

    today.assert_complete(number)
    assert today.accepted_share(number) == 1.0
    assert today.draft_cache.num_cached_tokens((*LONG, *answer)) >= len(LONG)
    rows = [rows for [(_, rows)] in today.steps[1:]]
    # What the tier's thread has brought behind the first step is taken in at the end of the next.
    assert rows.count(1) <= 1, "it drafted late"
    assert rows.count(5) >= 1
    today.engine.close()


def test_a_draft_with_windows_holds_a_window_and_drafts_for_every_turn() -> None:
    """Its long prompt is read in parts behind the answer's first tokens."""
    engine = Drafting(draft_windows=44, max_step_tokens=7, window=WINDOW, num_window_blocks=40)
    [first] = engine.run_checked(RequestSpec(LONG, GREEDY, max_tokens=12))
    context = (*LONG, *engine.generated(first))
    blocks = engine.draft_cache.kv_pool.blocks  # type: ignore[attr-defined]
    assert blocks.num_usable - blocks.num_free <= 12, "windows at the ends of prompt and answer"

    for ids in ((*context, 4, 5), (*context, 7), (*LONG, *engine.generated(first)[:1], 9)):
        before = len(engine.steps)
        [number] = engine.run_checked(RequestSpec(ids, GREEDY, max_tokens=11))
        assert engine.accepted_share(number) == 1.0
        assert [rows for [(_, rows)] in engine.steps[before:] if rows == 5], "nothing was drafted"


def test_a_forgotten_context_leaves_no_window_of_the_draft() -> None:
    tier = MemoryTier(block_size=4, image_bytes=64)
    engine = Drafting(draft_windows=44, tier=tier)
    [number] = engine.run_checked(RequestSpec(LONG, GREEDY, max_tokens=24))
    context = [*LONG, *engine.generated(number)]
    assert engine.drafter.chain.flush(60.0)
    assert tier.blocks

    is_done = threading.Event()
    engine.engine.forget([(context, 0)], is_done.set)

    assert is_done.wait(60.0)
    blocks = engine.draft_cache.kv_pool.blocks  # type: ignore[attr-defined]
    assert blocks.num_free == blocks.num_usable
    assert not tier.blocks
    engine.engine.close()


def test_a_draft_whose_kv_comes_too_late_is_made_up_for(tier: MemoryTier) -> None:
    """It waited for a front that is never computed, and drafted nothing for the whole answer."""
    yesterday = Drafting(tier=tier)
    yesterday.run_checked(RequestSpec(LONG, GREEDY, max_tokens=9))
    yesterday.engine.close()

    may_read, now_s = tier.held(), [0.0]
    today = Drafting(tier=tier)
    compute_at(today.chain, 1e6)
    today.chain.arrivals._clock = lambda: now_s[0]
    number = today.submit(RequestSpec(LONG, GREEDY, max_tokens=29))
    today.step()
    now_s[0] = 60.0
    today.run()

    today.assert_complete(number)
    assert today.ending(number).usage.drafted_tokens > 10
    may_read.set()
    today.engine.close()


def test_what_the_draft_still_writes_is_waited_for_but_not_by_the_engine(tier: MemoryTier) -> None:
    """While another process held the store the engine's thread once stood still for a second, and
    then said that it had forgotten what was still to be written.
    """
    has_begun, may_write, is_done = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        may_write.wait(60.0)

    tier.before_write = wait
    engine = Drafting(tier=tier)
    number = engine.submit(RequestSpec(LONG[:40], GREEDY, max_tokens=8))
    engine.hear_from_tier()
    engine.run()
    context = [*LONG[:40], *engine.generated(number)]
    assert has_begun.wait(60.0)  # what the thread has not begun to write is not written at all

    engine.engine.forget([(context, 0)], is_done.set)

    assert not is_done.is_set()
    assert not tier.blocks
    may_write.set()
    assert is_done.wait(60.0)
    assert tier.num_written > 0, "it was written before it was forgotten"
    assert not tier.blocks
    engine.engine.close()


def test_a_context_beyond_the_drafts_vocabulary_or_context_is_decoded_plainly() -> None:
    engine = Drafting(vocab_size=20)
    [number] = engine.run_checked(RequestSpec((1, 39, 3), GREEDY, max_tokens=20))
    assert engine.ending(number).usage.drafted_tokens == 0

    short = Drafting()
    short.drafter._max_context = 30
    [number] = short.run_checked(RequestSpec((1, 2, 3), GREEDY, max_tokens=60))
    assert 0 < short.ending(number).usage.drafted_tokens <= 30


@pytest.mark.parametrize("num_good", [0, 1, 7])
def test_a_draft_model_that_crashes_leaves_the_text_alone(num_good: int) -> None:
    left = [num_good]

    def fail() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the draft fell over")

    engine = Drafting(fails=fail)
    engine.run_checked(RequestSpec((1, 2, 3), SAMPLED, max_tokens=40))

    assert "fell over" in str(engine.engine.speculation.failures["draft"])


def test_a_cancelled_request_leaves_its_draft_state() -> None:
    engine = Drafting()
    number = engine.submit(RequestSpec((1, 2, 3), SAMPLED, max_tokens=60))
    for _ in range(5):
        engine.step()
    assert engine.drafter._states
    engine.engine.cancel(number)
    engine.step()

    assert not engine.drafter._states
    engine.run_checked(RequestSpec((1, 2, 3), SAMPLED, max_tokens=60))


class _MeetingTier(MemoryTier):
    """Its closing ends once the other tier at the barrier closes too."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__(block_size=4, image_bytes=32)
        self._barrier = barrier

    def close(self) -> None:
        self._barrier.wait(60.0)
        super().close()


def test_the_stores_of_the_model_and_of_its_draft_close_at_the_same_time(monkeypatch):
    """One after the other they took 40 of the 70 ms in which a chat was left.

    A store whose writes have not been answered yet closes after the draft's: it may have more to
    write. On a busy machine that came about by chance.
    """
    monkeypatch.setattr(kv_chain, "_CLOSE_PATIENCE_S", 60.0)
    barrier = threading.Barrier(2)
    tier, draft_tier = _MeetingTier(barrier), _MeetingTier(barrier)
    engine = Drafting(tier=draft_tier, open_tier=lambda: tier)
    engine.run_checked(RequestSpec(LONG, GREEDY, max_tokens=9))
    assert engine.engine.chain.flush(60.0)

    engine.engine.close()

    assert tier.is_closed
    assert draft_tier.is_closed
    assert tier.blocks
    assert draft_tier.blocks, "what was queued is written before"
