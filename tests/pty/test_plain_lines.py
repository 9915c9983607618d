"""Without cursor motion: for screen readers and terminals that can only print."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.pty_screen import PtyScreen

StartPty = Callable[..., PtyScreen]


@pytest.mark.parametrize(
    ("flag", "leave", "code"),
    [
        ("--spoken", lambda chat: chat.type("\x04"), 0),
        ("--plain", lambda chat: chat.kill(signal.SIGTERM), 143),
    ],
    ids=["spoken, ctrl-d", "plain, TERM"],
)
def test_the_transcript_has_no_escape_sequence_and_no_line_twice(start_pty, flag, leave, code):
    chat = start_pty(flag)
    chat.enter("markdown").wait_for("The end.")
    chat.enter("think").wait_for("The answer is 42.")
    chat.enter("evil").wait_for("bell  end")
    chat.wait_until_quiet(0.5)  # a line that is typed before the prompt is there shares its line
    chat.enter("lines 30").wait_for("line-0029 of the answer").wait_until_quiet(0.5)
    leave(chat)

    assert chat.finish() == code
    assert b"\x1b" not in chat.raw
    assert b"\x07" not in chat.raw
    assert re.findall(r"^line-(\d{4})", chat.text, re.M) == [f"{n:04}" for n in range(30)]


def test_the_context_is_told_in_words_to_those_who_listen(start_pty: StartPty) -> None:
    """The bar was read out cell by cell, and the prompt was said before the command's answer."""
    chat = start_pty("--spoken")
    chat.enter("hello").wait_for("End of answer.").wait_for("You: ")
    chat.enter("/context").wait_for("the next message is")

    assert "▰" not in chat.text
    assert "▱" not in chat.text
    assert "/context\n" in chat.text
    assert "You:\n" not in chat.text.partition("/context")[2].partition("cached")[0]


def test_an_interrupted_answer_begins_a_line_of_its_own(start_pty: StartPty) -> None:
    """The terminal shows the key as ^C, and the rest of the answer followed on the same line."""
    chat = start_pty("--plain")
    chat.enter("slow 3000").wait_for("line-0002").type("\x03").wait_for("\nstopped")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that the second half of an answer to "gated" waits for."""
    return tmp_path / "gate"


def test_plain_lines_say_at_once_how_an_answer_is_stopped(start_pty: StartPty, gate: Path) -> None:
    """Ctrl-D said "Shown after the answer.", and after it what would have stopped it.

    A refused command named Esc, which plain lines do not read.
    """
    chat = start_pty("--plain", "--gate", str(gate))
    chat.enter("gated 80").wait_for("word30 ").type("\x04").wait_for("Ctrl-C stops the answer.")
    chat.enter("/compact").wait_for("The text was: /compact")
    chat.wait_for("/compact waits for the answer. Ctrl-C stops it.")
    gate.touch()
    chat.wait_for("word79")
    assert "word79" in chat.text.partition("Ctrl-C stops the answer.")[2]
    assert "Shown after" not in chat.text
