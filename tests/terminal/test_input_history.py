"""What is forgotten of a conversation is forgotten of what was typed, as it was typed."""

from pathlib import Path

import pytest

from kvchat.terminal.input_history import PrivateHistory
from kvchat.terminal.multiline import without_block_marks

BLOCK = '"""\na secret\nof two lines\n"""'


@pytest.mark.parametrize("files", ["", "notes.txt:\n```\nwords\n```\n\n"])
def test_a_forgotten_block_is_not_recalled(tmp_path: Path, files: str) -> None:
    """The block stayed in the file: it was typed with marks that the message has not."""
    path = tmp_path / "history"
    history = PrivateHistory(path)
    for text in ("keep this", BLOCK, '"""\nkeep that\n"""'):
        history.append_string(text)

    history.forget({files + without_block_marks(BLOCK)})

    assert list(PrivateHistory(path).load_history_strings()) == [
        '"""\nkeep that\n"""',
        "keep this",
    ]
    assert history.get_strings() == ["keep this", '"""\nkeep that\n"""']
    assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize("entry", ["short", "long " * 5000])
def test_a_history_says_whether_the_next_chat_has_all_of_it(tmp_path: Path, entry: str) -> None:
    """On a full disk "Up brings it back" was not true, nor of a long paste."""
    kept = PrivateHistory(tmp_path / "history")
    lost = PrivateHistory(tmp_path / "history" / "is a file")
    for history in (kept, lost):
        history.append_string(entry)

    assert kept.is_complete == (
        entry in PrivateHistory(tmp_path / "history").load_history_strings()
    )
    assert not lost.is_complete


def test_without_a_path_nothing_is_written_and_what_is_forgotten_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is saved, Up still brought back a message that had been forgotten."""
    monkeypatch.chdir(tmp_path)
    history = PrivateHistory(None)
    for text in ("keep this", "a secret"):
        history.append_string(text)

    history.forget({"a secret"})

    assert history.get_strings() == ["keep this"]
    assert list(history.load_history_strings()) == []
    assert list(tmp_path.iterdir()) == []
