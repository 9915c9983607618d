"""A restore and its reader: which waits for which, and what is freed when no piece is taken."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from kvchat.cache.keys import chain_keys, encode_ids
from kvchat.cache.rates import RestorePlanner
from kvchat.cache.restore import Piece, Restore, Restorer
from kvchat.cache.tier import DamagedRecord, GoneRecord, HeldRecord, Tier
from kvchat.cache.transfer import TransferThread
from kvchat.core.types import MissReason
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
    """A prompt's restore, read by a real transfer thread and settled when the test says so."""

    def __init__(self, tier: Tier, num_blocks: int = 200) -> None:
        self.planner = RestorePlanner()
        self.transfer = TransferThread(lambda: tier, 1 << 20)
        self.restorer = Restorer(
            new_cache(num_blocks), self.transfer, self.planner, lambda ids, count: None, lambda: 0.0
        )

    def begin(self) -> Restore:
        restore = self.restorer.begin(PROMPT, is_prefetch=False)
        assert restore is not None
        return restore

    def settle(self, restore: Restore) -> None:
        while self.restorer.settle(restore):
            self.restorer.wait_for_news()


@dataclass
class KeptJobs:
    """A transfer thread whose jobs the test does."""

    tier: Tier | None = None
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
        each.transfer.close(PATIENCE_S)


def test_copies_have_their_turn_while_nobody_takes_what_was_read(
    reading: Callable[..., Reading],
) -> None:
    """A prompt whose front found no room waited for a promotion to give blocks back, and that for
    its copies, which waited for the prompt's reader, which waited for the prompt: for ever.
    """
    own = reading(full_tier())
    restore = own.begin()
    try:
        is_copied = threading.Event()
        while restore.num_put < 64:
            own.restorer.wait_for_news()
        own.transfer.copy(is_copied.set)

        assert is_copied.wait(PATIENCE_S)
        own.settle(restore)
        assert restore.num_tokens == NUM_BLOCKS * BLOCK_SIZE
    finally:
        restore.give_up()


def test_what_is_given_up_holds_no_memory(reading: Callable[..., Reading]) -> None:
    """What did not fit on the device stayed in host memory until the answer was over."""
    own = reading(full_tier(), num_blocks=20)
    restore = own.begin()
    own.settle(restore)
    assert own.transfer.flush(PATIENCE_S)

    assert 0 < restore.num_tokens < NUM_BLOCKS * BLOCK_SIZE
    assert not restore.held
    assert restore.pieces.empty()


def test_what_is_read_while_it_is_given_up_is_let_go_of(reading: Callable[..., Reading]) -> None:
    tier = full_tier()
    own = reading(tier)
    is_reading, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        may_go_on.wait(PATIENCE_S)

    tier.before_read = wait
    restore = own.begin()
    assert is_reading.wait(PATIENCE_S)

    restore.give_up()
    may_go_on.set()
    assert own.transfer.flush(PATIENCE_S)

    assert restore.num_put == 1
    assert restore.pieces.empty()


def test_an_engine_that_takes_nothing_is_waited_for_once() -> None:
    """Each pack behind a front was once kept back for longer than it takes to read one."""
    waits: list[float] = []

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    restore = Restore(PROMPT, 0, 0.0, is_prefetch=False, has_taken=Waited())
    for number in range(8):
        restore.let_engine_take()
        restore.deliver(Piece(number, 1, bytearray(IMAGE_BYTES)))
    assert len(waits) == 1

    restore.num_taken = 5
    restore.let_engine_take()
    restore.let_engine_take()
    assert len(waits) == 2


def test_a_front_found_by_the_reader_is_not_lost_to_the_engines_haste() -> None:
    """Both wrote the same number: the later one stood, and what came up had no KV before it."""
    tier = full_tier()
    transfer = KeptJobs()
    planner = RestorePlanner(prefill_tokens_per_s=400.0, read_bytes_per_s=3200.0)
    now_s = [0.0]
    restorer = Restorer(
        new_cache(200),
        transfer,
        planner,
        lambda ids, count: None,
        lambda: now_s[0],  # type: ignore[arg-type]
    )
    restore = restorer.begin(PROMPT, is_prefetch=False)
    assert restore is not None
    is_late, planned = restorer._is_late, []

    def read_meanwhile(late: Restore) -> bool:
        """The reader finds the packs just after the engine has looked for what it has found."""
        now_s[0] = 60.0
        for job in transfer.jobs:
            job(tier)
        planned.append(restore.num_planned)
        return is_late(late)

    restorer._is_late = read_meanwhile  # type: ignore[method-assign]
    restorer.settle(restore)
    restorer._is_late = is_late  # type: ignore[method-assign]
    restorer.settle(restore)

    assert planned[0] > 64
    assert restore.num_front == planned[0]
    assert not restore.is_over


@pytest.mark.parametrize(
    ("error", "miss_reason"),
    [
        (GoneRecord("gone"), MissReason.EVICTED),
        (HeldRecord("unreadable"), MissReason.LATE),
        (DamagedRecord("checksum"), MissReason.CORRUPT),
    ],
)
def test_what_another_process_removed_meanwhile_is_not_called_corrupt(
    reading: Callable[..., Reading], error: Exception, miss_reason: MissReason
) -> None:
    tier = full_tier()

    def fail() -> None:
        raise error

    tier.before_read = fail
    own = reading(tier)
    restore = own.begin()
    own.settle(restore)

    assert restore.miss_reason is miss_reason
