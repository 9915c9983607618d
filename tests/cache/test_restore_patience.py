"""How long what comes up is waited for, on a clock and a transfer thread that the test moves."""

from dataclasses import dataclass, field

from kvchat.cache.rates import RestorePlanner
from kvchat.cache.restore import Restorer
from support.remembering_model import new_cache

PROMPT = tuple(i % 31 + 1 for i in range(401))


@dataclass
class IdleTransfer:
    """Takes jobs and does none."""

    tier: object | None = None
    is_without_tier: bool = False
    jobs: list[object] = field(default_factory=list)

    def restore(self, job: object) -> None:
        self.jobs.append(job)


class Waiting:
    """A restore that nothing comes of; `at` says what is computed meanwhile at a time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.transfer = IdleTransfer()
        self.planner = RestorePlanner(prefill_tokens_per_s=400.0, read_bytes_per_s=1e9)
        self.restorer = Restorer(
            new_cache(200),
            self.transfer,  # type: ignore[arg-type]
            self.planner,
            lambda ids, num_blocks: None,
            lambda: self.now_s,
        )

    def begin(self, is_prefetch: bool = False) -> None:
        restore = self.restorer.begin(PROMPT, is_prefetch)
        assert restore is not None
        self.restore = restore

    def front_at(self, now_s: float) -> int:
        self.now_s = now_s
        self.restorer.settle(self.restore)
        return self.restore.num_front


def test_a_tier_that_is_opened_late_has_its_time_from_then_on() -> None:
    """What it took to open counted as waiting in vain, and the front was computed for nothing."""
    waiting = Waiting()
    waiting.begin()

    assert waiting.front_at(0.24) == 0
    waiting.transfer.tier = "open"
    assert waiting.front_at(0.25) == 0
    assert waiting.front_at(0.34) == 0
    assert waiting.front_at(0.36) == 64


def test_a_tier_that_takes_too_long_to_open_is_not_waited_for() -> None:
    waiting = Waiting()
    waiting.begin()

    assert waiting.front_at(0.31) == 64


def test_the_longer_nothing_comes_the_more_is_computed_until_it_is_given_up() -> None:
    waiting = Waiting()
    waiting.transfer.tier = "open"
    waiting.begin()

    assert waiting.front_at(0.2) == 64
    waiting.restore.num_front = 0  # as if the front were there; nothing is, so it begins again
    assert waiting.front_at(0.2) == 128
    waiting.restore.num_front = 0
    assert waiting.front_at(0.2) == 256
    waiting.restore.num_front = 0
    assert not waiting.restore.is_over
    waiting.front_at(0.2)
    assert waiting.restore.is_over


def test_what_is_only_prefetched_has_time_and_no_front() -> None:
    waiting = Waiting()
    waiting.transfer.tier = "open"
    waiting.begin(is_prefetch=True)

    assert waiting.front_at(1.0) == 0
    assert not waiting.restore.is_over
    waiting.restorer.hand_over(waiting.restore)
    assert waiting.front_at(1.05) == 0
    assert waiting.front_at(1.2) == 64


def test_what_is_not_worth_it_says_so_at_once() -> None:
    waiting = Waiting()
    waiting.planner.read_bytes_per_s = 1.0
    waiting.begin()

    assert waiting.restore.is_over
    assert str(waiting.restore.miss_reason) == "slower to read than to compute"
    assert not waiting.transfer.jobs
