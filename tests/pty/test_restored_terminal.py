"""However the chat ends: the exit code says how, nothing is lost, the terminal is as it was."""

import os
import signal
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from kvchat.chat.store import SessionStore
from kvchat.core.types import FinishReason
from support.matrix import spread
from support.pty_screen import PtyScreen

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
        (lambda chat: chat.type("\x03").wait_for("again leaves").type("\x03"), 130),
    ],
    ids=["/exit", "ctrl-c twice"],
)
def test_leaving_restores_the_terminal_and_says_how(start_pty, how, code):
    chat = start_pty(is_saved=False)
    before = _unused_settings()
    chat.enter("hello").wait_for("tokens, ")
    how(chat)

    assert chat.finish() == code
    _check_restored(chat, before)


@pytest.mark.parametrize(
    ("number", "code"),
    spread([(signal.SIGTERM, 143), (signal.SIGHUP, 129)], [(signal.SIGTERM, 143)]),
    ids=["TERM", "HUP"],
)
def test_a_signal_in_the_middle_of_an_answer_keeps_what_there_is(start_pty, tmp_path, number, code):
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


def test_an_interrupt_from_outside_is_a_ctrl_c(start_pty: StartPty) -> None:
    chat = start_pty()
    chat.enter("slow 3000").wait_for("line-0002")
    chat.kill(signal.SIGINT)
    chat.wait_for("stopped").enter("go on").wait_for("You said 'go on' (0).")


def test_a_terminal_that_goes_away_ends_the_chat_and_the_answer_is_kept(start_pty, tmp_path):
    chat = start_pty()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.hang_up()

    assert chat.exit_code() == 129
    text, finish = _last_answer(tmp_path / "sessions")
    assert "line-0004" in text
    assert finish is FinishReason.CANCELLED


def test_a_model_that_cannot_be_loaded_is_told_in_a_sentence(start_pty, tmp_path):
    loaded = tmp_path / "loaded"
    chat = start_pty("--fail", "--loading", str(loaded), is_saved=False)
    before = _unused_settings()
    loaded.touch()

    assert chat.finish() == 3
    assert "kvchat: The weights are broken. Download them again." in chat.text
    assert "Traceback" not in chat.text
    _check_restored(chat, before)


def test_a_download_for_another_model_can_be_left_with_ctrl_c(start_pty: StartPty) -> None:
    chat = start_pty(is_saved=False)
    before = _unused_settings()
    chat.enter("hello").wait_for("tokens, ")
    chat.enter("/model slow-download").wait_for("downloading")
    chat.type("\x03")

    assert chat.finish() == 130
    _check_restored(chat, before)


def test_half_a_message_is_kept_when_the_chat_is_ended(start_pty: StartPty, tmp_path: Path) -> None:
    """SIGTERM, or the window closed, and what was being typed was gone."""
    history = tmp_path / "history"
    chat = start_pty("--history", str(history))
    before = _unused_settings()
    chat.type("half a thought").wait_for_shown("❯ half a thought").kill(signal.SIGTERM)

    assert chat.finish() == 143
    _check_restored(chat, before)
    assert "1 message was not sent. In the next chat, Up brings it back." in chat.text
    start_pty("--history", str(history)).type("\x1b[A").wait_for_shown("❯ half a thought")
