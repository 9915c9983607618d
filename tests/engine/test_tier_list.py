"""A shared store behind the disk: one more tier of the list.

The store is a dict in memory, as another machine's would be; the model answers from what it reads
back from its KV, so that a wrong block shows in the text.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import chain_keys, encode_ids
from kvchat.cache.tier import DamagedRecord, Found, Layout, Tier
from kvchat.cache.tier_list import TierList, open_tiers
from kvchat.core.errors import StoreError
from support.memory_tier import MemoryTier
from support.restarts import HISTORY, Processes, alone, spec

LAYOUT = Layout(b"a remembering mo", 4, 4 * 8)
NUM_KEPT = len(HISTORY) // 4 * 4


class SharedStore(MemoryTier):
    """Lasts as long as the test; may be out of reach."""

    def __init__(self, root: bytes) -> None:
        super().__init__(LAYOUT.block_size, LAYOUT.block_bytes)
        self.root = root
        self.is_away = False

    def find(self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False) -> list[Found]:
        if self.is_away:
            fail()
        return super().find(keys, encoded, is_one_shot)


def fail() -> None:
    raise ConnectionError("the shared store is out of reach")


class Machines:
    """Machines with a disk each, and one store that all share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self.shared: SharedStore | None = None
        self.processes = Processes(self.open)

    def next_machine(self) -> None:
        """Go on at another machine, whose disk is empty."""
        self._number += 1

    def open_disk(self, layout: Callable[[], Layout]) -> Tier:
        return DiskTier(self._directory / str(self._number), layout(), 8 << 20, 0)

    def open_shared(self, layout: Callable[[], Layout]) -> Tier:
        layout()
        assert self.shared is not None
        return self.shared

    def open(self) -> Tier:
        return open_tiers([self.open_disk, self.open_shared], lambda: LAYOUT)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    disk = made.open_disk(lambda: LAYOUT)
    made.shared = SharedStore(disk.root)
    disk.close()
    yield made
    for process in made.processes.started:
        process.end()


def test_what_only_the_shared_store_has_is_restored(machines: Machines) -> None:
    first = machines.processes.start()
    first.answer(spec(HISTORY))
    first.end()
    machines.next_machine()

    answer, finished = machines.processes.start().answer(spec(HISTORY))

    assert answer == alone(spec(HISTORY))
    assert finished.usage.cached.disk == NUM_KEPT
    assert machines.shared is not None
    assert machines.shared.num_read == NUM_KEPT // 4


def test_what_the_disk_has_is_not_read_from_the_shared_store(machines: Machines) -> None:
    first = machines.processes.start()
    first.answer(spec(HISTORY))
    first.end()

    answer, finished = machines.processes.start().answer(spec(HISTORY))

    assert answer == alone(spec(HISTORY))
    assert finished.usage.cached.disk == NUM_KEPT
    assert machines.shared is not None
    assert machines.shared.num_read == 0


def test_the_end_of_a_context_comes_from_where_it_is(machines: Machines) -> None:
    """The disk has the beginning, the shared store all of it, in packs that are cut elsewhere."""
    machines.next_machine()
    first = machines.processes.start()
    first.answer(spec(HISTORY[:22]))
    first.end()
    assert machines.shared is not None
    machines.shared.blocks.clear()  # the second machine begins with its disk alone
    machines.shared._parents.clear()
    machines._number -= 1
    other = machines.processes.start()
    other.answer(spec(HISTORY))
    other.end()
    machines.next_machine()

    answer, finished = machines.processes.start().answer(spec(HISTORY))

    assert answer == alone(spec(HISTORY))
    assert finished.usage.cached.disk == NUM_KEPT
    assert machines.shared.num_read == NUM_KEPT // 4  # its first run begins on the disk, too


@pytest.mark.parametrize("when", ["finding", "reading"])
def test_a_shared_store_that_fails_is_a_miss(machines: Machines, when: str) -> None:
    first = machines.processes.start()
    first.answer(spec(HISTORY))
    first.end()
    machines.next_machine()
    assert machines.shared is not None
    if when == "finding":
        machines.shared.is_away = True
    else:
        machines.shared.before_read = fail

    answer, finished = machines.processes.start().answer(spec(HISTORY))

    assert answer == alone(spec(HISTORY))
    assert finished.usage.cached.disk == 0


def test_the_disk_keeps_what_a_failing_store_does_not_take(machines: Machines) -> None:
    assert machines.shared is not None
    machines.shared.before_write = fail
    machines.shared.is_away = True
    first = machines.processes.start()
    first.answer(spec(HISTORY))
    first.end()

    answer, finished = machines.processes.start().answer(spec(HISTORY))

    assert answer == alone(spec(HISTORY))
    assert finished.usage.cached.disk == NUM_KEPT


def test_a_tier_that_cannot_be_opened_is_left_out_and_told_of(tmp_path: Path) -> None:
    def broken(layout: Callable[[], Layout]) -> Tier:
        raise StoreError("the shared store refuses this machine.")

    def disk(layout: Callable[[], Layout]) -> Tier:
        return DiskTier(tmp_path, layout(), 8 << 20, 0)

    joined = open_tiers([disk, broken], lambda: LAYOUT)

    assert isinstance(joined, TierList)
    assert "refuses this machine" in joined.status().trouble
    assert joined.status().limit_bytes == 8 << 20
    joined.close()
    with pytest.raises(StoreError):
        open_tiers([broken], lambda: LAYOUT)


def test_what_is_quarantined_comes_from_no_tier(machines: Machines) -> None:
    first = machines.processes.start()
    first.answer(spec(HISTORY))
    first.end()
    joined = machines.open()
    encoded = encode_ids(HISTORY)
    keys = chain_keys(joined.root, encoded, LAYOUT.ids_bytes)
    found = joined.find(keys, encoded)
    assert found
    joined.quarantine(keys)

    assert joined.find(keys, encoded) == []
    with pytest.raises(DamagedRecord):
        joined.read(found[0])
    joined.close()
