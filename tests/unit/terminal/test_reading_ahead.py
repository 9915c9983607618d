"""What is attached is read before Enter."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.chat_screen import ChatScreen
from support.scripted_engine import BLOCK_SIZE

StartChat = Callable[..., ChatScreen]
_NUM_TOKENS = 1600  # of the file: the tokenizer has one token per byte


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    path = tmp_path / "manual.txt"
    path.write_text(("Twelve ships lie in the harbour.\n" * 60)[:_NUM_TOKENS])
    return path


def _wait_until_read(chat: ChatScreen, log: Path) -> None:
    chat.wait_for(lambda _: log.exists() and "read ahead tokens=" in log.read_text())


def _num_computed(chat: ChatScreen) -> int:
    chat.wait_for("first token")
    figures = re.search(r"cached ([\d,]+)/([\d,]+)", chat.text)
    assert figures is not None, chat.text
    cached, whole = (int(number.replace(",", "")) for number in figures.groups())
    assert whole > _NUM_TOKENS
    return whole - cached


def test_a_file_given_by_f_is_read_once_the_model_is_loaded(start_chat, tmp_path, manual):
    """Only typing began the reading, so -f and a short question read the file after Enter."""
    loaded, log = tmp_path / "loaded", tmp_path / "log"
    arguments = ("--attach", str(manual), "--loading", str(loaded), "--log", str(log))
    chat = start_chat(*arguments, columns=100)
    chat.wait_for("Attached manual.txt").wait_for("reading weights")
    loaded.touch()
    _wait_until_read(chat, log)

    assert _num_computed(chat.enter("How many?")) <= len("How many?") + 64 + BLOCK_SIZE


def test_the_toolbar_tells_what_is_attached_and_how_much_of_it_is_read(start_chat, manual):
    """Nothing said that a file was attached, or why the next answer would come at once."""
    chat = start_chat(columns=40, rows=16)
    chat.enter(f"/file {manual}").wait_for_shown("scripted · manual.txt attached, read")
    chat.enter("/file clear").wait_for_shown("\nscripted\n")
    chat.paste("Ships lie in the harbour.\n" * 20).wait_for_shown("text read")
    chat.type("\x03").wait_for("again leaves").type("x\x7f").wait_for_shown("\nscripted\n")
    # It went on saying "text read", or that it is too long, until another key was pressed.
    chat.paste("Ships lie in the harbour.\n" * 1300).wait_for_shown("text: too long to send")
    chat.type("\x1b").type("\x1b").wait_for_shown("\nscripted\n")

    half = start_chat("--reads-half", "--attach", str(manual), columns=100)
    half.wait_for_shown("scripted · manual.txt attached, 49% read")
    half.enter("hello").wait_for("with manual.txt").wait_for("first token")
    assert "attached" not in half.shown.splitlines()[-1]


def test_a_file_attached_by_a_command_is_read_without_another_key(start_chat, tmp_path, manual):
    log = tmp_path / "log"
    chat = start_chat("--log", str(log), columns=100)
    chat.enter(f"/file {manual}").wait_for("it goes with your next message")
    _wait_until_read(chat, log)

    assert _num_computed(chat.enter("How many?")) <= len("How many?") + 64 + BLOCK_SIZE


def test_a_file_that_is_no_utf_8_is_said_to_be(start_chat: StartChat, tmp_path: Path) -> None:
    """What could not be read was replaced without a word."""
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9\n")
    said = "Some of latin.txt is no UTF-8 text; it is sent as \ufffd."
    chat = start_chat("--attach", str(path), columns=120).wait_for(said)
    chat.enter("/file clear").enter(f"/file {path}").wait_for(lambda t: t.count(said) == 2)
    chat.enter("/file clear").enter(f"what is in @{path} ?")
    chat.wait_for(lambda t: t.count(said) == 3).wait_for("with latin.txt")
