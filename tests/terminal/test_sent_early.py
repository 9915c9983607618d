"""A message is on the disk the moment it is sent, also while the model still loads."""

import signal
from collections.abc import Callable
from pathlib import Path

from kvchat.chat.store import SessionStore
from support.pty_screen import PtyScreen

StartChat = Callable[..., PtyScreen]


def _saved_texts(sessions: Path) -> list[str]:
    store = SessionStore(sessions)
    return [turn.text for turn in store.read(store.latest()).conversation.path()]


def test_a_message_is_saved_before_the_model_is_loaded(
    start_chat: StartChat, tmp_path: Path
) -> None:
    """It waited in memory: killed in that time, there was no conversation to continue."""
    never = tmp_path / "never"
    chat = start_chat("--loading", str(never))
    chat.wait_for("reading weights").enter("my name is Ada").wait_for("❯ my name is Ada")
    chat.wait_for("Esc stops").kill(signal.SIGKILL)
    chat.finish()

    assert _saved_texts(tmp_path / "sessions") == ["my name is Ada"]
    again = start_chat("--continue")
    again.wait_for("❯ my name is Ada").wait_for("no answer yet: /continue answers it.")
    again.enter("/continue").wait_for("You said 'my name is Ada' (0).").wait_for("tokens, ")
    assert "no answer yet" not in again.text.partition("/continue")[2].partition("\n")[2]


def test_a_message_typed_before_the_prompt_is_there_is_saved_too(
    start_chat: StartChat, tmp_path: Path
) -> None:
    chat = start_chat("--loading", str(tmp_path / "never"))
    chat.enter("typed ahead").wait_for("Esc stops").kill(signal.SIGKILL)
    chat.finish()

    assert _saved_texts(tmp_path / "sessions") == ["typed ahead"]


def test_a_message_is_kept_where_the_model_cannot_be_loaded(
    start_chat: StartChat, tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    chat = start_chat("--fail", "--loading", str(loaded))
    chat.enter("a whole message").wait_for("Esc stops")
    loaded.touch()

    assert chat.finish() == 3
    assert _saved_texts(tmp_path / "sessions") == ["a whole message"]
    assert chat.text.count("The weights are broken.") == 1
    assert "Your last message is kept: kvchat -c opens it, and /continue answers it." in chat.text
    assert "Not sent" not in chat.text
    again = start_chat("--continue").wait_for("no answer yet")
    again.enter("/continue").wait_for("You said 'a whole message' (0).")


def test_esc_stops_a_message_that_waits_for_the_model(
    start_chat: StartChat, tmp_path: Path
) -> None:
    """The model may load for minutes."""
    loaded = tmp_path / "loaded"
    chat = start_chat("--loading", str(loaded))
    chat.enter("too early").wait_for("Esc stops").type("\x1b").wait_for("\nstopped")
    chat.enter("/tree").wait_for("1 you: too early")
    loaded.touch()
    chat.enter("/continue").wait_for("You said 'too early' (0).")


def test_the_time_of_an_answer_counts_from_when_the_model_is_there(
    start_chat: StartChat, tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    chat = start_chat("--loading", str(loaded))
    chat.enter("hello").wait_for("scripted · hello · reading weights 25% · Esc stops")
    assert "reading 1" not in chat.shown
    loaded.touch()
    chat.wait_for("You said 'hello' (0).").wait_for("context 46/32k")


def test_nothing_is_saved_of_a_chat_that_saves_nothing(
    start_chat: StartChat, tmp_path: Path
) -> None:
    chat = start_chat("--loading", str(tmp_path / "never"), is_saved=False)
    chat.enter("a secret").wait_for("Esc stops").type("\x1b").wait_for("\nstopped")
    chat.enter("/exit")
    assert chat.finish() == 0
    assert not list(tmp_path.rglob("*"))


def test_what_is_typed_ahead_of_an_answer_outlives_a_kill(
    start_chat: StartChat, tmp_path: Path
) -> None:
    history = tmp_path / "history"
    chat = start_chat("--history", str(history))
    chat.enter("slow 3000").wait_for("line-0004").enter("and then this").wait_for("1 queued")
    chat.kill(signal.SIGKILL)
    chat.finish()

    again = start_chat("--history", str(history), "--continue")
    again.type("\x1b[A").wait_for_shown("❯ and then this")


def test_a_command_takes_the_place_of_a_message_that_cannot_be_saved(
    start_chat: StartChat, tmp_path: Path
) -> None:
    """/exit was typed after the message that came back, and was sent with it."""
    (tmp_path / "sessions").write_text("no directory")
    chat = start_chat().enter("my name is Ada")
    chat.wait_for("A command takes its place").wait_for_shown("❯ my name is Ada")
    chat.enter("/exit")
    assert chat.finish() == 0
