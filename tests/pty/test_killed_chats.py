"""A chat that SIGKILL ended goes on: what was typed in it is on the disk."""

import signal
from collections.abc import Callable
from pathlib import Path

from kvchat.chat.store import SessionStore
from support.pty_screen import PtyScreen

StartPty = Callable[..., PtyScreen]


def _saved_texts(sessions: Path) -> list[str]:
    store = SessionStore(sessions)
    return [turn.text for turn in store.read(store.latest()).conversation.path()]


def _saved_waiting(sessions: Path) -> tuple[str, ...]:
    store = SessionStore(sessions)
    return store.read(store.latest()).conversation.waiting


def test_a_message_is_saved_before_the_model_is_loaded(start_pty: StartPty, tmp_path: Path) -> None:
    """It waited in memory: killed in that time, there was no conversation to continue."""
    never = tmp_path / "never"
    chat = start_pty("--loading", str(never))
    chat.wait_for("reading weights").enter("my name is Ada").wait_for("❯ my name is Ada")
    chat.wait_for("Esc stops").kill(signal.SIGKILL)
    chat.finish()

    assert _saved_texts(tmp_path / "sessions") == ["my name is Ada"]
    again = start_pty("--continue")
    again.wait_for("❯ my name is Ada").wait_for("no answer yet: /continue answers it.")
    again.enter("/continue").wait_for("You said 'my name is Ada' (0).").wait_for("tokens, ")
    assert "no answer yet" not in again.text.partition("/continue")[2].partition("\n")[2]


def test_plain_lines_show_what_was_not_sent_until_the_next_message(start_pty, tmp_path):
    """Nothing can be dropped there: it was shown at the beginning of each later chat."""
    chat = start_pty()
    chat.enter("slow 3000").wait_for("line-0004").enter("and then this").wait_for("queued 1")
    chat.kill(signal.SIGKILL)
    chat.finish()

    again = start_pty("--plain", "--continue").wait_for("Not sent:")
    again.wait_for(lambda text: "and then this" in text.partition("Not sent:")[2])
    again.enter("something else").wait_for("You said 'something else' (0).").enter("/exit").finish()
    assert _saved_waiting(tmp_path / "sessions") == ()
