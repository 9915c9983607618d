"""What the next message is said to cost is what the answer then takes, wherever its KV is."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.lookup import KnownModels
from kvchat.chat.host import ChatHost, EngineQueries
from kvchat.chat.saved_chats import kept_costs
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.core.stats import Cost, KvPlaces
from kvchat.core.types import CachedTokens, MissReason
from support.fact_memory import FactMemory
from support.patient_kvchat import be_patient
from support.tiny_host import BLOCK_SIZE, TINY_KV, ask, tiny_host

TEXT = "Of the twelve ships in the harbour of Grimstad three are red and nine are blue. " * 2


class Life:
    """One process after another on the same directories."""

    def __init__(self, checkpoint: Path, home: Path) -> None:
        self.store = SessionStore(home / "sessions")
        self.kept = home / "kv"
        self.memory = FactMemory()
        self._checkpoint = checkpoint
        self._hosts: list[ChatHost] = []

    def start(self, reuse: bool = True) -> ChatHost:
        kept = self.kept if reuse else None
        host = tiny_host(self._checkpoint, self.store, reuse=reuse, kept=kept, memory=self.memory)
        host.wait_until_ready()
        self._hosts.append(host)
        return host

    @property
    def admin(self) -> StoreAdmin:
        return StoreAdmin(self.kept, None, self.memory, TINY_KV)

    def close(self) -> None:
        for host in self._hosts:
            host.close()


@pytest.fixture
def life(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Life"]:
    be_patient(monkeypatch)
    life = Life(checkpoint, tmp_path)
    yield life
    life.close()


def cost_of(host: ChatHost, session: ChatSession) -> Cost:
    cost = asyncio.run(EngineQueries(host).cost(session.conversation.context_ids()))
    assert cost is not None
    return cost


def held(life: Life) -> str:
    """Have a conversation in a process of its own; return its id."""
    host = life.start()
    session = host.new_session()
    ask(session, TEXT, 30)
    host.close()
    session.close()
    return session.session_id


def test_in_one_process_the_next_message_reads_from_the_device_what_it_is_said_to(life):
    host = life.start()
    session = host.new_session()
    ask(session, TEXT, 30)

    cost = cost_of(host, session)
    ended = ask(session, "And now?")

    assert cost.is_ready
    assert cost.cached.device == cost.num_cached > 0
    # A request may take the head of a block too.
    assert 0 <= ended.usage.cached.device - cost.cached.device < BLOCK_SIZE


def test_after_a_restart_it_reads_from_the_disk_what_it_is_said_to(life, memory):
    """It was called cold: only memory was looked at, before the disk was."""
    session_id = held(life)
    host = life.start()
    session = host.open_session(session_id)
    assert host.places_at_opening is not None
    [at_opening] = host.places_at_opening.result(60)

    cost = cost_of(host, session)  # while it is prefetched, or after
    ended = ask(session, "And now?")

    assert cost.is_ready
    assert cost.cached.disk == cost.num_cached > 0
    assert at_opening.cost().cached == cost.cached
    assert ended.usage.cached.disk == cost.cached.disk


def test_while_no_model_is_loaded_the_disk_tells_the_same(life: Life) -> None:
    session_id = held(life)
    unloaded = kept_costs(life.store, life.admin, [session_id])[session_id]
    host = life.start()
    session = host.open_session(session_id)

    loaded = cost_of(host, session)

    assert (unloaded.num_tokens, unloaded.cached) == (loaded.num_tokens, loaded.cached)
    assert unloaded.seconds == pytest.approx(loaded.seconds, rel=0.5)


def test_under_another_name_of_its_models_file_it_is_there_too(life: Life, tmp_path: Path) -> None:
    """It was called cold once the same weights had been loaded by a link to their file."""
    session_id = held(life)
    [(identity, model)] = KnownModels(life.memory).read().items()
    (tmp_path / "link").symlink_to(model.name)
    KnownModels(life.memory).note(identity, replace(model, name=str(tmp_path / "link")))

    assert kept_costs(life.store, life.admin, [session_id])[session_id].is_ready


def test_what_another_model_that_is_there_kept_does_not_make_it_warm(life, tmp_path):
    """Where no model had its name the KV of all counted, though their weights are others."""
    session_id = held(life)
    [(identity, model)] = KnownModels(life.memory).read().items()
    KnownModels(life.memory).note(identity, replace(model, name=str(tmp_path)))
    assert kept_costs(life.store, life.admin, [session_id])[session_id].is_cold
    KnownModels(life.memory).note(identity, replace(model, name=str(tmp_path / "renamed")))
    ids = life.store.read(session_id).conversation.context_ids()

    assert life.admin.locate([(str(tmp_path / "gone"), ids)])[0].cached.total


def test_what_another_model_kept_is_no_earlier_run_of_one_that_is_new(life: Life) -> None:
    """Where no model had the new one's name, the KV of all counted as its own with other weights,
    and /cache why said that its settings had changed.
    """
    ids = life.store.read(held(life)).conversation.context_ids()
    [(identity, model)] = KnownModels(life.memory).read().items()
    ready = life.start().wait_until_ready()
    life.close()
    KnownModels(life.memory).note(identity, replace(model, dtype="float16"))
    assert life.admin.why_changed(ready, ids, 0) is MissReason.OTHER_WEIGHTS

    assert life.admin.why_changed(replace(ready, name="new"), ids, 0) is None


def test_without_a_cache_all_of_it_is_said_to_be_read(life: Life) -> None:
    session_id = held(life)
    host = life.start(reuse=False)
    session = host.open_session(session_id)

    cost = cost_of(host, session)
    ended = ask(session, "And now?")

    assert cost.is_cold
    assert cost.num_cached == ended.usage.cached.total == 0


def test_after_the_cache_is_cleared_it_is_cold(life: Life) -> None:
    session_id = held(life)
    life.admin.clear()
    unloaded = kept_costs(life.store, life.admin, [session_id])[session_id]
    host = life.start()
    session = host.open_session(session_id)

    assert unloaded.is_cold
    assert unloaded.seconds is not None
    assert cost_of(host, session).is_cold


def test_seconds_are_known_from_the_first_start(life: Life) -> None:
    """They were unknown until an answer had prefilled 64 tokens."""
    session_id = held(life)
    life.memory = FactMemory()
    host = life.start()
    session = host.open_session(session_id)

    before = host.status().result(60).num_cached
    cost = cost_of(host, session)

    assert cost.seconds is not None
    assert cost.is_ready
    assert host.status().result(60).num_cached >= before  # what was measured with is not kept
    session.close()
    host.close()
    # The next start knows it without the model.
    unloaded = kept_costs(life.store, life.admin, [session_id])[session_id]
    assert unloaded.seconds is not None


def test_looking_at_costs_is_no_use_of_what_is_kept(life: Life) -> None:
    """What is looked at often would otherwise be evicted last, though no answer needs it."""
    session_id = held(life)
    before = life.admin.tree()[0][1]
    host = life.start()
    context = life.store.read(session_id).conversation.context_ids()

    for _ in range(3):
        host.locate([context]).result(60)
    host.close()

    assert [pack.last_used_s for pack in life.admin.tree()[0][1]] == [
        pack.last_used_s for pack in before
    ]


class _Busy:
    """A host whose engine answers when the event loop has had its turn, or never."""

    ready = object()

    def __init__(self, answer: KvPlaces | None) -> None:
        self._answer = answer

    def locate(self, contexts: list[list[int]]) -> "Future[list[KvPlaces]]":
        found: Future[list[KvPlaces]] = Future()
        if self._answer is not None:
            asyncio.get_running_loop().call_soon(found.set_result, [self._answer])
        return found


def test_a_query_waits_as_long_as_its_asker_wants() -> None:
    """An engine that did not answer within 2 s of /model left 113 s of reading without a price."""
    late = KvPlaces(1967, CachedTokens())

    patient = EngineQueries(_Busy(late), patience_s=60.0)  # type: ignore[arg-type]
    gone = EngineQueries(_Busy(None), patience_s=0.0)  # type: ignore[arg-type]

    cost = asyncio.run(patient.cost([1] * 1967))
    assert cost is not None
    assert cost.num_read == 1967
    assert asyncio.run(gone.cost([1])) is None
