"""Without cursor motion: for screen readers and terminals that can only print."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.pty_screen import PtyScreen

StartPty = Callable[..., PtyScreen]


@pytest.mark.parametrize("flag", ["--spoken", "--plain"])
def test_the_transcript_has_no_escape_sequence_and_no_line_twice(
    start_pty: StartPty, flag: str
) -> None:
    chat = start_pty(flag)
    chat.enter("markdown").wait_for("The end.")
    chat.enter("think").wait_for("The answer is 42.")
    chat.enter("evil").wait_for("bell  end")
    chat.wait_until_quiet(0.5)  # a line that is typed before the prompt is there shares its line
    chat.enter("lines 30").wait_for("line-0029 of the answer")
    chat.enter("/exit")

    assert chat.finish() == 0
    assert b"\x1b" not in chat.raw
    assert b"\x07" not in chat.raw
    assert re.findall(r"^line-(\d{4})", chat.text, re.M) == [f"{n:04}" for n in range(30)]


def test_what_boxes_and_colours_would_say_is_said_in_words(
    start_pty: StartPty,
) -> None:
    chat = start_pty("--spoken")
    chat.enter("markdown").wait_for("End of answer.")
    for words in ("Code, python:", "End of code.", "a: 1; b: 2", "`code`"):
        assert words in chat.text
    chat.enter("think").wait_for("Thinking:").wait_for("Answer:")
    chat.enter("/stats").wait_for("first token")


def test_pickers_are_numbered_lists(start_pty: StartPty) -> None:
    chat = start_pty("--spoken")
    chat.enter("one").wait_for("End of answer.")
    # Headings and the list have the numbers that /tree shows: the first answer is older.
    chat.enter("/retry -n 2").wait_for("Answer 2 of 3").wait_for("Answer 3 of 3")
    chat.wait_for("1. answer 2 (").wait_for("2. answer 3 (").wait_for("Type a number")
    chat.wait_for("Number:").enter("7").wait_for("A number from 1 to 2, please.").enter("2")
    chat.enter("/tree").wait_for("(here)")


def test_messages_typed_meanwhile_are_queued_and_ctrl_c_stops(
    start_pty: StartPty,
) -> None:
    chat = start_pty("--spoken")
    chat.enter("slow 3000").wait_for("line-0002")
    chat.enter("the next").wait_for("Queued.")
    chat.type("\x03").wait_for("Now: the next").wait_for("You said 'the next' (0).")
    chat.type("\x03").wait_for("Ctrl-C again leaves.").type("\x03")

    assert chat.finish() == 130


def test_several_lines_make_one_message(start_pty: StartPty) -> None:
    chat = start_pty("--plain")
    chat.enter('"""').enter("one").enter('two"""').wait_for("You said 'one\\ntwo' (0).")
    chat.enter("three\\").enter("four").wait_for("You said 'three\\nfour' (0).")


def test_a_refused_line_is_told_again(start_pty: StartPty) -> None:
    chat = start_pty("--spoken")
    chat.enter("/hepl").wait_for("Did you mean /help?").wait_for("The text was: /hepl")


@pytest.mark.parametrize(
    ("how", "code"),
    [(lambda chat: chat.type("\x04"), 0), (lambda chat: chat.kill(signal.SIGTERM), 143)],
    ids=["ctrl-d", "TERM"],
)
def test_leaving(start_pty: StartPty, how: Callable[[PtyScreen], object], code: int) -> None:
    chat = start_pty("--spoken")
    how(chat)

    assert chat.finish() == code
    assert b"\x1b" not in chat.raw


def test_the_context_is_told_in_words_to_those_who_listen(start_pty: StartPty) -> None:
    """The bar was read out cell by cell, and the prompt was said before the command's answer."""
    chat = start_pty("--spoken")
    chat.enter("hello").wait_for("End of answer.").wait_for("You: ")
    chat.enter("/context").wait_for("the next message is")

    assert "▰" not in chat.text
    assert "▱" not in chat.text
    assert "/context\n" in chat.text
    assert "You:\n" not in chat.text.partition("/context")[2].partition("cached")[0]


def test_those_who_listen_hear_that_the_model_loads(start_pty: StartPty, tmp_path: Path) -> None:
    chat = start_pty("--spoken", "--loading", str(tmp_path / "never"))
    chat.wait_for("The model is loading. What you type waits for it.")


def test_ctrl_c_gives_up_an_edit_on_plain_lines(start_pty: StartPty) -> None:
    """The next message took the edited one's place all the same."""
    chat = start_pty("--plain")
    chat.enter("one").wait_for("tokens, ")
    chat.enter("/edit").wait_for("Editing message 1").type("\x03").wait_for("again leaves")
    chat.enter("two").wait_for("You said 'two' (0).").enter("/tree").wait_for("2 you: two")
    assert "1 you: one · " in chat.text


def test_an_interrupted_answer_begins_a_line_of_its_own(start_pty: StartPty) -> None:
    """The terminal shows the key as ^C, and the rest of the answer followed on the same line."""
    chat = start_pty("--plain")
    chat.enter("slow 3000").wait_for("line-0002").type("\x03").wait_for("\nstopped")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that the second half of an answer to "gated" waits for."""
    return tmp_path / "gate"


def test_plain_lines_show_a_commands_words_after_the_answer(
    start_pty: StartPty, gate: Path
) -> None:
    chat = start_pty("--plain", "--gate", str(gate))
    chat.enter("gated 80").wait_for("word30 ")
    chat.enter("/set seed 5").wait_for("Shown after the answer.")
    gate.touch()
    chat.wait_for("seed is 5.")
    assert "word79" in chat.text.partition("seed is 5.")[0]


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
