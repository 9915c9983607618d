"""Whole contexts between two machines' disks and a shared store, without a model."""

from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.lookup import KnownModel, KnownModels
from kvchat.cache.disk.memory import DiskMemory
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.shared.copying import ContextCopier, Copy
from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import Layout, PackHead
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.types import Memory
from support.shared_stores import DictStore

LAYOUT = Layout(b"an identity of 16"[:16], 4, 32)
KEY = TeamKey("a secret of the team", LAYOUT)
IDS = tuple(range(24))  # six blocks
LIMIT = 64 << 20


class Machine:
    """A machine's disk, which has run the model once, and the store that it shares."""

    def __init__(self, directory: Path, store: DictStore) -> None:
        self.directory = directory / "kv"
        self.store = store
        self.memory: Memory = DiskMemory(directory)
        KnownModels(self.memory).note(
            LAYOUT.identity.hex(), KnownModel("a model", "rates", LAYOUT.block_size, 32)
        )
        self.copier = ContextCopier(self.directory, LIMIT, self.memory, self.open_shared)

    def open_shared(self, layout: Layout) -> SharedTier:
        assert layout == LAYOUT
        return SharedTier(self.store, KEY, layout, 10_000, Tombstones(self.memory))

    def open_disk(self) -> DiskTier:
        return DiskTier(self.directory, LAYOUT, LIMIT, 0)

    def write(self, ids: tuple[int, ...], label: str = "") -> None:
        disk, encoded = self.open_disk(), encode_ids(ids)
        image = b"".join(bytes([number]) * 32 for number in range(len(ids) // 4))
        assert disk.write(PackHead(disk.root, encoded), memoryview(image))
        if label:
            disk.pin(chain_keys(disk.root, encoded, LAYOUT.ids_bytes), encoded, label)
        disk.close()

    def num_on_disk(self, ids: tuple[int, ...]) -> int:
        disk, encoded = self.open_disk(), encode_ids(ids)
        count = disk.peek(chain_keys(disk.root, encoded, LAYOUT.ids_bytes), encoded)
        disk.close()
        return count


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Machine, Machine]:
    store = DictStore()
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    return Machine(tmp_path / "one", store), Machine(tmp_path / "other", store)


def go_on(copy: Copy) -> bool:
    return True


def test_a_conversation_comes_home(machines: tuple[Machine, Machine]) -> None:
    one, other = machines
    one.write(IDS)

    pushed = one.copier.push("a conversation", IDS, go_on)
    pulled = other.copier.pull("a conversation", IDS, "a model", go_on)

    assert (pushed.num_there, pulled.num_there) == (24, 24)
    assert pulled.num_bytes == 6 * 32
    assert other.num_on_disk(IDS) == 6
    assert other.copier.pull("a conversation", IDS, "a model", go_on).num_bytes == 0


def test_a_pin_is_found_by_its_name_where_nobody_knows_its_ids(machines):
    one, other = machines
    one.write(IDS, label="manual")

    one.copier.push("manual", None, go_on)

    assert other.copier.pull("manual", None, "", go_on).num_there == 24
    assert other.num_on_disk(IDS) == 6


def test_a_copy_that_was_ended_goes_on_where_it_was(machines: tuple[Machine, Machine]) -> None:
    one, other = machines
    one.write(IDS[:12])
    one.copier.push("a conversation", IDS[:12], go_on)
    one.write(IDS)  # in a second pack
    one.copier.push("a conversation", IDS, go_on)
    prices: list[Copy] = []

    def only_one(copy: Copy) -> bool:
        prices.append(copy)
        return len(prices) < 2

    ended = other.copier.pull("a conversation", IDS, "a model", only_one)
    assert ended.num_there == 12
    rest = other.copier.pull("a conversation", IDS, "a model", go_on)

    assert (prices[0].num_tokens, prices[0].num_bytes) == (24, 6 * 32)
    assert rest.num_bytes == 3 * 32
    assert other.num_on_disk(IDS) == 6


def test_what_is_nowhere_is_said(machines: tuple[Machine, Machine]) -> None:
    one, other = machines

    with pytest.raises(UsageError, match="no pin called"):
        one.copier.push("manual", None, go_on)
    with pytest.raises(UsageError, match="on the disk"):
        one.copier.push("a conversation", IDS, go_on)
    with pytest.raises(UsageError, match="has nothing of"):
        other.copier.pull("manual", None, "", go_on)


def test_a_store_that_cannot_be_reached_is_said(machines: tuple[Machine, Machine]) -> None:
    one, _ = machines
    one.write(IDS)
    one.store.trouble = "it cannot be reached"

    with pytest.raises(StoreError, match="cannot be reached"):
        one.copier.push("a conversation", IDS, go_on)


def test_deleting_a_conversation_reaches_the_store(machines: tuple[Machine, Machine]) -> None:
    one, other = machines
    one.write(IDS)
    one.copier.push("a conversation", IDS, go_on)
    admin = StoreAdmin(one.directory, memory=one.memory, open_shared=one.open_shared)

    admin.forget([IDS], [IDS[:8]], labels=["a conversation"])

    assert not one.store.heads_kept
    assert not one.store.payloads
    with pytest.raises(UsageError):
        other.copier.pull("a conversation", None, "", go_on)


def test_a_deletion_without_the_key_deletes_here_and_says_so(machines):
    one, _ = machines
    one.write(IDS)

    def open_shared(layout: Layout) -> SharedTier:
        raise UsageError("The key is missing.")

    admin = StoreAdmin(one.directory, memory=one.memory, open_shared=open_shared)

    with pytest.raises(StoreError, match="key is missing"):
        admin.forget([IDS], [])
    assert one.num_on_disk(IDS) == 0


def test_a_deletion_that_does_not_reach_the_store_says_so(machines):
    one, _ = machines
    one.write(IDS)
    one.copier.push("a conversation", IDS, go_on)
    one.store.trouble = "it cannot be reached"
    admin = StoreAdmin(one.directory, memory=one.memory, open_shared=one.open_shared)

    with pytest.raises(StoreError, match="cannot be reached") as failed:
        admin.forget([IDS], [])

    assert "30 days" in failed.value.hint  # clearing the disk would not help
    assert one.num_on_disk(IDS) == 0
    one.store.trouble = ""
    tier, encoded = one.open_shared(LAYOUT), encode_ids(IDS)
    keys = chain_keys(root_key(LAYOUT.identity), encoded, LAYOUT.ids_bytes)
    assert tier.find(keys, encoded) == []  # what it still has is not believed here
