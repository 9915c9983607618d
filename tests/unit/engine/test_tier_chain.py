"""A shared store behind the disk: one class, and one line in the list of what opens tiers.

The store is a dict in memory, as another machine's would be; the model answers from what it reads
back from its KV, so that a wrong block shows in the text.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.tier import BlockRun, Layout, Tier, TierOpener
from kvchat.chat.why import missing
from kvchat.core.errors import StoreError
from kvchat.core.types import CachedTokens, MissReason
from kvchat.terminal.cache_lines import tier_lines
from support.memory_tier import MemoryTier
from support.restarts import HISTORY, Processes, spec

LAYOUT = Layout(b"a remembering mo", 4, 4 * 8)
NUM_KEPT = len(HISTORY) // 4 * 4


class SharedStore(MemoryTier):
    """Lasts as long as the test; may be out of reach."""

    def __init__(self, root: bytes) -> None:
        super().__init__(LAYOUT.block_size, LAYOUT.block_bytes, root)
        self.is_away = False

    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        if self.is_away:
            fail()
        return super().find(keys, encoded, is_one_shot)

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        return MissReason.EVICTED


def fail() -> None:
    raise ConnectionError("the shared store is out of reach")


class Machines:
    """Machines with a disk each, and one store that all share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        disk = self.open_disk(lambda: LAYOUT)
        self.shared = SharedStore(disk.root)
        disk.close()
        openers = [
            TierOpener("disk", self.open_disk),
            TierOpener("shared", lambda layout: self.shared),
        ]
        self.processes = Processes(None, openers)

    def next_machine(self) -> None:
        """Go on at another machine, whose disk is empty."""
        self._number += 1

    def open_disk(self, layout: Callable[[], Layout]) -> Tier:
        return DiskTier(self._directory / str(self._number), LAYOUT, 8 << 20, 0)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for process in made.processes.started:
        process.end()


def test_what_only_the_shared_store_has_is_restored(machines: Machines) -> None:
    machines.processes.end_one(spec(HISTORY))
    machines.next_machine()

    finished = machines.processes.start().answer_rightly(spec(HISTORY))

    assert finished.usage.cached == CachedTokens(others=(("shared", NUM_KEPT),))
    assert finished.usage.as_dict()["cached_tokens"] == {
        "device": 0,
        "host": 0,
        "disk": 0,
        "shared": NUM_KEPT,
        "total": NUM_KEPT,
    }
    assert finished.miss_reason is None
    assert machines.shared.num_read == NUM_KEPT // 4


def test_what_the_disk_has_is_not_read_from_the_shared_store(machines: Machines) -> None:
    machines.processes.end_one(spec(HISTORY))

    finished = machines.processes.start().answer_rightly(spec(HISTORY))

    assert finished.usage.cached.disk == NUM_KEPT
    assert machines.shared.num_read == 0


def test_the_end_of_a_context_comes_from_where_it_is(machines: Machines) -> None:
    """The disk has the beginning, the shared store all of it, in packs that are cut elsewhere."""
    machines.next_machine()
    machines.processes.end_one(spec(HISTORY[:22]))
    machines.shared.blocks.clear()  # the second machine begins with its disk alone
    machines.shared._parents.clear()
    machines._number -= 1
    machines.processes.end_one(spec(HISTORY))
    machines.next_machine()

    finished = machines.processes.start().answer_rightly(spec(HISTORY))

    cached = finished.usage.cached
    assert cached.disk == 20
    assert cached.total == NUM_KEPT
    assert machines.shared.num_read == NUM_KEPT // 4  # its first run begins on the disk, too


@pytest.mark.parametrize("when", ["finding", "reading"])
def test_a_shared_store_that_fails_is_a_miss(machines: Machines, when: str) -> None:
    machines.processes.end_one(spec(HISTORY))
    machines.next_machine()
    if when == "finding":
        machines.shared.is_away = True
    else:
        machines.shared.before_read = fail

    finished = machines.processes.start().answer_rightly(spec(HISTORY))

    assert finished.usage.cached.disk == 0


def test_the_disk_keeps_what_a_failing_store_does_not_take(machines: Machines) -> None:
    machines.shared.before_write = fail
    machines.shared.is_away = True
    machines.processes.end_one(spec(HISTORY))

    finished = machines.processes.start().answer_rightly(spec(HISTORY))

    assert finished.usage.cached.disk == NUM_KEPT


def test_a_tier_that_cannot_be_opened_is_told_of_and_the_others_work(tmp_path: Path) -> None:
    def broken(layout: Callable[[], Layout]) -> Tier:
        raise StoreError("the shared store refuses this machine.")

    def disk(layout: Callable[[], Layout]) -> Tier:
        return DiskTier(tmp_path, LAYOUT, 8 << 20, 0)

    processes = Processes(None, [TierOpener("shared", broken), TierOpener("disk", disk)])
    for _ in range(2):
        process = processes.start()
        finished = process.answer_rightly(spec(HISTORY))
        assert process.chain.flush(60.0)
        shared, ours = process.chain.status()
        process.end()

    assert finished.usage.cached.disk == NUM_KEPT
    assert "refuses this machine" in shared.trouble
    assert (ours.trouble, ours.limit_bytes) == ("", 8 << 20)


def test_statistics_name_each_tier_and_forgetting_reaches_it(machines: Machines) -> None:
    process = machines.processes.start()
    process.answer(spec(HISTORY))
    assert process.chain.flush(60.0)
    num_blocks = len(machines.shared.blocks)
    lines = [line for tier in process.harness.engine.status().tiers for line in tier_lines(tier)]
    assert [line.split()[:2] for line in lines] == [["disk:", "1"], ["shared:", str(num_blocks)]]

    done: list[bool] = []
    process.harness.engine.forget([(HISTORY, 12)], lambda: done.append(True))
    assert process.chain.flush(60.0)

    assert done == [True]
    assert len(machines.shared.blocks) == 3, "what is kept for others stays"


def test_what_a_context_costs_and_why_it_is_missing_counts_each_tier(machines: Machines) -> None:
    machines.processes.end_one(spec(HISTORY[:22]))
    machines.next_machine()
    process = machines.processes.start()
    assert process.chain.flush(60.0)

    located: list[CachedTokens] = []
    process.harness.engine.locate(
        [HISTORY], lambda places: located.extend(place.cached for place in places)
    )
    assert process.chain.flush(60.0)
    _, finished = process.answer(spec(HISTORY))

    assert [each.places for each in located] == [{"device": 0, "host": 0, "disk": 0, "shared": 20}]
    assert finished.miss_reason is MissReason.EVICTED, "the tier that had most says why"
    assert "28" in missing(28, finished.miss_reason)


def test_what_is_quarantined_comes_from_no_tier(machines: Machines) -> None:
    machines.processes.end_one(spec(HISTORY))
    for key, image in list(machines.shared.blocks.items()):
        machines.shared.blocks[key] = b"\x00\x00\x00\x3f" * 4 + image[16:]
    machines.next_machine()

    process = machines.processes.start()
    finished = process.answer_rightly(spec(HISTORY))

    assert finished.usage.cached.total == 0
    assert process.chain.flush(60.0)
    assert machines.shared.num_quarantined >= NUM_KEPT // 4


def test_each_slow_tier_has_a_thread_of_its_own(machines: Machines) -> None:
    """A store that hangs held up what the disk had to read and to write."""
    may_go_on = threading.Event()
    machines.shared.before_write = lambda: may_go_on.wait(60.0) and None
    process = machines.processes.start()
    process.answer(spec(HISTORY))

    disk, shared = process.chain.slow
    assert disk.thread.flush(60.0)
    assert not shared.thread.flush(0.0)
    status = process.harness.engine.status().tier("disk")
    assert status is not None
    assert status.bytes_written > 0
    assert not machines.shared.blocks
    may_go_on.set()
