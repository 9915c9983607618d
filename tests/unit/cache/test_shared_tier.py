"""The shared tier over a store that tests can spoil, and over real ones.

What one machine writes another one reads; whatever a store does, the worst is a miss.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvchat.cache.breaker import Breaker
from kvchat.cache.disk.memory import DiskMemory
from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.shared.opening import open_store
from kvchat.cache.shared.store import MOST_HEAD_BYTES, Deadlines, SharedStore
from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import (
    BusyRecord,
    DamagedRecord,
    GoneRecord,
    Layout,
    LogitFingerprint,
    PackHead,
)
from kvchat.core.errors import UsageError
from kvchat.core.types import NO_MEMORY, Memory
from support.clock import Clock
from support.shared_stores import REAL_STORES, DictStore

SECRET = "a secret of the team"
LAYOUT = Layout(b"an identity of 16", 4, 32)
ROOT = root_key(LAYOUT.identity)
IDS = encode_ids(range(24))  # six blocks
KEYS = chain_keys(ROOT, IDS, LAYOUT.ids_bytes)
TTL_S = 1000
DEADLINES = Deadlines(first_s=5.0)
FINGERPRINT = LogitFingerprint((3, 5), (0.5, -1.0))


def tier_on(
    store: SharedStore,
    secret: str = SECRET,
    memory: Memory = NO_MEMORY,
    clock: Clock | None = None,
    encrypts: bool = True,
    layout: Layout = LAYOUT,
) -> SharedTier:
    clock = clock or Clock()
    key = TeamKey(secret, layout, encrypts)
    return SharedTier(
        store, key, layout, TTL_S, Tombstones(memory, clock), clock, breaker=Breaker(clock)
    )


def image_of(first: int, last: int) -> bytes:
    return b"".join(bytes([block]) * LAYOUT.block_bytes for block in range(first, last))


def write(tier: SharedTier, first: int, last: int) -> bool:
    size = LAYOUT.ids_bytes
    parent = KEYS[first - 1] if first else ROOT
    head = PackHead(parent, IDS[first * size : last * size], fingerprint=FINGERPRINT)
    return tier.write(head, memoryview(image_of(first, last)))


def read(tier: SharedTier, encoded: bytes = IDS) -> bytes:
    keys = chain_keys(ROOT, encoded, LAYOUT.ids_bytes)
    return b"".join(bytes(tier.read(run)) for run in tier.find(keys, encoded))


@pytest.fixture(scope="module", params=["dict", "file", *REAL_STORES])
def kind(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Return a kind of store, and the address of a real one: a server is started once."""
    if request.param not in REAL_STORES:
        yield request.param, ""
        return
    with REAL_STORES[request.param]() as url:
        yield request.param, url


@pytest.fixture
def new_store(kind: tuple[str, str], tmp_path: Path) -> Callable[[], SharedStore]:
    """Return what opens the same store again, as another machine does; it is empty at first."""
    if kind[0] == "dict":
        store = DictStore()
        return lambda: store
    url = kind[1] or f"file://{tmp_path}/nas"
    tier_on(open_store(url, DEADLINES)).forget(KEYS)
    return lambda: open_store(url, DEADLINES)


def test_another_machine_reads_what_was_written(new_store: Callable[[], SharedStore]) -> None:
    one, other = tier_on(new_store()), tier_on(new_store())
    assert other.find(KEYS, IDS) == []

    assert write(one, 0, 4)
    assert write(one, 4, 6)

    assert [run.num_blocks for run in other.find(KEYS, IDS)] == [4, 2]
    assert read(other) == image_of(0, 6)
    assert other.find(KEYS, IDS)[-1].fingerprint == FINGERPRINT
    assert other.status().bytes_read == 6 * LAYOUT.block_bytes
    assert one.latency_s < math.inf
    one.close()
    other.close()


def test_a_context_that_leaves_a_pack_gets_its_beginning(new_store):
    tier = tier_on(new_store())
    write(tier, 0, 6)
    other = IDS[: 3 * LAYOUT.ids_bytes] + encode_ids([77, 77, 77, 77])
    keys = chain_keys(ROOT, other, LAYOUT.ids_bytes)

    [run] = tier.find(keys, other)

    assert run.num_blocks == 3
    assert run.fingerprint is None
    assert bytes(tier.read(run)) == image_of(0, 3)


def test_forgotten_blocks_are_removed_with_the_records_that_have_them(new_store):
    tier, other = tier_on(new_store()), tier_on(new_store())
    write(tier, 0, 4)
    write(tier, 4, 6)

    tier.forget(KEYS[3:], KEYS[:3])

    assert tier.find(KEYS, IDS) == []
    assert other.find(KEYS, IDS) == []


def test_nothing_is_read_that_is_larger_than_a_record_can_be(new_store):
    store = new_store()
    store.put("group", "name", bytes(MOST_HEAD_BYTES + 1), bytes(5000), 100)

    assert store.payload("group", "name", 5000) == bytes(5000)
    assert store.payload("group", "name", 4999) is None
    assert store.heads("group", ["name"]) == {}
    store.remove("group", ["name"])
    store.close()


@pytest.mark.parametrize("encrypts", [True, False])
def test_no_bytes_that_a_store_changes_are_believed(encrypts: bool) -> None:
    store = DictStore()
    write(tier_on(store, encrypts=encrypts), 0, 4)
    [name] = store.payloads
    payload, head = store.payloads[name], store.heads_kept[name]

    for spoiled in (b"", payload[:-1], payload + b"x", os.urandom(len(payload)), head):
        store.payloads[name] = spoiled
        tier = tier_on(store)
        [run] = tier.find(KEYS, IDS)
        with pytest.raises(DamagedRecord):
            tier.read(run)
    store.payloads[name] = payload
    for spoiled in (b"", head[:-1], head + b"x", os.urandom(len(head)), payload):
        store.heads_kept[name] = spoiled
        tier = tier_on(store)
        assert tier.find(KEYS, IDS) == []
        assert tier.status().num_damaged == 1


def test_records_of_another_team_and_of_another_place_are_misses_that_count() -> None:
    store = DictStore()
    theirs = tier_on(store, secret="the secret of others")
    write(theirs, 0, 4)
    [name] = store.payloads
    own = TeamKey(SECRET, LAYOUT)
    first, moved = own.name(KEYS[0]), own.name(KEYS[4])
    store.payloads[first], store.heads_kept[first] = store.payloads[name], store.heads_kept[name]

    tier = tier_on(store)
    assert tier.find(KEYS, IDS) == []
    assert tier.status().num_damaged == 1

    write(tier, 0, 4)
    store.heads_kept[moved], store.payloads[moved] = store.heads_kept[first], store.payloads[first]
    assert [run.num_blocks for run in tier.find(KEYS, IDS)] == [4]
    assert tier.status().num_damaged == 2


def test_a_replayed_record_is_refused_after_it_was_forgotten(tmp_path: Path) -> None:
    store, clock, memory = DictStore(), Clock(), DiskMemory(tmp_path)
    tier = tier_on(store, memory=memory, clock=clock)
    write(tier, 0, 4)
    heads, payloads = dict(store.heads_kept), dict(store.payloads)
    clock.now_s += 10
    tier.forget(KEYS[:4])
    store.heads_kept, store.payloads = heads, payloads

    assert tier.find(KEYS, IDS) == []
    assert tier_on(store, memory=DiskMemory(tmp_path), clock=clock).find(KEYS, IDS) == []
    clock.now_s += 10
    assert write(tier, 0, 4)  # the same text is shared again
    assert [run.num_blocks for run in tier.find(KEYS, IDS)] == [4]


def test_a_name_that_is_replayed_after_it_was_forgotten_tells_no_ids() -> None:
    """Its record has the token ids of the context: the words of a conversation."""
    store, clock = DictStore(), Clock()
    tier = tier_on(store, clock=clock)
    tier.put_name("a conversation", IDS)
    assert tier_on(store, clock=clock).named("a conversation") == IDS
    heads = dict(store.heads_kept)
    clock.now_s += 10

    tier.forget_names(["a conversation"])
    assert not store.heads_kept
    store.heads_kept = heads

    assert tier.named("a conversation") == b""
    clock.now_s += TTL_S + 301
    assert tier_on(store, clock=clock).named("a conversation") == b""  # expired elsewhere too


def test_an_expired_record_and_one_of_the_future_are_refused() -> None:
    store, clock = DictStore(), Clock()
    tier = tier_on(store, clock=clock)
    write(tier, 0, 4)

    clock.now_s += TTL_S + 301
    assert tier.find(KEYS, IDS) == []
    clock.now_s -= 2 * TTL_S
    assert tier.find(KEYS, IDS) == []


def test_a_store_that_fails_is_left_alone_for_longer_each_time_and_told_once() -> None:
    store, clock = DictStore(), Clock()
    tier = tier_on(store, clock=clock)
    write(tier, 0, 4)
    [run] = tier.find(KEYS, IDS)
    store.trouble, store.num_calls = "it cannot be reached", 0

    assert tier.find(KEYS, IDS) == []
    assert "cannot be reached" in tier.status().trouble
    assert tier.latency_s == math.inf
    with pytest.raises(BusyRecord):
        tier.read(run)
    assert not write(tier, 4, 6)
    assert tier.tidy()
    assert store.num_calls == 1
    clock.now_s += 1.1
    assert tier.tidy()
    assert store.num_calls == 2
    clock.now_s += 1.1
    assert tier.tidy()
    assert store.num_calls == 2  # it rests for two seconds now
    store.trouble = ""
    clock.now_s += 1
    assert not tier.tidy()
    assert tier.latency_s < math.inf
    assert read(tier) == image_of(0, 4)


def test_a_record_that_is_removed_or_replaced_meanwhile_is_gone() -> None:
    store = DictStore()
    tier = tier_on(store)
    write(tier, 0, 4)
    [run] = tier.find(KEYS, IDS)
    store.payloads.clear()

    with pytest.raises(GoneRecord):
        tier.read(run)
    with pytest.raises(GoneRecord):
        tier.read(run)


def test_wrong_kv_never_comes_back() -> None:
    store = DictStore()
    tier = tier_on(store)
    write(tier, 0, 4)
    kept = dict(store.heads_kept), dict(store.payloads)

    tier.quarantine(KEYS)
    store.heads_kept, store.payloads = kept

    assert tier.find(KEYS, IDS) == []
    assert tier.status().num_quarantined == len(KEYS)


def test_a_lookup_is_one_call_however_long_the_prompt_is() -> None:
    store = DictStore()
    tier = tier_on(store)
    for first in range(6):
        write(tier, first, first + 1)
    store.num_calls = 0

    assert len(tier.find(KEYS, IDS)) == 6
    assert store.num_calls == 1


@pytest.mark.parametrize("url", ["ftp://host", "nonsense", "mooncake://", "valkey://host:port"])
def test_an_address_of_no_store_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url, Deadlines())
