"""The interactive chat in a real pseudo-terminal: what a person sees."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvchat.chat.store import SessionStore
from support.pty_screen import PtyScreen
from support.saved_sessions import save_chat

StartPty = Callable[..., PtyScreen]


def _numbered(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^line-(\d{4}) of the answer$", text, re.M)]


def _count_of(what: str, count: int) -> Callable[[str], bool]:
    return lambda text: text.count(what) == count


def _lines_up_to(number: int) -> Callable[[str], bool]:
    return lambda text: max(_numbered(text), default=-1) >= number


def test_ctrl_c_at_any_moment_of_an_answer_never_ends_the_program(start_pty: StartPty) -> None:
    chat = start_pty()
    for number in range(1, 7):
        chat.enter(f"slow {200 + number}").wait_for(_count_of("❯ slow", number))
        chat.wait_for(_lines_up_to(number - 1))
        chat.type("\x03").wait_for(_count_of("stopped", number))
    chat.enter("still there").wait_for("You said 'still there' (0).")


def test_resizing_while_an_answer_comes_loses_and_doubles_nothing(start_pty: StartPty) -> None:
    chat = start_pty()
    chat.enter("slow 45").wait_for("line-0002")
    for columns, rows in ((60, 24), (100, 24), (40, 30)):  # the emulator loses rows it takes away
        before = max(_numbered(chat.text), default=0)
        chat.resize(columns, rows)
        chat.wait_for(_lines_up_to(before + 4))
    chat.wait_for("first token")

    assert _numbered(chat.text) == list(range(45))


def test_what_a_user_pastes_does_not_act_either(start_pty: StartPty) -> None:
    chat = start_pty()
    chat.paste("a\x1b]0;mine\x07b \u202eabc\u202c\nsecond line").wait_for("second line")
    chat.type("\r").wait_for("You said")

    assert b"\x1b]0;mine" not in chat.raw
    assert "\u202e".encode() not in chat.raw
    assert chat.screen.title == ""


def test_what_is_typed_before_the_prompt_is_there_is_not_lost(checkpoint, fork_server):
    """The terminal turns Enter into a line feed until the prompt has taken it over: read as a key
    that would be Ctrl-J, and the message would wait in the prompt as its first line."""
    command = ("support.scripted_repl", [str(checkpoint)])
    with closing(PtyScreen(fork_server, *command, typed="early\rand ha")) as chat:
        chat.wait_for("/help for help").type("lf").wait_for("You said 'early' (0).")
        chat.wait_for("❯ and half")


def test_what_libraries_write_to_stderr_does_not_tear_the_screen(start_pty, tmp_path):
    chat = start_pty()
    chat.enter("warn me").wait_for("You said 'warn me' (0).").wait_for("tokens, ")
    chat.type("still typing").wait_for("❯ still typing")

    assert "❯ warn me" in chat.text
    assert "\na library warns\n␛[31mtwice\n" in chat.text
    store = SessionStore(tmp_path / "sessions")
    turns = store.read(store.latest()).conversation.turns()
    assert [turn.text for turn in turns] == ["warn me", "You said 'warn me' (0)."]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux tells who has a lock")
def test_a_conversation_that_another_process_has_open_says_so(start_pty, tmp_path):
    """It was an error only once it was picked, and the list was gone."""
    store = SessionStore(tmp_path / "sessions")
    save_chat(store, "hello", "Hello to you.")
    save_chat(store, "goodbye", "Until then.")
    _, log = store.open(store.ids()[-1])
    chat = start_pty(columns=100, rows=30)
    chat.enter("/resume").wait_for_shown("open elsewhere · just now")
    assert chat.shown.count("open elsewhere") == 1
    log.close()
