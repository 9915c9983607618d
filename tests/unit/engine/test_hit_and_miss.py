"""A hit is never slower than a miss: whatever the disk does, and whatever is believed of it.

Time is virtual: computing a token takes so long, reading one so long, at the same time on two
threads, and the machine that runs the test has no say in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from kvchat.cache.chain import KvChain
from kvchat.cache.tier import Tier
from kvchat.core.events import SampleFinished, TokensGenerated
from kvchat.core.types import CachedTokens
from kvchat.engine.request import RequestSpec
from support.engine_harness import EngineHarness
from support.memory_tier import MemoryTier
from support.remembering_model import GREEDY, complete_without_cache
from support.virtual_time import VirtualClock

BLOCK = 4
TOKEN_BYTES = 8  # of the remembering model
CONTEXT = tuple(i % 31 + 1 for i in range(321))
COMPUTE_S = 0.01  # a token
MISS_S = len(CONTEXT) * COMPUTE_S
FOREVER_S = 1e9
MOMENT_S = 0.02


@dataclass
class Machine:
    """An engine on virtual time, whose tier reads a token in `read_s(number of the pack)`."""

    tier: MemoryTier
    read_s: Callable[[int], float]
    believed_read_s: float | None
    clock: VirtualClock = field(default_factory=VirtualClock)
    num_read: int = 0

    def answer(self) -> tuple[float, CachedTokens]:
        """Return when the first token was there, and what was not computed for it."""
        harness = EngineHarness(max_context=400, open_tier=lambda: self.tier, clock=self.clock)
        chain = harness.engine.chain
        assert chain.flush(60.0)
        planner = chain.planner
        planner.prefill.of_long = 1 / COMPUTE_S
        if self.believed_read_s is not None:
            planner.rates["from disk"] = TOKEN_BYTES / self.believed_read_s
        with self._time_passing(harness, chain):
            return self._answer(harness)

    def _answer(self, harness: EngineHarness) -> tuple[float, CachedTokens]:
        spec = RequestSpec(CONTEXT, GREEDY, max_tokens=3)
        number = harness.submit(spec)
        first_s = None
        while not any(isinstance(event, SampleFinished) for event in harness.events[number]):
            num_steps = len(harness.steps)
            events = harness.step()
            if len(harness.steps) == num_steps:
                self.clock.advance(MOMENT_S)
            if first_s is None and any(isinstance(event, TokensGenerated) for event in events):
                first_s = self.clock()
        assert harness.generated(number) == complete_without_cache(spec, 0, 400)
        assert first_s is not None
        return first_s, harness.ending(number).usage.cached

    @contextmanager
    def _time_passing(self, harness: EngineHarness, chain: KvChain) -> Iterator[None]:
        """Let computing and reading take their time."""
        run, restore = harness.engine._runner.run, chain.slow[0].thread.restore

        def run_in_time(plan, checks=(), *stop):  # type: ignore[no-untyped-def]
            self.clock.advance(
                COMPUTE_S * (sum(scheduled.num_rows for scheduled in plan) + len(checks))
            )
            return run(plan, checks, *stop)

        def restore_in_time(job: Callable[[Tier], object]) -> None:
            def work(tier: Tier) -> None:
                try:
                    job(tier)
                finally:
                    self.clock.end_work()

            self.clock.begin_work()
            restore(work)

        def read_in_time() -> None:
            self.num_read += 1
            self.clock.sleep(self.read_s(self.num_read) * self.tier.max_found * BLOCK)

        harness.engine._runner.run = run_in_time  # type: ignore[method-assign]
        chain.slow[0].thread.restore = restore_in_time  # type: ignore[method-assign]
        self.tier.before_read = read_in_time
        try:
            yield
        finally:
            self.clock.end()
            harness.engine.close()


@pytest.fixture
def tier() -> MemoryTier:
    """A tier that has the context."""
    kept = MemoryTier(block_size=BLOCK, image_bytes=BLOCK * TOKEN_BYTES)
    harness = EngineHarness(max_context=400, open_tier=lambda: kept)
    harness.submit(RequestSpec(CONTEXT, GREEDY, max_tokens=1))
    harness.run()
    harness.engine.close()
    kept.max_found = 10
    return kept


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_steady_disk_never_makes_it_slower(share, is_known, tier):
    """`share` is what reading takes of what computing takes."""
    read_s = COMPUTE_S * share
    machine = Machine(tier, lambda number: read_s, read_s if is_known else None)

    took_s, cached = machine.answer()

    # What is not known has to be waited for, a little, before anybody can know.
    assert took_s <= MISS_S * (1.02 if is_known else 1.08)
    if share <= 0.3:
        assert took_s <= MISS_S * (share + 0.25)
        assert cached.disk > len(CONTEXT) * 0.6
    if share >= 10 and is_known:
        assert cached == CachedTokens()  # a throttled disk is not even asked


def test_where_both_are_as_fast_both_work(tier: MemoryTier) -> None:
    machine = Machine(tier, lambda number: COMPUTE_S, COMPUTE_S)

    took_s, cached = machine.answer()

    assert took_s <= MISS_S * 0.6
    assert 0.4 < cached.disk / len(CONTEXT) < 0.6


@pytest.mark.parametrize("num_good", [0, 1, 4])
@pytest.mark.parametrize("believed", [0.001, 0.05, 0.5])
def test_a_disk_that_stops_is_not_waited_for(num_good, believed, tier):
    """It was quick, and gives no more after `num_good` packs."""
    good_s = COMPUTE_S * believed
    machine = Machine(tier, lambda n: good_s if n <= num_good else FOREVER_S, good_s)

    took_s, _ = machine.answer()

    assert took_s <= MISS_S * 1.1


@pytest.mark.parametrize("share", [0.5, 2.0, 50.0])
def test_a_disk_that_has_become_slow_is_not_believed_for_long(share, tier):
    machine = Machine(tier, lambda number: COMPUTE_S * share, COMPUTE_S * 0.001)

    took_s, _ = machine.answer()

    assert took_s <= MISS_S * 1.1


def test_a_hiccup_does_not_throw_away_what_comes_after_it(tier: MemoryTier) -> None:
    machine = Machine(tier, lambda n: COMPUTE_S * (1.5 if n == 3 else 0.01), COMPUTE_S * 0.01)

    took_s, cached = machine.answer()

    assert took_s <= MISS_S * 0.5
    assert cached.disk > len(CONTEXT) * 0.5
