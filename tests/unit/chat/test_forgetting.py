"""Turns that are forgotten leave the tree and the file; no other process changes it meanwhile."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.chat import session_file
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.store import SessionLog, SessionStore, new_session_id
from kvchat.core.errors import StoreError
from kvchat.core.types import FinishReason


def turn(number: int, parent: int, role: Role = Role.USER) -> Turn:
    finish = FinishReason.STOP if role is Role.ASSISTANT else None
    return Turn(number, parent, role, f"text {number}", (number, number), "t", 1.0, finish=finish)


def branching() -> Conversation:
    """Return 1-2, and below 2 two branches: 3-4 and 5."""
    conversation = Conversation(new_session_id(), 1.0, "be brief")
    conversation.add(turn(1, ROOT))
    conversation.add(turn(2, 1, Role.ASSISTANT))
    conversation.add(turn(3, 2))
    conversation.add(turn(4, 3, Role.ASSISTANT))
    conversation.add(turn(5, 2))
    return conversation


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def saved(store: SessionStore, conversation: Conversation) -> tuple[SessionLog, Path]:
    log = store.create(conversation, "tiny")
    for known in conversation.turns():
        log.write(session_file.turn_line(known))
        if known.finish is not None:
            log.write(session_file.end_line(known.turn_id, known.finish, {"usage": {}}))
    log.write(session_file.title_line("text 1"))
    log.write(session_file.tip_line(conversation.tip_id))
    return log, store.directory / f"{conversation.session_id}.jsonl"


def test_a_turn_goes_with_all_below_it_and_no_other(store: SessionStore) -> None:
    conversation = branching()
    assert conversation.contexts(3) == [[1, 1, 2, 2, 3, 3, 4, 4]]
    assert len(conversation.contexts()) == 2
    conversation.move_tip(4)

    assert conversation.remove(3) == {3, 4}

    conversation.check()
    assert conversation.tip_id == 2
    assert conversation.contexts() == [[1, 1, 2, 2, 5, 5]]


@pytest.mark.parametrize("gone", [{3, 4}, {5}, {1, 2, 3, 4, 5}])
def test_the_file_says_nothing_of_what_is_gone(store: SessionStore, gone: set[int]) -> None:
    conversation = branching()
    log, path = saved(store, conversation)

    log.rewrite(lambda data: session_file.without_turns(data, gone, keeps_title=1 not in gone))
    log.write(session_file.tip_line(ROOT))
    log.close()

    read = store.read(conversation.session_id)
    assert {known.turn_id for known in read.conversation.turns()} == {1, 2, 3, 4, 5} - gone
    assert read.notes == ()
    assert read.conversation.system == "be brief"
    assert bool(read.conversation.title) == (1 not in gone)
    for number in gone:
        assert f"text {number}".encode() not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(store.directory) == [path.name]


def test_the_new_file_is_locked_before_it_has_the_name(store: SessionStore) -> None:
    conversation = branching()
    log, _ = saved(store, conversation)
    log.rewrite(lambda data: data)

    with pytest.raises(StoreError, match="open in another kvchat"):
        store.open(conversation.session_id)
    log.close()
    read, again = store.open(conversation.session_id)
    assert len(read.conversation) == 5
    again.close()


def test_a_file_that_cannot_be_changed_stays_as_it_was(store, monkeypatch):
    conversation = branching()
    log, path = saved(store, conversation)
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StoreError, match="cannot be changed: No space left"):
            log.rewrite(lambda data: data[:10])

    assert path.read_bytes() == before
    assert os.listdir(store.directory) == [path.name]
    assert log.write(session_file.title_line("still mine")) is None


def test_what_a_killed_process_was_about_to_put_there_goes(store: SessionStore) -> None:
    conversation = branching()
    log, path = saved(store, conversation)
    log.close()
    path.with_suffix(".new").write_bytes(b"a secret")

    _, log = store.open(conversation.session_id)

    log.close()
    assert os.listdir(store.directory) == [path.name]


def test_the_same_words_said_again_are_no_copy() -> None:
    """Messages from a document have one time for all of them."""
    conversation = Conversation(new_session_id(), 1.0)
    for number, role in enumerate((Role.USER, Role.ASSISTANT) * 2, start=1):
        known = turn(number, number - 1, role)
        conversation.add(replace(known, text="yes"))

    assert conversation.copies(3) == {3}
    assert len(conversation.contexts(3)) == 1
