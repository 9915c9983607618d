"""Every cause of reading a context again, through a real engine, is told in its own words.

Some are in `test_why_again.py`, where what one process keeps is spoilt before the next one.
"""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.lookup import KvSettings
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.controller import ChatController
from kvchat.chat.events import ReadingPrompt
from kvchat.chat.host import ChatHost
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.fact_memory import FactMemory
from support.pack_chains import payload_files
from support.patient_kvchat import be_patient
from support.tiny_host import TINY_KV, answer_options, ask, finish, tiny_host

TEXT = "Of the twelve ships in the harbour of Grimstad three are red and nine are blue. " * 2


class Runs:
    """Runs of kvchat on one home; `why` asks once more and says why more than that was read."""

    def __init__(self, checkpoint: Path, home: Path) -> None:
        self.checkpoint = checkpoint
        self.kept, self.memory = home / "kv", FactMemory()
        self.store = SessionStore(home / "sessions")
        self._hosts: list[ChatHost] = []

    def start(self, **how: object) -> ChatHost:
        settings = {"kept": self.kept, "memory": self.memory, **how}
        host = tiny_host(self.checkpoint, self.store, **settings)  # type: ignore[arg-type]
        self._hosts.append(host)
        return host

    def end(self) -> None:
        while self._hosts:
            self._hosts.pop().close()

    def why(self, host: ChatHost, session: ChatSession) -> str:
        controller = self.controller(host, session)
        ended = finish(controller.ask("And how many are green?"))
        controller.note_ended(ended)
        return controller.why_so_much(ended)

    def controller(self, host: ChatHost, session: ChatSession) -> ChatController:
        kept = StoreAdmin(self.kept, memory=self.memory, settings=TINY_KV)
        options: AskOptions = answer_options()
        return ChatController(host, lambda *_: host, session, options, kept=kept)

    def hold(self, host: ChatHost, *texts: str) -> ChatSession:
        session = host.new_session("Be brief.")
        for text in texts or (TEXT,):
            ask(session, text, 30)
        return session

    def held(self, **how: object) -> str:
        """Hold a conversation in a run of its own; return its id."""
        session = self.hold(self.start(**how))
        self.end()
        session.close()
        return session.session_id


@pytest.fixture
def runs(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    be_patient(monkeypatch)
    made = Runs(checkpoint, tmp_path)
    yield made
    made.end()


def _nothing(runs: Runs) -> str:
    session_id = runs.held()
    host = runs.start()
    return runs.why(host, host.open_session(session_id))


def _killed(runs: Runs) -> str:
    """The second turn's KV is not on disk when the run ends, as after kill -9."""
    session_id = runs.held()
    shutil.copytree(runs.kept, runs.kept.with_name("before"))
    host = runs.start()
    session = host.open_session(session_id)
    ask(session, TEXT, 30)
    runs.end()
    session.close()
    shutil.rmtree(runs.kept)
    shutil.move(runs.kept.with_name("before"), runs.kept)
    host = runs.start()
    return runs.why(host, host.open_session(session_id))


def _cleared(runs: Runs) -> str:
    session_id = runs.held()
    StoreAdmin(runs.kept).clear()
    host = runs.start()
    return runs.why(host, host.open_session(session_id))


def _corrupt(runs: Runs) -> str:
    session_id = runs.held()
    for path in payload_files(runs.kept):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    host = runs.start()
    return runs.why(host, host.open_session(session_id))


def _evicted_in_this_run(runs: Runs) -> str:
    """Without a disk, memory alone held it, and others needed the room."""
    host = runs.start(kept=None, device_bytes=1 << 18)
    session = runs.hold(host)
    status = host.status().result(60)
    for number in range(100):
        runs.hold(host, f"{number}. {TEXT}")
        if host.status().result(60).num_evicted >= status.num_blocks // 2:
            break
    return runs.why(host, session)


def _no_disk(runs: Runs) -> str:
    session_id = runs.held()
    host = runs.start(kept=None)
    return runs.why(host, host.open_session(session_id))


def _no_cache(runs: Runs) -> str:
    host = runs.start(reuse=False)
    return runs.why(host, runs.hold(host))


def _system_prompt(runs: Runs) -> str:
    host = runs.start()
    session = runs.hold(host)
    runs.controller(host, session).set_system("Be quite the opposite of brief. " * 4)
    return runs.why(host, session)


def _model(runs: Runs) -> str:
    session_id = runs.held()
    other = never_stopping(tiny_model("llama", seed=1))
    runs.checkpoint = save_checkpoint(runs.kept.with_name("other"), other)
    host = runs.start()
    return runs.why(host, host.open_session(session_id))


def _kv_dtype(runs: Runs) -> str:
    session_id = runs.held()
    host = runs.start(wanted=replace(TINY_KV, kv_dtype="float16"))
    return runs.why(host, host.open_session(session_id))


def _kv_dtype_of_the_last_turn(runs: Runs) -> str:
    """The first turn is there in both: the second was said not to be written before the run ended.

    So was all that a run with other weights, or in another dtype, had kept.
    """
    return _second_turn_with(runs, replace(TINY_KV, kv_dtype="float16"))


def _weights_of_the_last_turn(runs: Runs) -> str:
    return _second_turn_with(runs, replace(TINY_KV, weights="int8"))


def _dtype_of_the_last_turn(runs: Runs) -> str:
    return _second_turn_with(runs, replace(TINY_KV, dtype="bfloat16"))


def _second_turn_with(runs: Runs, wanted: KvSettings) -> str:
    session_id = runs.held()
    host = runs.start(wanted=wanted)
    session = host.open_session(session_id)
    ask(session, TEXT, 30)
    runs.end()
    session.close()
    host = runs.start()
    return runs.why(host, host.open_session(session_id))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (_nothing, ""),
        (_killed, "not written before the last run ended"),
        (_cleared, "cache cleared"),
        (_corrupt, "corrupt"),
        (_evicted_in_this_run, "evicted"),
        (_no_disk, "no disk cache"),
        (_no_cache, "the cache is off"),
        (_system_prompt, "system prompt changed"),
        (_model, "model changed"),
        (_kv_dtype, "KV format changed"),
        (_kv_dtype_of_the_last_turn, "KV format changed"),
        (_weights_of_the_last_turn, "weights or dtype changed"),
        (_dtype_of_the_last_turn, "weights or dtype changed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_cause_is_told_in_its_own_words(runs, cause, words):
    assert cause(runs) == words


def test_a_stopped_prefill_reports_what_was_read_and_goes_on_from_there(runs: Runs) -> None:
    """All of the prompt was reported as read, and /continue called the answer complete."""
    steps, is_stopped = count(), threading.Event()
    host = runs.start(before_step=lambda: next(steps) == 2 and is_stopped.wait(60))
    session = host.new_session()
    reply = session.ask(TEXT * 2, answer_options())
    next(event for event in reply if isinstance(event, ReadingPrompt))
    reply.cancel()
    is_stopped.set()
    stopped = finish(reply)

    usage = stopped.usage
    assert 0 < usage.prefilled_tokens < usage.prompt_tokens
    assert usage.cached.total + usage.prefilled_tokens + usage.unread_tokens == usage.prompt_tokens

    continued = finish(session.continue_answer(answer_options()))

    assert continued.usage.prompt_tokens == usage.prompt_tokens
    assert continued.usage.unread_tokens == 0
    assert 0 <= usage.prefilled_tokens - continued.usage.cached.device < 8
    assert session.conversation.path()[-1].text == continued.text
