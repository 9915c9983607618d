"""A restore and its reader: which waits for which, and what is freed when no piece is taken."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvchat.cache.arrivals import Arrival
from kvchat.cache.feed import Feed, Piece
from kvchat.cache.keys import chain_keys, encode_ids
from kvchat.cache.tier import BusyRecord, DamagedRecord, GoneRecord, Tier
from kvchat.core.types import MissReason
from support.chains import new_chain
from support.clock import Clock
from support.memory_tier import MemoryTier
from support.remembering_model import new_cache

PATIENCE_S = 60.0
BLOCK_SIZE, IMAGE_BYTES = 4, 4 * 8
NUM_BLOCKS = 80
PROMPT = tuple(i % 31 + 1 for i in range(NUM_BLOCKS * BLOCK_SIZE + 1))


def full_tier() -> MemoryTier:
    """Return a tier that has the whole prompt, each block in a pack of its own."""
    tier = MemoryTier(BLOCK_SIZE, IMAGE_BYTES)
    for key in chain_keys(tier.root, encode_ids(PROMPT), BLOCK_SIZE * 4):
        tier.blocks[key] = bytes(IMAGE_BYTES)
    tier.max_found = 1
    return tier


class Reading:
    """A prompt's arrival, read by a tier's own thread and settled when the test says so."""

    def __init__(self, tier: Tier, num_blocks: int = 200) -> None:
        self.chain = new_chain(new_cache(num_blocks), lambda: tier, clock=lambda: 0.0)
        self.arrivals, self.thread = self.chain.arrivals, self.chain.links[0].thread

    def begin(self) -> tuple[Arrival, Feed]:
        arrival = self.arrivals.begin(PROMPT)
        assert arrival is not None
        assert arrival.feed is not None
        return arrival, arrival.feed

    def settle(self, arrival: Arrival) -> None:
        while self.arrivals.settle_one(arrival):
            self.arrivals.wait_for_news()


@dataclass
class KeptJobs:
    """A tier's thread whose jobs the test does."""

    tier: Tier
    is_without_tier: bool = False
    jobs: list[Callable[[Tier], object]] = field(default_factory=list)

    def restore(self, job: Callable[[Tier], object]) -> None:
        self.jobs.append(job)


@pytest.fixture
def reading() -> Iterator[Callable[..., Reading]]:
    made: list[Reading] = []

    def start(tier: Tier, num_blocks: int = 200) -> Reading:
        made.append(Reading(tier, num_blocks))
        return made[-1]

    yield start
    for each in made:
        each.thread.close(PATIENCE_S)


def test_copies_have_their_turn_while_nobody_takes_what_was_read(reading):
    """A prompt whose front found no room waited for a promotion to give blocks back, and that for
    its copies, which waited for the prompt's reader, which waited for the prompt: for ever.
    """
    own = reading(full_tier())
    arrival, feed = own.begin()
    try:
        is_copied = threading.Event()
        while feed.num_put < 64:
            own.arrivals.wait_for_news()
        own.thread.copy(is_copied.set)

        assert is_copied.wait(PATIENCE_S)
        own.settle(arrival)
        assert arrival.num_tokens == NUM_BLOCKS * BLOCK_SIZE
    finally:
        arrival.give_up()


def test_what_is_given_up_holds_no_memory(reading: Callable[..., Reading]) -> None:
    """What did not fit on the device stayed in host memory until the answer was over."""
    own = reading(full_tier(), num_blocks=20)
    arrival, feed = own.begin()
    own.settle(arrival)
    assert own.thread.flush(PATIENCE_S)

    assert 0 < arrival.num_tokens < NUM_BLOCKS * BLOCK_SIZE
    assert not arrival.waiting
    assert feed.pieces.empty()


def test_what_is_read_while_it_is_given_up_is_let_go_of(reading: Callable[..., Reading]) -> None:
    tier = full_tier()
    own = reading(tier)
    is_reading, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        may_go_on.wait(PATIENCE_S)

    tier.before_read = wait
    arrival, feed = own.begin()
    assert is_reading.wait(PATIENCE_S)

    arrival.give_up()
    may_go_on.set()
    assert own.thread.flush(PATIENCE_S)

    assert feed.num_put == 1
    assert feed.pieces.empty()


def test_an_engine_that_takes_nothing_is_waited_for_once() -> None:
    """Each pack behind a front was once kept back for longer than it takes to read one."""
    waits: list[float] = []

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    feed = Feed(PROMPT, has_taken=Waited())
    for number in range(8):
        feed.let_engine_take()
        feed.deliver(Piece(number, 1, bytearray(IMAGE_BYTES)))
    assert len(waits) == 1

    feed.num_taken = 5
    feed.let_engine_take()
    feed.let_engine_take()
    assert len(waits) == 2


def test_a_front_found_by_the_reader_is_not_lost_to_the_engines_haste() -> None:
    """Both wrote the same number: the later one stood, and what came up had no KV before it."""
    tier, clock = full_tier(), Clock(0.0)
    thread = KeptJobs(tier)
    chain = new_chain(new_cache(200), lambda: tier, clock=clock)
    chain.close()
    chain.links[0].thread = thread  # type: ignore[assignment]
    chain.planner.prefill.of_long, chain.planner.rates["from disk"] = 400.0, 3200.0
    arrivals = chain.arrivals
    arrival = arrivals.begin(PROMPT)
    assert arrival is not None
    feed = arrival.feed
    assert feed is not None
    is_late, planned = arrivals._is_late, []

    def read_meanwhile(*late: Any) -> bool:
        """The reader finds the packs just after the engine has looked for what it has found."""
        clock.now_s = 60.0
        for job in thread.jobs:
            job(tier)
        planned.append(feed.num_planned)
        return is_late(*late)

    arrivals._is_late = read_meanwhile  # type: ignore[method-assign]
    arrivals.settle_one(arrival)
    arrivals._is_late = is_late  # type: ignore[method-assign]
    arrivals.settle_one(arrival)

    assert planned[0] > 64
    assert arrival.num_front == planned[0]
    assert not arrival.is_over


def test_an_image_shorter_than_its_blocks_is_a_miss(reading, caplog):
    tier = full_tier()
    first = next(iter(tier.blocks))
    tier.blocks[first] = tier.blocks[first][:-1]
    own = reading(tier)
    arrival, _ = own.begin()
    own.settle(arrival)

    assert arrival.miss_reason is MissReason.CORRUPT
    assert arrival.num_tokens == 0
    assert not caplog.records, "it is no error of the program"


@pytest.mark.parametrize(
    ("error", "miss_reason"),
    [
        (GoneRecord("gone"), MissReason.EVICTED),
        (BusyRecord("unreadable"), MissReason.LATE),
        (DamagedRecord("checksum"), MissReason.CORRUPT),
    ],
)
def test_what_another_process_removed_meanwhile_is_not_called_corrupt(reading, error, miss_reason):
    tier = full_tier()

    def fail() -> None:
        raise error

    tier.before_read = fail
    own = reading(tier)
    arrival, _ = own.begin()
    own.settle(arrival)

    assert arrival.miss_reason is miss_reason
