"""A session's file: other writers, other files in its place, and a loss of power."""

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from kvchat.chat import session_file
from kvchat.chat import store as store_module
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import SessionStore
from kvchat.core.errors import StoreError
from support.turns import branching_conversation, turn

TAKEN, FREE = "20250101-000000-0000", "20250101-000000-0001"


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def test_a_conversation_whose_id_is_taken_gets_another(store, monkeypatch):
    """One request of many in a second failed, as two of them had drawn the same id."""
    draws = iter([TAKEN, TAKEN, FREE])
    monkeypatch.setattr(store_module, "new_session_id", lambda: next(draws))
    first, second = Conversation(TAKEN, 1.0), Conversation(TAKEN, 2.0)

    store.create(first, "demo").close()
    log = store.create(second, "demo")
    log.write(session_file.turn_line(turn(1)))
    log.close()

    assert (first.session_id, second.session_id) == (TAKEN, FREE)
    assert len(store.read(TAKEN).conversation) == 0
    assert len(store.read(FREE).conversation) == 1


def test_a_folder_that_takes_no_writing_names_the_ways_out(store, monkeypatch):
    """ "Cannot open ID.jsonl: Read-only file system." was all, and every message came back."""
    conversation = branching_conversation()
    store.create(conversation, "demo").close()
    open_file = os.open

    def refuse(path: str | Path, flags: int, *more: int, **others: int | None) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_file(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=r"--sessions-dir, or save nothing with --incognito"):
        store.create(Conversation(FREE, 1.0), "demo")
    with pytest.raises(StoreError, match="With --incognito a copy of it goes on"):
        store.open(conversation.session_id)
    assert len(store.read(conversation.session_id).conversation) == 0


def test_a_file_that_was_replaced_before_its_lock_was_had_is_opened_again(store, monkeypatch):
    """What was written went to the file that /forget in another kvchat had just put out of place,
    and was gone without a word.
    """
    conversation = branching_conversation()
    store.create(conversation, "demo").close()
    path = store.directory / f"{conversation.session_id}.jsonl"
    lock, replaced = fcntl.flock, []

    def lock_late(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append(path.with_suffix(".other"))
            replaced[0].write_bytes(path.read_bytes())
            os.replace(replaced[0], path)
        lock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock_late)
        _, log = store.open(conversation.session_id)
    log.write(session_file.turn_line(turn(1)))

    assert replaced
    assert len(store.read(conversation.session_id).conversation) == 1
    with pytest.raises(StoreError, match="open in another kvchat"):
        store.open(conversation.session_id)
    log.close()


def test_a_file_that_is_replaced_again_and_again_is_somebody_elses(store, monkeypatch):
    conversation = branching_conversation()
    store.create(conversation, "demo").close()
    monkeypatch.setattr(store_module, "is_at", lambda *_: False)

    with pytest.raises(StoreError, match="open in another kvchat"):
        store.open(conversation.session_id)


def test_what_was_forgotten_stays_so_after_a_power_loss(store, monkeypatch):
    """The new file's name was not waited for, so that the old one could have come back."""
    log = store.create(branching_conversation(), "demo")
    sync, synced = os.fsync, []

    def note(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    log.rewrite(lambda data: data)
    log.close()

    assert synced[-1], "the directory, and after the file"
    assert False in synced


def test_a_file_system_without_locks_is_written_to_and_not_taken_for_another_kvchat(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new chat ended with "is open in another kvchat"."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    conversation = branching_conversation()
    log = store.create(conversation, "demo")
    log.write(session_file.turn_line(turn(1)))
    log.rewrite(lambda data: data)
    log.close()
    read, log = store.open(conversation.session_id)
    log.close()

    assert not log.is_locked
    assert len(read.conversation) == 1


def test_a_disk_that_fails_is_not_taken_for_another_kvchat(store, monkeypatch):
    def broken(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(StoreError, match="cannot be locked: Input/output error"):
        store.create(branching_conversation(), "demo")
