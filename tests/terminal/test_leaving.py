"""However the chat ends: the exit code says how, nothing is lost, the terminal is as it was."""

import os
import signal
import stat
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from kvchat.chat.store import SessionStore
from kvchat.core.types import FinishReason
from support.chat_screen import ChatScreen
from support.pty_screen import PtyScreen

StartChat = Callable[..., ChatScreen]
StartPty = Callable[..., PtyScreen]


def _last_answer(sessions: Path) -> tuple[str, FinishReason | None]:
    store = SessionStore(sessions)
    turn = list(store.read(store.latest()).conversation.turns())[-1]
    return turn.text, turn.finish


def _check_restored(chat: PtyScreen, before: list[object]) -> None:
    assert chat.settings() == before
    tail = chat.raw[-4000:]
    assert tail.rfind(b"\x1b[?2004l") > tail.rfind(b"\x1b[?2004h"), "bracketed paste is off"
    assert tail.rfind(b"\x1b[?25h") > tail.rfind(b"\x1b[?25l"), "the cursor is shown"
    assert b"\x1b[?1049" not in chat.raw, "there was no alternate screen"


def _unused_settings() -> list[object]:
    """The line settings a pseudo-terminal starts with."""
    master, slave = os.openpty()
    try:
        return list(termios.tcgetattr(slave))
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (lambda chat: chat.enter("/exit"), 0),
        (lambda chat: chat.type("\x04"), 0),
        (lambda chat: chat.enter("exit").wait_for("Enter again leaves").type("\r"), 0),
        (lambda chat: chat.type("\x03").wait_for("again leaves").type("\x03"), 130),
        (lambda chat: chat.kill(signal.SIGTERM), 143),
        (lambda chat: chat.kill(signal.SIGHUP), 129),
    ],
    ids=["/exit", "ctrl-d", "exit exit", "ctrl-c twice", "TERM", "HUP"],
)
def test_leaving_restores_the_terminal_and_says_how(
    start_pty: StartPty, how: Callable[[PtyScreen], object], code: int
) -> None:
    chat = start_pty(is_saved=False)
    before = _unused_settings()
    chat.enter("hello").wait_for("tokens, ")
    how(chat)

    assert chat.finish() == code
    _check_restored(chat, before)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["TERM", "HUP"]
)
def test_a_signal_in_the_middle_of_an_answer_keeps_what_there_is(
    start_pty: StartPty, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    chat = start_pty()
    before = _unused_settings()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.kill(number)

    assert chat.finish() == code
    _check_restored(chat, before)
    text, finish = _last_answer(tmp_path / "sessions")
    assert text.startswith("line-0000 of the answer\nline-0001")
    assert "line-0004" in text
    assert finish is FinishReason.CANCELLED


def test_exit_in_the_middle_of_an_answer_stops_it_and_leaves(
    start_chat: StartChat, tmp_path: Path
) -> None:
    chat = start_chat()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.enter("/exit")

    assert chat.finish() == 0
    assert _last_answer(tmp_path / "sessions")[1] is FinishReason.CANCELLED


def test_an_interrupt_from_outside_is_a_ctrl_c(start_pty: StartPty) -> None:
    chat = start_pty()
    chat.enter("slow 3000").wait_for("line-0002")
    chat.kill(signal.SIGINT)
    chat.wait_for("stopped").enter("go on").wait_for("You said 'go on' (0).")


def test_a_terminal_that_goes_away_ends_the_chat_and_the_answer_is_kept(
    start_pty: StartPty, tmp_path: Path
) -> None:
    chat = start_pty()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.hang_up()

    assert chat.exit_code() == 129
    text, finish = _last_answer(tmp_path / "sessions")
    assert "line-0004" in text
    assert finish is FinishReason.CANCELLED


def test_a_model_that_cannot_be_loaded_is_told_in_a_sentence(
    start_pty: StartPty, tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    chat = start_pty("--fail", "--loading", str(loaded), is_saved=False)
    before = _unused_settings()
    loaded.touch()

    assert chat.finish() == 3
    assert "kvchat: The weights are broken. Download them again." in chat.text
    assert "Traceback" not in chat.text
    _check_restored(chat, before)


def test_what_was_typed_is_shown_where_no_model_comes_to_answer_it(
    start_chat: StartChat, tmp_path: Path
) -> None:
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


def test_leaving_while_the_model_loads_does_not_wait_for_it(
    start_chat: StartChat, tmp_path: Path
) -> None:
    chat = start_chat("--loading", str(tmp_path / "never"), is_saved=False)
    chat.wait_for("reading weights").type("\x04")

    assert chat.finish() == 0


def test_a_download_for_another_model_can_be_left_with_ctrl_c(start_pty: StartPty) -> None:
    chat = start_pty(is_saved=False)
    before = _unused_settings()
    chat.enter("hello").wait_for("tokens, ")
    chat.enter("/model slow-download").wait_for("downloading")
    chat.type("\x03")

    assert chat.finish() == 130
    _check_restored(chat, before)


def test_what_was_typed_is_remembered_privately_across_starts(
    start_chat: StartChat, tmp_path: Path
) -> None:
    path = tmp_path / "history"
    chat = start_chat("--history", str(path))
    chat.enter("a needle in it").wait_for("tokens, ").enter("/exit")
    chat.finish()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    again = start_chat("--history", str(path))
    again.type("\x12").type("needle").wait_for("a needle in it").type("\r").type("\r")
    again.wait_for("You said 'a needle in it' (0).")


def test_messages_that_were_waiting_are_told_of_and_kept(
    start_chat: StartChat, tmp_path: Path
) -> None:
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


def test_half_a_message_is_kept_when_the_chat_is_ended(start_pty: StartPty, tmp_path: Path) -> None:
    """SIGTERM, or the window closed, and what was being typed was gone."""
    history = tmp_path / "history"
    chat = start_pty("--history", str(history))
    chat.type("half a thought").wait_for_shown("❯ half a thought").kill(signal.SIGTERM)

    assert chat.finish() == 143
    assert "1 message was not sent. In the next chat, Up brings it back." in chat.text
    start_pty("--history", str(history)).type("\x1b[A").wait_for_shown("❯ half a thought")


def test_a_message_that_waits_behind_an_answer_is_told_of(start_chat: StartChat) -> None:
    chat = start_chat(is_saved=False)
    chat.enter("slow 3000").wait_for("line-0004")
    chat.enter("next").wait_for("queued").enter("/exit")

    assert chat.finish() == 0
    assert chat.text.rstrip().endswith("kvchat: 1 message was not sent.")
