"""Layers with a window keep a window: the tokens are those of a plain oracle that keeps everything.

The remembering model has a layer without a window and one with. It reads back all that the first
has, and all that a window shows of the second; what is not there fails the test.
"""

from collections.abc import Callable, Iterator

import pytest

from kvchat.cache.window_blocks import WindowBlocks
from kvchat.cache.windowed_manager import WindowedCacheManager
from kvchat.engine.request import RequestSpec
from support.engine_harness import EngineHarness
from support.memory_tier import MemoryTier
from support.remembering_model import GREEDY
from support.restarts import Processes, alone, spec
from support.soak_sizes import short_and_long
from unit.engine.test_engine_equivalence import Crowd

WINDOWED = {"window": 9, "num_window_blocks": 14}
LONG = tuple(i % 31 + 1 for i in range(100))  # eleven windows


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 40, "max_context": 60, **WINDOWED},
        {"num_blocks": 24, "num_window_blocks": 12, "window": 6, "max_context": 60},
        {"num_blocks": 14, "num_window_blocks": 13, "window": 20, "block_size": 8}
        | {"max_context": 48, "max_step_tokens": 64},
        {"num_blocks": 80, "num_window_blocks": 40, "window": 5, "block_size": 1}
        | {"max_context": 70, "num_host_blocks": 30},
        {"num_blocks": 40, "num_window_blocks": 10, "window": 1, "max_context": 60},
    ],
    ids=["roomy", "tight", "large steps", "one-token blocks, host memory", "only itself"],
)
@short_and_long(1, 30)
def test_random_callers_get_exactly_their_tokens(size: int, limits: dict[str, int]) -> None:
    for seed in range(size):
        Crowd(seed, **limits).run_to_the_end(num_acts=120)


# Controls: faults of peers' windows, planted, must show.


def forget_a_block_too_early(patch: pytest.MonkeyPatch) -> None:
    init = WindowedCacheManager.__init__

    def short(self: WindowedCacheManager, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        self.window_blocks -= 1

    patch.setattr(WindowedCacheManager, "__init__", short)


def go_on_after_a_lost_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowedCacheManager, "_num_usable_blocks", lambda self, blocks, ids: len(blocks))
    patch.setattr(WindowBlocks, "hold", lambda self, blocks: None)


def lose_what_was_computed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowBlocks, "share", lambda self, own, known: self.drop(own))


@pytest.mark.parametrize(
    "plant", [forget_a_block_too_early, go_on_after_a_lost_window, lose_what_was_computed_again]
)
def test_a_fault_in_windows_shows(plant, monkeypatch):
    plant(monkeypatch)
    for name in ("check", "let_go"):  # nothing else is to find the fault
        original = getattr(WindowBlocks, name)
        monkeypatch.setattr(WindowBlocks, name, _tolerant(original))
    monkeypatch.setattr(WindowedCacheManager, "check", lambda self, tables=None: None)

    with pytest.raises(AssertionError):
        serve_crowds(2)


def serve_crowds(count: int) -> None:
    for seed in range(count):
        # A window of 9 tokens has a block to spare, but where a last token is computed again.
        limits = WINDOWED | {"window": 10}
        Crowd(seed, num_blocks=40, max_context=60, **limits).run_to_the_end(100)


def _tolerant(method: Callable[..., None]) -> Callable[..., None]:
    def call(self: WindowBlocks, blocks: object = (), **settings: bool) -> None:
        try:
            method(self, blocks, **settings)
        except AssertionError:
            return

    return call


# One chat


def harness(**limits: int) -> EngineHarness:
    return EngineHarness(num_blocks=120, **(WINDOWED | limits))


def in_use(engine: EngineHarness) -> int:
    blocks = engine.cache.kv_pool.blocks  # type: ignore[attr-defined]
    return blocks.num_usable - blocks.num_available


@pytest.mark.parametrize("max_step_tokens", [7, 16])
def test_a_long_chat_uses_a_window_and_a_step(max_step_tokens: int) -> None:
    engine = harness(max_step_tokens=max_step_tokens)
    request_id = engine.submit(RequestSpec(LONG, GREEDY, max_tokens=15))
    most = 0
    while engine.engine.has_work:
        engine.step()
        most = max(most, in_use(engine))

    engine.assert_complete(request_id)
    assert most <= 3 + max_step_tokens // 4 + 2, "blocks of a window of 9, and of a step"
    assert in_use(engine) == 0


def cached_and_computed(engine: EngineHarness, ids: tuple[int, ...]) -> tuple[int, int]:
    before = engine.engine.status().num_tokens_computed
    request_id = engine.submit(RequestSpec(ids, GREEDY, max_tokens=1))
    engine.run()
    engine.assert_complete(request_id)
    computed = engine.engine.status().num_tokens_computed - before
    return engine.ending(request_id).usage.cached.device, computed


def test_an_exact_hit_computes_each_token_once() -> None:
    """A peer forwards the last token twice, and shifts the window by one."""
    engine = harness()
    engine.complete(RequestSpec(LONG, GREEDY, max_tokens=1))

    assert cached_and_computed(engine, LONG) == (99, 1)
    assert cached_and_computed(engine, LONG) == (99, 1)


def test_turns_and_undone_turns_find_their_windows() -> None:
    engine = harness(num_window_blocks=40)
    first = RequestSpec(LONG[:50], GREEDY, max_tokens=12)
    [answer] = engine.complete(first)
    after_first = (*first.prompt_ids, *answer)
    [second] = engine.complete(RequestSpec((*after_first, *LONG[:25]), GREEDY, max_tokens=9))

    # On, back to the turn before, and the same prompt for another answer.
    whole = (*after_first, *LONG[:25], *second, 5, 6)
    assert cached_and_computed(engine, whole)[1] == 3
    assert cached_and_computed(engine, (*after_first, 9, 9, 9))[1] == 3
    assert cached_and_computed(engine, first.prompt_ids) == (49, 1)


def test_the_second_who_leaves_a_long_beginning_reads_it_and_the_third_does_not() -> None:
    """Reuse of a long common beginning does not collapse: its last window is then kept."""
    engine = harness(num_window_blocks=60)
    beginning = LONG[:80]
    engine.complete(RequestSpec((*beginning, *range(30)), GREEDY, max_tokens=1))

    assert cached_and_computed(engine, (*beginning, 33, 34, 35))[0] == 0
    assert cached_and_computed(engine, (*beginning, 36, 37, 38)) == (80, 3)
    assert cached_and_computed(engine, (*beginning, 39)) == (80, 1)


def test_windows_of_chats_do_not_mix() -> None:
    """Two chats in one step, with the same tokens after different beginnings."""
    engine = harness(num_window_blocks=24)
    prompts = [(first, *LONG[:60]) for first in (35, 36)]
    answers = engine.complete(*(RequestSpec(p, GREEDY, max_tokens=20) for p in prompts))

    assert answers == [alone(spec(prompt, 20)) for prompt in prompts]


def test_samples_share_a_window_until_they_write() -> None:
    engine = harness(num_window_blocks=30)
    request_id = engine.submit(RequestSpec(LONG[:45], GREEDY, max_tokens=15, num_samples=4))
    engine.run()

    engine.assert_complete(request_id)


def test_a_second_chat_waits_where_windows_have_no_room_for_it() -> None:
    engine = harness(num_window_blocks=9, max_running=4)
    ids = [engine.submit(RequestSpec((n, *LONG[:40]), GREEDY, max_tokens=8)) for n in range(4)]
    engine.run()

    for request_id in ids:
        engine.assert_complete(request_id)


# Slower tiers


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(block_size=4, image_bytes=4 * 16)


@pytest.fixture
def processes(tier: MemoryTier) -> Iterator[Processes]:
    made = Processes(lambda: tier, **WINDOWED)
    yield made
    for process in made.started:
        process.end()


def test_a_restart_computes_only_what_is_new(processes: Processes) -> None:
    first = processes.start()
    answer, _ = first.answer(spec(LONG))
    first.end()
    context = (*LONG, *answer, 7, 8, 9)

    resumed, finished = processes.start().answer(spec(context))

    assert resumed == alone(spec(context))
    num_kept = (len(LONG) + len(answer) - 1) // 4 * 4
    assert finished.usage.cached.disk == num_kept
    assert finished.usage.prefilled_tokens == len(context) - num_kept


def test_a_restart_goes_on_at_every_turn(processes: Processes) -> None:
    first, context, ends = processes.start(), LONG[:30], []
    for turn in range(5):
        answer, _ = first.answer(spec(context))
        ends.append((*context, *answer))
        context = (*context, *answer, turn, 3, 1, 4, 1, 5)
    first.end()

    for end in ends:
        resumed, finished = processes.start().answer(spec((*end, 2, 2)))
        assert resumed == alone(spec((*end, 2, 2)))
        assert finished.usage.cached.disk >= (len(end) - 1) // 4 * 4


def test_images_without_a_window_are_never_used_as_if_they_had_one(processes, tier):
    """A branch into the middle of a long prompt, of which only the end has windows."""
    processes.end_one(spec(LONG))
    absent = b"\xff" * 32
    for key in list(tier.blocks)[3:-4]:
        tier.blocks[key] = tier.blocks[key][:32] + absent

    for cut in (14, 40, 61, 96, 100):
        process = processes.start()
        process.answer_rightly(spec((*LONG[:cut], 33, 34)))
        process.end()  # else it writes what the next one looks for, at a time of its own
    assert tier.num_quarantined == 0


def test_window_blocks_that_leave_before_the_end_of_a_check_do_not_fail_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the last token fewer layers could be compared then than of others. That raised, and right
    KV was deleted from the disk.
    """
    tier, context = MemoryTier(4, 64), LONG[:32]
    first, second = (
        EngineHarness(open_tier=lambda: tier, window=40, num_window_blocks=40) for _ in range(2)
    )
    first.complete(RequestSpec(context, GREEDY, max_tokens=4))
    first.engine.close()
    engine, blocks = second.engine, second.cache._blocks  # type: ignore[attr-defined]
    verifier = engine._kv_verifier
    compute, num_freed = verifier._end_alone, []

    def evict_and_compute(checks, run):  # type: ignore[no-untyped-def]
        num_free = blocks.num_free
        assert blocks.make_room(blocks.num_available)
        num_freed.append(blocks.num_free - num_free)
        return compute(checks, run)

    monkeypatch.setattr(verifier, "_end_alone", evict_and_compute)
    engine.prefetch([*context, 1, 2])
    while not num_freed:
        second.step()

    assert num_freed == [1]
    engine.close()
    assert tier.num_quarantined == 0
    assert len(tier.blocks) == len(context) // 4
