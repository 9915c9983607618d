"""How long what comes up is waited for, on a clock and a transfer thread that the test moves."""

from dataclasses import dataclass, field

from kvchat.cache.tier import Tier
from support.chains import new_chain
from support.memory_tier import MemoryTier
from support.remembering_model import new_cache

TIER = MemoryTier(4, 32)

PROMPT = tuple(i % 31 + 1 for i in range(401))


@dataclass
class IdleThread:
    """A tier's thread that takes jobs and does none."""

    tier: Tier | None = None
    is_without_tier: bool = False
    jobs: list[object] = field(default_factory=list)

    def restore(self, job: object) -> None:
        self.jobs.append(job)

    def copy(self, job: object) -> None:
        """Do nothing."""


class Waiting:
    """An arrival that nothing comes of; `front_at` says what is computed meanwhile at a time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.thread = IdleThread()
        chain = new_chain(new_cache(200), lambda: TIER, clock=lambda: self.now_s)
        chain.close()
        chain.links[0].thread = self.thread  # type: ignore[assignment]
        self.planner, self.arrivals = chain.planner, chain.arrivals
        self.planner.prefill.of_long, self.planner.rates["from disk"] = 400.0, 1e9

    def begin(self, is_prefetch: bool = False) -> None:
        arrival = self.arrivals.begin(PROMPT, is_prefetch)
        assert arrival is not None
        self.arrival = arrival

    def front_at(self, now_s: float) -> int:
        self.now_s = now_s
        self.arrivals.settle_one(self.arrival)
        return self.arrival.num_front


def test_a_tier_that_is_opened_late_has_its_time_from_then_on() -> None:
    """What it took to open counted as waiting in vain, and the front was computed for nothing."""
    waiting = Waiting()
    waiting.begin()

    assert waiting.front_at(0.24) == 0
    waiting.thread.tier = TIER
    assert waiting.front_at(0.25) == 0
    assert waiting.front_at(0.34) == 0
    assert waiting.front_at(0.36) == 64


def test_a_tier_that_takes_too_long_to_open_is_not_waited_for() -> None:
    waiting = Waiting()
    waiting.begin()

    assert waiting.front_at(0.31) == 64


def test_the_longer_nothing_comes_the_more_is_computed_until_it_is_given_up() -> None:
    waiting = Waiting()
    waiting.thread.tier = TIER
    waiting.begin()

    assert waiting.front_at(0.2) == 64
    waiting.arrival.num_front = 0  # as if the front were there; nothing is, so it begins again
    assert waiting.front_at(0.2) == 128
    waiting.arrival.num_front = 0
    assert waiting.front_at(0.2) == 256
    waiting.arrival.num_front = 0
    assert not waiting.arrival.is_over
    waiting.front_at(0.2)
    assert waiting.arrival.is_over


def test_what_is_only_prefetched_has_time_and_no_front() -> None:
    waiting = Waiting()
    waiting.thread.tier = TIER
    waiting.begin(is_prefetch=True)

    assert waiting.front_at(1.0) == 0
    assert not waiting.arrival.is_over
    waiting.arrivals.hand_over(waiting.arrival)
    assert waiting.front_at(1.05) == 0
    assert waiting.front_at(1.2) == 64


def test_what_is_not_worth_it_says_so_at_once() -> None:
    waiting = Waiting()
    waiting.planner.rates["from disk"] = 1.0
    waiting.begin()

    assert waiting.arrival.is_over
    assert str(waiting.arrival.miss_reason) == "slower to read than to compute"
    assert not waiting.thread.jobs
