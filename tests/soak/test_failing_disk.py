"""A disk that fails at random: the chat continues, reports it once, and saves when it can again.

The session store writes through a file layer whose writes are cut short, refused or not synced. The
errors are those of a full disk, a broken disk and a disk that became read-only.
"""

import errno
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.chat import store as store_module
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerEnded, AnswerFailed, SavingFailed
from kvchat.chat.host import ChatHost
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.core.errors import StoreError
from support.saved_sessions import assert_saved
from support.scripted_engine import Script, scripted_build, text_model, write_text_checkpoint
from support.soak_sizes import short_and_long

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


class FailingDisk:
    """Stands where the module `os` stands; `fault_rate` of the writes and syncs go wrong."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.fault_rate = 0.0
        self.num_faults = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        if self._rng.random() < 0.3:
            data = data[: self._rng.randint(1, len(data))]
        self._fail_perhaps()
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._fail_perhaps()  # the real one would only wear out this machine's disk

    def _fail_perhaps(self) -> None:
        if self._rng.random() < self.fault_rate:
            self.num_faults += 1
            code = self._rng.choice(ERRORS)
            raise OSError(code, os.strerror(code))


@pytest.fixture
def rng() -> random.Random:
    return random.Random(4)


@pytest.fixture
def disk(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    failing = FailingDisk(rng)
    monkeypatch.setattr(store_module, "os", failing)
    # A save that is due by the clock would shift every fault behind it.
    monkeypatch.setattr("kvchat.chat.reply.SAVE_INTERVAL_S", 1e6)
    return failing


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ChatHost]:
    def author(question: str, sample: int) -> Script:
        error = RuntimeError("boom") if question.startswith("fail") else None
        return Script(f"{sample}: {question[::-1]} " * 3, error=error)

    model = text_model(write_text_checkpoint(tmp_path / "model"))
    started = ChatHost(model, scripted_build(model, author), SessionStore(tmp_path / "sessions"))  # type: ignore[arg-type]
    yield started
    started.close()


def complaints(session: ChatSession, text: str, num_samples: int = 1) -> list[str]:
    """Ask, see the answer through, and return what was said about saving."""
    events = list(session.ask(text, AskOptions(num_samples=num_samples)))
    assert sum(isinstance(event, AnswerEnded) for event in events) == num_samples
    return [event.message for event in events if isinstance(event, SavingFailed)]


def test_a_disk_that_stays_broken_is_spoken_of_once(host: ChatHost, disk: FailingDisk) -> None:
    """Every line that could not be written once brought its own complaint: one a second."""
    session = host.new_session()
    disk.fault_rate = 1.0

    told = [complaints(session, f"question {turn}", num_samples=2) for turn in range(4)]

    assert [len(messages) for messages in told] == [1, 0, 0, 0]
    disk.fault_rate = 0.0
    assert complaints(session, "and now") == []
    assert host.store is not None
    assert_saved(host.store, session)
    disk.fault_rate = 1.0
    assert len(complaints(session, "broken again")) == 1
    assert session.close() is not None


def test_a_turn_that_is_not_saved_is_told_even_where_its_answer_fails(host, disk):
    """What the user typed was not on the disk, and with no answer to save the user was not told."""
    session = host.new_session(system="S")
    disk.fault_rate = 1.0
    too_long = "x" * 40_000

    events = list(session.ask(too_long, AskOptions()))

    assert [type(event) for event in events] == [SavingFailed, AnswerFailed]


def test_what_the_disk_refused_is_brought_to_it_as_firmly_as_it_would_have_been(
    host: ChatHost, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user turn that found the disk full was written with the next line, and never synced."""
    session = host.new_session()
    disk.fault_rate = 1.0
    session.add_user_turn("Remember this.")
    disk.fault_rate = 0.0
    synced: list[int] = []
    monkeypatch.setattr(disk, "fsync", synced.append, raising=False)

    session.rename("a line that need not be durable")
    session.rename("nor this one")

    assert len(synced) == 1


def test_a_session_whose_torn_line_cannot_be_cut_off_is_refused_and_let_go(host, disk, monkeypatch):
    """The bare OSError passed every handler of the errors a user can meet."""
    session = host.new_session()
    session.add_user_turn("Remember this.")
    session.close()
    assert host.store is not None
    path = host.store.directory / f"{session.session_id}.jsonl"
    with path.open("ab") as file:
        file.write(b'{"type":"tip","i')

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "truncate", broken, raising=False)
        with pytest.raises(StoreError, match="cannot be repaired: Input/output error"):
            host.open_session(session.session_id)

    again = host.open_session(session.session_id)
    assert [turn.text for turn in again.conversation.turns()] == ["Remember this."]
    again.close()


@short_and_long(60, 2500)
def test_random_faults_of_the_disk_cost_no_word_and_no_second_complaint(
    host: ChatHost, disk: FailingDisk, rng: random.Random, totals: Counter[str], size: int
) -> None:
    assert host.store is not None
    session = host.new_session()
    is_well, num_spells = True, 0
    for number in range(size):
        if rng.random() < 0.3:
            disk.fault_rate = rng.choice([0.0, 0.0, 0.2, 1.0])
        told = complaints(session, f"question {number}", num_samples=rng.choice([1, 1, 3]))
        if disk.fault_rate == 1.0:
            assert len(told) == 1 if is_well else len(told) <= 1
        is_well = disk.fault_rate == 0.0
        num_spells += bool(told)
        if disk.fault_rate == 0.0:
            assert_saved(host.store, session)
        if rng.random() < 0.05 or len(session.conversation) > 100:
            disk.fault_rate = 0.0
            assert session.close() is None
            session = reopened(host, disk, session)
            is_well = True
    assert num_spells > size // 20
    assert disk.num_faults > size // 4
    totals["faults: a session's write or sync"] += disk.num_faults


def reopened(host: ChatHost, disk: FailingDisk, session: ChatSession) -> ChatSession:
    """Open a closed session again, or begin another; a disk that refuses leaves no file behind."""
    assert host.store is not None
    if len(session.conversation) <= 60:
        again = host.open_session(session.session_id)
        assert list(again.conversation.turns()) == list(session.conversation.turns())
        assert again.notes == ()
        return again
    before = host.store.ids()
    disk.fault_rate = 1.0
    assert "cannot be saved" in (host.new_session().close() or "")
    assert host.store.ids() == before
    disk.fault_rate = 0.0
    return host.new_session()
