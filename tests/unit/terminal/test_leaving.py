"""However the chat ends: the exit code says how, nothing is lost, the terminal is as it was."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvchat.chat.store import SessionStore
from kvchat.core.types import FinishReason
from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def _last_answer(sessions: Path) -> tuple[str, FinishReason | None]:
    store = SessionStore(sessions)
    turn = list(store.read(store.latest()).conversation.turns())[-1]
    return turn.text, turn.finish


@pytest.mark.parametrize(
    "how",
    [
        lambda chat: chat.type("\x04"),
        lambda chat: chat.enter("exit").wait_for("Enter again leaves").type("\r"),
    ],
    ids=["ctrl-d", "exit exit"],
)
def test_keys_that_leave_say_that_nothing_failed(start_chat, how):
    chat = start_chat(is_saved=False)
    chat.enter("hello").wait_for("tokens, ")
    how(chat)

    assert chat.finish() == 0


def test_exit_in_the_middle_of_an_answer_stops_it_and_leaves(start_chat, tmp_path):
    chat = start_chat()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.enter("/exit")

    assert chat.finish() == 0
    assert _last_answer(tmp_path / "sessions")[1] is FinishReason.CANCELLED


def test_what_was_typed_is_shown_where_no_model_comes_to_answer_it(start_chat, tmp_path):
    """It was lost, also where a server had ended and the chat tried to go on without it."""
    loaded = tmp_path / "loaded"
    chat = start_chat("--fail", "--loading", str(loaded), is_saved=False)
    chat.enter("a whole message").wait_for("a whole message")
    chat.type("half a li").wait_for("half a li")
    loaded.touch()

    assert chat.finish() == 3
    _, _, unsent = chat.text.partition("Not sent:\n")
    shown = [line.strip() for line in unsent.splitlines() if line.strip()]
    assert shown[:2] == ["a whole message", "half a li"]


def test_leaving_while_the_model_loads_does_not_wait_for_it(start_chat, tmp_path):
    chat = start_chat("--loading", str(tmp_path / "never"), is_saved=False)
    chat.wait_for("reading weights").type("\x04")

    assert chat.finish() == 0


def test_what_was_typed_is_remembered_privately_across_starts(start_chat, tmp_path):
    path = tmp_path / "history"
    chat = start_chat("--history", str(path))
    chat.enter("a needle in it").wait_for("tokens, ").enter("/exit")
    chat.finish()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    again = start_chat("--history", str(path))
    again.type("\x12").type("needle").wait_for("a needle in it").type("\r").type("\r")
    again.wait_for("You said 'a needle in it' (0).")


def test_messages_that_were_waiting_are_told_of_and_kept(start_chat, tmp_path):
    """What was queued while the model loaded was gone at /exit, without a word."""
    history, never = tmp_path / "history", tmp_path / "never"
    chat = start_chat("--history", str(history), "--loading", str(never))
    chat.wait_for("reading weights")
    chat.enter("a question").wait_for("Esc stops").enter("and another").wait_for("1 queued")
    chat.enter("and a third").wait_for("2 queued").enter("/exit")

    assert chat.finish() == 0
    assert "2 messages were not sent. kvchat -c offers them again." in chat.text
    assert "Your last message is kept: kvchat -c opens it, and /continue answers it." in chat.text

    again = start_chat("--history", str(history))
    again.type("\x1b[A\x1b[A").wait_for_shown("❯ and a third")
    again.type("\x1b[A").wait_for_shown("❯ and another")


def test_a_message_that_waits_behind_an_answer_is_told_of(start_chat: StartChat) -> None:
    chat = start_chat(is_saved=False)
    chat.enter("slow 3000").wait_for("line-0004")
    chat.enter("next").wait_for("queued").enter("/exit")

    assert chat.finish() == 0
    assert chat.text.rstrip().endswith("kvchat: 1 message was not sent.")
