"""What was typed is brought back by Up, and goes with the conversation that it was typed in."""

import json
from pathlib import Path

import pytest

from kvchat.chat import typed_lines
from kvchat.chat.typed_lines import TypedLine, TypedLines
from kvchat.core.errors import StoreError
from kvchat.terminal.completion import PrivateHistory
from kvchat.terminal.multiline import without_block_marks

BLOCK = '"""\na secret\nof two lines\n"""'
ONE, OTHER = "20260101-000000-0001", "20260101-000000-0002"


def recalled(path: Path) -> list[str]:
    return list(PrivateHistory(TypedLines(path)).load_history_strings())


@pytest.mark.parametrize("files", ["", "notes.txt:\n```\nwords\n```\n\n"])
def test_a_forgotten_block_is_not_recalled(tmp_path: Path, files: str) -> None:
    """The block stayed in the file: it was typed with marks that the message has not."""
    path = tmp_path / "history"
    lines = TypedLines(path)
    history = PrivateHistory(lines)
    for text in ("keep this", BLOCK, '"""\nkeep that\n"""'):
        history.append_string(text)

    texts = {files + without_block_marks(BLOCK)}
    lines.remove((), texts)
    history.forget((), texts)

    assert recalled(path) == ['"""\nkeep that\n"""', "keep this"]
    assert history.get_strings() == ["keep this", '"""\nkeep that\n"""']
    assert b"secret" not in path.read_bytes()


def test_what_was_typed_in_a_conversation_and_never_sent_goes_with_it(tmp_path: Path) -> None:
    """A text cleared with Ctrl-C, and a question aside, are in no message of the conversation."""
    path, place = tmp_path / "history", [ONE]
    lines = TypedLines(path)
    history = PrivateHistory(lines, lambda: place[0])
    history.append_string("/btw a secret")
    history.store_cleared("half a secret")
    place[0] = OTHER
    history.append_string("another chat")

    lines.remove([ONE], ["a message"])
    history.forget([ONE], ["a message"])

    assert recalled(path) == history.get_strings() == ["another chat"]
    assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize(
    "typed",
    ["a secret", "/edit 3 a secret", "/btw a secret", '/file "docs/plan b.md"', "/file plan.md x"],
)
def test_a_command_that_sent_or_attached_goes_with_the_message(tmp_path: Path, typed: str) -> None:
    """/forget last left the text of `/edit 3 TEXT`, and the name of a file that /file attached."""
    path = tmp_path / "history"
    lines = TypedLines(path)
    history = PrivateHistory(lines, lambda: ONE)
    others = ["/file plan.md.bak", "/edit 3 not a secret thing", "no secret"]
    for text in (*others, typed):
        history.append_string(text)

    message = "plan b.md:\n```\nx\n```\n\nplan.md:\n```\nx\n```\n\na secret"
    lines.remove((), {message})
    history.forget((), {message})

    assert history.get_strings() == others
    assert recalled(path) == others[::-1]


def test_what_is_typed_before_a_conversation_belongs_to_the_one_that_begins(tmp_path: Path) -> None:
    """The first message is typed before its conversation has an id."""
    path = tmp_path / "history"
    place: list[str | None] = [None]
    lines = TypedLines(path)
    history = PrivateHistory(lines, lambda: place[0])
    history.append_string("/system a secret")
    history.append_string("hello")
    assert not path.exists()

    place[0] = ONE
    history.settle()
    assert recalled(path) == ["hello", "/system a secret"]

    lines.remove([ONE], ["hello"])
    assert path.read_bytes() == b""


def test_a_text_cleared_outside_all_conversations_is_not_written(tmp_path: Path) -> None:
    """Nothing would ever delete it."""
    path = tmp_path / "history"
    history = PrivateHistory(TypedLines(path), lambda: None)
    history.append_string("/help")
    history.store_cleared("a secret")

    assert history.get_strings() == ["/help", "a secret"]
    history.settle(is_end=True)

    assert recalled(path) == ["/help"]


def test_the_file_stays_small_and_all_of_it_is_searched(tmp_path, monkeypatch):
    """It grew without end, and a secret in front of the last 4 MiB stayed in it."""
    monkeypatch.setattr(typed_lines, "MAX_FILE_BYTES", 2000)
    path = tmp_path / "history"
    lines = TypedLines(path)
    for number in range(100):
        lines.add([TypedLine(f"{number} {'long ' * 20}")])
        assert path.stat().st_size <= 2000
    assert recalled(path)[0].startswith("99 ")

    old = [json.dumps("a secret"), *(json.dumps("x" * 100) for _ in range(100))]
    path.write_text("\n".join(old) + "\n")  # as an earlier version left it
    lines.remove((), {"a secret"})
    assert b"secret" not in path.read_bytes()
    assert recalled(path)
    assert path.stat().st_size <= 2000


def test_two_processes_lose_no_line_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "history"
    one, other = TypedLines(path), TypedLines(path)
    one.add([TypedLine("a secret", ONE), TypedLine("first", OTHER)])
    other.remove([ONE], ())
    one.add([TypedLine("second", OTHER)])

    assert recalled(path) == ["second", "first"]


def test_a_file_that_cannot_be_changed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "history"
    TypedLines(path).add([TypedLine("a secret", ONE)])
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreError, match="Cannot open"):
        TypedLines(path).remove([ONE], ())


@pytest.mark.parametrize("entry", ["short", "long " * 5000])
def test_a_history_says_whether_the_next_chat_has_all_of_it(tmp_path: Path, entry: str) -> None:
    """On a full disk "Up brings it back" was not true, nor of a long paste."""
    kept = PrivateHistory(TypedLines(tmp_path / "history"))
    lost = PrivateHistory(TypedLines(tmp_path / "history" / "is a file"))
    for history in (kept, lost):
        history.append_string(entry)

    assert kept.is_complete == (entry in recalled(tmp_path / "history"))
    assert not lost.is_complete


def test_without_a_file_nothing_is_written_and_what_is_forgotten_is_gone(tmp_path, monkeypatch):
    """Where nothing is saved, Up still brought back a message that had been forgotten."""
    monkeypatch.chdir(tmp_path)
    history = PrivateHistory(None)
    for text in ("keep this", "a secret"):
        history.append_string(text)

    history.forget((), {"a secret"})

    assert history.get_strings() == ["keep this"]
    assert list(history.load_history_strings()) == []
    assert list(tmp_path.iterdir()) == []
