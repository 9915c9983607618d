"""The directory of sessions: one writer each, private files, and disks that fill up."""

import os
import stat
import time
from pathlib import Path

import pytest

from kvchat.chat import session_file
from kvchat.chat import store as store_module
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import SessionLog, SessionStore, new_session_id
from kvchat.core.errors import SessionNotFound, StoreError
from support.other_process import run_python, start_python
from support.turns import branching_conversation, turn


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:  # one of its own for each test
    return SessionStore(tmp_path / "sessions")


def saved(store: SessionStore, conversation: Conversation) -> str:
    log = store.create(conversation, "demo")
    for one in conversation.turns():
        assert log.write(session_file.turn_line(one)) is None
    log.write(session_file.tip_line(conversation.tip_id), durable=True)
    log.close()
    return conversation.session_id


def numbered(number: int) -> Conversation:
    conversation = Conversation(f"20250101-00000{number}-abcd", 1_700_000_000.0)
    conversation.add(turn(1, text=f"conversation {number}"))
    return conversation


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_saved_is_opened_and_goes_on(store: SessionStore) -> None:
    session_id = saved(store, branching_conversation())

    read, log = store.open(session_id)
    log.write(session_file.turn_line(turn(7, 3)))
    log.close()

    assert read.notes == ()
    assert store.read(session_id).conversation.tip_id == 7
    assert len(store.read(session_id).conversation) == 7


def test_files_and_directory_are_private_whatever_the_umask(store: SessionStore) -> None:
    before = os.umask(0)
    try:
        session_id = saved(store, numbered(1))
    finally:
        os.umask(before)

    assert mode(store.directory) == 0o700
    assert mode(store.directory / f"{session_id}.jsonl") == 0o600


def test_a_torn_last_line_is_cut_off_before_anything_is_appended(store: SessionStore) -> None:
    session_id = saved(store, branching_conversation())
    path = store.directory / f"{session_id}.jsonl"
    with path.open("ab") as file:
        file.write(b'{"type":"tip","i')

    read, log = store.open(session_id)
    log.write(session_file.turn_line(turn(7, 3)))
    log.close()

    assert "torn" in read.notes[0]
    again = store.read(session_id)
    assert again.notes == ()
    assert again.conversation.tip_id == 7


def test_a_file_that_is_no_session_is_left_exactly_as_it_was(store: SessionStore) -> None:
    session_id = saved(store, numbered(1))
    path = store.directory / f"{session_id}.jsonl"
    path.write_bytes(b"somebody else's\nhalf a line")

    with pytest.raises(StoreError, match="is not a kvchat session"):
        store.open(session_id)

    assert path.read_bytes() == b"somebody else's\nhalf a line"
    log = store._open(session_id, os.O_WRONLY)
    log.close()


def test_a_second_writer_is_refused_until_the_first_lets_go(store: SessionStore) -> None:
    session_id = saved(store, numbered(1))
    _, log = store.open(session_id)

    with pytest.raises(StoreError, match="“conversation 1” is open in another kvchat"):
        store.open(session_id)
    with pytest.raises(StoreError, match="is open in another kvchat"):
        store.remove(session_id)
    assert store.read(session_id).conversation.label == "conversation 1"

    log.close()
    log.close()
    store.open(session_id)[1].close()


def test_another_process_holds_the_lock_until_it_dies(store, monkeypatch):
    session_id, other = saved(store, numbered(1)), saved(store, numbered(2))
    holder = start_python(
        """
        import sys, pathlib
        from kvchat.chat.store import SessionStore
        read, log = SessionStore(pathlib.Path(sys.argv[1])).open(sys.argv[2])
        print("held")
        sys.stdin.read()
        """,
        store.directory,
        session_id,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="is open in another kvchat"):
            store.open(session_id)
        own = store.open(other)[1]
        if Path("/proc/locks").exists():
            assert store.open_elsewhere(store.ids()) == {session_id}
        own.close()
        monkeypatch.setattr(store_module, "_LOCKS", Path("/proc/no such file"))  # as on a Mac
        assert store.open_elsewhere(store.ids()) == {session_id}
    finally:
        holder.kill()
        holder.communicate()
    assert store.open_elsewhere(store.ids()) == set()

    store.open(session_id)[1].close()


def test_a_line_that_finds_the_disk_full_is_kept_and_written_with_the_next() -> None:
    log = SessionLog(os.open("/dev/full", os.O_WRONLY), Path("s.jsonl"))
    assert "No space left" in (log.write("one\n", durable=True) or "")

    pipe_out, pipe_in = os.pipe()
    os.dup2(pipe_in, log._descriptor or -1)
    os.close(pipe_in)

    assert log.write("two\n") is None
    log.close()
    with os.fdopen(pipe_out, "rb") as pipe:
        assert pipe.read() == b"one\ntwo\n"


def test_a_line_half_written_when_the_disk_fills_is_completed_later(store: SessionStore) -> None:
    """A limit on the file's size stands in for a full disk: a write is cut, the next fails."""
    store.directory.mkdir()
    output = run_python(
        """
        import pathlib, resource, sys
        from kvchat.chat import session_file
        from kvchat.chat.store import SessionStore
        from support.turns import branching_conversation, turn
        store = SessionStore(pathlib.Path(sys.argv[1]))
        conversation = branching_conversation()
        log = store.create(conversation, "demo")
        path = store.directory / f"{conversation.session_id}.jsonl"
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
        problems = [log.write(session_file.turn_line(t), True) for t in conversation.turns()]
        size = path.stat().st_size
        torn = store.read(conversation.session_id)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        last = log.write(session_file.tip_line(2), True)
        print(all(problems), not path.read_bytes()[:size].endswith(b"\\n"), len(torn.notes), last)
        """,
        store.directory,
    )

    assert output.split() == ["True", "True", "1", "None"]
    read = store.read(branching_conversation().session_id)
    assert read.notes == ()
    assert read.conversation.context_ids(6) == branching_conversation().context_ids(6)
    assert read.conversation.tip_id == 2


def test_a_session_that_is_never_saved_leaves_no_file(store: SessionStore) -> None:
    """On a full disk an empty file stayed behind, and stood in every list as unreadable."""
    store.directory.mkdir()
    output = run_python(
        """
        import pathlib, resource, sys
        from kvchat.chat.conversation import Conversation
        from kvchat.chat.store import SessionStore, new_session_id
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        store = SessionStore(pathlib.Path(sys.argv[1]))
        log = store.create(Conversation(new_session_id(), 0.0), "m")
        print(log.write("", durable=True))
        print(log.close())
        """,
        store.directory,
    )

    assert output.count("cannot be saved (File too large)") == 2
    assert output.count(f"{store.directory}/") == 2  # a name without its folder is not found
    assert list(store.directory.iterdir()) == []


def test_a_session_begun_on_a_full_disk_is_saved_once_there_is_room(store: SessionStore) -> None:
    """Nothing was answered on a full disk, though it could have been."""
    store.directory.mkdir()
    output = run_python(
        """
        import pathlib, resource, sys
        from kvchat.chat import session_file
        from kvchat.chat.store import SessionStore
        from support.turns import branching_conversation
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        conversation = branching_conversation()
        log = SessionStore(pathlib.Path(sys.argv[1])).create(conversation, "demo")
        problems = [log.write(session_file.turn_line(t), True) for t in conversation.turns()]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(all(problems), log.close())
        """,
        store.directory,
    )

    assert output.split() == ["True", "None"]
    read = store.read(branching_conversation().session_id)
    assert read.notes == ()
    assert read.conversation.context_ids(6) == branching_conversation().context_ids(6)


def test_a_closed_log_says_so_and_writes_nothing(store: SessionStore) -> None:
    log = store.create(numbered(1), "demo")
    path = store.directory / "20250101-000001-abcd.jsonl"
    before = path.read_bytes()
    log.close()

    assert log.write("x\n") == f"{path} is closed."
    assert (store.directory / "20250101-000001-abcd.jsonl").read_bytes() == before


def test_sessions_are_listed_with_the_last_changed_first(store: SessionStore) -> None:
    assert store.ids() == []
    for number in (1, 2, 3):
        session_id = saved(store, numbered(number))
        when = time.time() + {1: 30, 2: 10, 3: 20}[number]
        os.utime(store.directory / f"{session_id}.jsonl", (when, when))
    (store.directory / "notes.jsonl").write_text("not a session")
    (store.directory / "20250101-000009-abcd.txt").write_text("not a session")

    assert [s.title for s in store.summaries()] == [f"conversation {n}" for n in (1, 3, 2)]
    assert store.latest() == "20250101-000001-abcd"


def test_an_answer_to_a_single_prompt_is_the_latest_only_on_request(store: SessionStore) -> None:
    with pytest.raises(SessionNotFound, match="no saved conversation"):
        store.latest()
    log = store.create(numbered(2), "small", is_one_shot=True)
    log.close()
    with pytest.raises(SessionNotFound, match="--last"):
        store.latest()
    saved(store, numbered(1))
    when = time.time() + 60
    os.utime(store.directory / "20250101-000002-abcd.jsonl", (when, when))

    assert store.latest() == "20250101-000001-abcd"
    assert store.latest(takes_one_shots=True) == "20250101-000002-abcd"
    assert [summary.model for summary in store.summaries()] == ["small", "demo"]


def test_a_dangling_link_or_a_damaged_file_hides_no_session(store: SessionStore) -> None:
    """One file that could not be examined once made the whole directory look empty."""
    saved(store, numbered(1))
    (store.directory / "20250101-000002-abcd.jsonl").symlink_to(store.directory / "gone")
    (store.directory / "20250101-000003-abcd.jsonl").write_text("damaged")

    by_id = {summary.session_id[-6]: summary for summary in store.summaries()}

    assert by_id["1"].is_readable
    assert by_id["1"].num_turns == 1
    assert not by_id["2"].is_readable
    assert not by_id["3"].is_readable


def test_a_file_whose_writer_died_before_its_first_line_is_no_session(store: SessionStore) -> None:
    """It was the last one changed, and `kvchat -c` could not go on with any other."""
    saved(store, numbered(1))
    (store.directory / "20250101-000002-abcd.jsonl").touch()

    assert store.latest() == "20250101-000001-abcd"
    assert len(store.summaries()) == 1


def test_links_to_sessions_are_refused(store: SessionStore, tmp_path: Path) -> None:
    session_id = saved(store, numbered(1))
    elsewhere = tmp_path / "elsewhere.jsonl"
    (store.directory / f"{session_id}.jsonl").rename(elsewhere)
    (store.directory / f"{session_id}.jsonl").symlink_to(elsewhere)

    with pytest.raises(StoreError, match="Cannot open"):
        store.open(session_id)
    with pytest.raises(StoreError, match="Cannot open"):
        store.read(session_id)


def test_a_copied_file_is_a_session_of_its_own(store: SessionStore) -> None:
    """It went by the id inside, the original's, so that what was done to it was done to both."""
    session_id = saved(store, numbered(1))
    copy = "20260101-000000-0000"
    data = (store.directory / f"{session_id}.jsonl").read_bytes()
    (store.directory / f"{copy}.jsonl").write_bytes(data)

    read, log = store.open(copy)
    log.close()

    assert read.conversation.session_id == copy


def test_sessions_are_found_by_an_unambiguous_beginning(store: SessionStore) -> None:
    for number in (1, 2):
        saved(store, numbered(number))

    assert store.find("20250101-000002") == "20250101-000002-abcd"
    with pytest.raises(SessionNotFound, match="could be 2 sessions"):
        store.find("2025")
    for text in ("1999", "../../etc/passwd", "20250101-000001-abcd.jsonl"):
        with pytest.raises(SessionNotFound, match="No conversation's id begins with"):
            store.find(text)


def test_a_word_in_a_title_is_enough_to_go_on_and_not_to_delete(store: SessionStore) -> None:
    """`/resume ada` found "My name is Ada", and `kvchat -r ada` did not."""
    for number in (1, 2):
        log = store.create(numbered(number), "demo")
        log.write(session_file.title_line(f"My name is {'Ada' if number == 1 else 'Max'}"))
        log.close()

    assert store.find("ADA", anywhere=True) == numbered(1).session_id
    assert store.find("my name is max") == numbered(2).session_id
    with pytest.raises(SessionNotFound, match="could be 2 sessions"):
        store.find("name", anywhere=True)
    with pytest.raises(SessionNotFound, match="no title begins with it"):
        store.find("ada")


def test_a_name_that_nothing_has_is_said_to_be_no_title_and_gets_what_is_near(store):
    """`kvchat -r manul` said "There is no session manul", as if titles were not searched."""
    log = store.create(numbered(1), "demo")
    log.write(session_file.title_line("Read the manual"))
    log.close()

    with pytest.raises(SessionNotFound) as caught:
        store.find("read the manul", anywhere=True)
    assert "No conversation's id begins with read the manul, and no title has it." in str(
        caught.value
    )
    assert caught.value.hint == "Did you mean “Read the manual”?"
    with pytest.raises(SessionNotFound) as caught:
        store.find("zebra", anywhere=True)
    assert caught.value.hint == "`kvchat sessions` lists them."


@pytest.mark.parametrize("session_id", ["../x", "20250101-000001-abcd/..", "", "*"])
def test_an_id_is_never_a_path(store: SessionStore, session_id: str) -> None:
    saved(store, numbered(1))
    for use in (store.open, store.read, store.remove):
        with pytest.raises(SessionNotFound):
            use(session_id)


def test_a_removed_session_is_gone(store: SessionStore) -> None:
    session_id = saved(store, numbered(1))

    store.remove(session_id)

    assert store.ids() == []
    with pytest.raises(SessionNotFound):
        store.open(session_id)
    with pytest.raises(SessionNotFound):
        store.latest()


def test_ids_are_dates_and_chance_and_are_not_reused(store: SessionStore) -> None:
    ids = {new_session_id(1_700_000_000.0) for _ in range(50)}
    assert len(ids) > 45
    assert all(len(session_id) == 20 for session_id in ids)

    log = store.create(numbered(1), "demo")
    second = numbered(1)
    store.create(second, "demo").close()
    log.close()
    assert second.session_id != numbered(1).session_id
    assert set(store.ids()) == {numbered(1).session_id, second.session_id}


def test_a_directory_that_cannot_be_made_names_both_ways_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match=r"--sessions-dir, or save nothing with --incognito"):
        SessionStore(tmp_path / "file" / "sessions").create(numbered(1), "demo")
