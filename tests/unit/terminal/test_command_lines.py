"""Where a command's line and its words are shown: before what it says, and not within an answer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def _below(chat: ChatScreen, first: str, last: str) -> str:
    return chat.text.partition(first)[2].partition(last)[0]


def _words(count: int) -> list[str]:
    return [f"word{number}" for number in range(count)]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that the second half of an answer to "gated" waits for."""
    return tmp_path / "gate"


def test_a_refusal_does_not_come_between_two_lines_of_an_answer(start_chat, gate):
    """It split the paragraph that was being written, in the scrollback, for good."""
    chat = start_chat("--gate", str(gate))
    chat.enter("gated 80").wait_for("word30 ")
    for typed, said in (
        ("/hepl", "There is no command /hepl. Did you mean /help?"),
        ("/undo", "/undo waits for the answer. Esc stops it."),
        ("/stats foo", "foo is unknown here. /stats [on|off|full]"),
    ):
        chat.enter(typed).wait_for_shown(said).wait_for_shown(f"❯ {typed}").type("\x15")
    gate.touch()
    chat.wait_for("tokens, ")

    assert _below(chat, "❯ gated 80", "cached").split() == _words(80)


@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (40, 12)])
def test_what_a_command_says_stands_below_the_answer_that_streams(start_chat, gate, columns, rows):
    """/help came between two lines of a paragraph, and stayed there in the scrollback."""
    chat = start_chat("--gate", str(gate), columns=columns, rows=rows)
    chat.enter("gated 80").wait_for("word30 ")
    streaming = " tokens · Esc stops" if columns == 100 else " tokens"
    chat.enter("/help").wait_for(
        lambda _: (
            "every day" in chat.shown.partition("❯ /help")[2]
            and streaming in chat.shown.partition("❯ /help")[2]
        )
    )
    assert "first token" not in chat.text, "it is shown while the answer comes"
    gate.touch()
    chat.wait_for("first token").wait_for_shown(" is a message." if rows == 30 else " one.")

    assert _below(chat, "❯ gated 80", "cached").split() == _words(80)
    after = chat.text.partition("first token")[2]
    assert after.count("❯ /help") == chat.text.count("❯ /help") == 1
    assert "/resume" in after


def test_several_commands_during_an_answer_follow_it_in_their_order(start_chat, gate):
    chat = start_chat("--gate", str(gate), rows=40)
    chat.enter("gated 80").wait_for("word30 ")
    chat.enter("/set seed 5").wait_for_shown("seed is 5.")
    chat.enter("next").wait_for_shown("queued 1: next")
    chat.enter("/show model").wait_for("identity")
    gate.touch()
    chat.wait_for("You said 'next' (0).")

    assert _below(chat, "❯ gated 80", "cached").split() == _words(80)
    order = [line for line in chat.text.splitlines() if line.startswith(("❯ ", "seed is"))]
    assert order[:5] == ["❯ gated 80", "❯ /set seed 5", "seed is 5.", "❯ /show model", "❯ next"]
    assert chat.text.count("❯ /show model") == 1
    assert "identity" in chat.text.partition("first token")[2]


def test_a_command_before_the_first_word_of_an_answer_is_shown_at_once(start_chat, tmp_path):
    chat = start_chat("--loading", str(tmp_path / "never"))
    chat.enter("hello").wait_for("Esc stops")
    chat.enter("/set seed 5").wait_for("seed is 5.")
    assert "❯ hello" in chat.text.partition("❯ /set seed 5")[0]


def test_a_command_typed_ahead_is_shown_after_what_ran_before_it(start_chat, tmp_path):
    """Both lines stood together, and then both results."""
    loaded = tmp_path / "loaded"
    loaded.touch()
    chat = start_chat("--loading", str(loaded), columns=100)
    chat.enter("hello").wait_for("You said 'hello' (0).").wait_for("on device")
    loaded.unlink()
    chat.enter("/model another").wait_for("reading weights · Esc stops")
    chat.enter("/context").wait_for("the next message is")
    chat.enter("/system Be brief.").wait_for_shown("waiting: /system Be brief.")
    chat.enter("/rename Ships").wait_for("is called: Ships")
    loaded.touch()
    chat.wait_for("Now with").wait_for("❯ /system Be brief.")

    lines = [line for line in chat.text.splitlines() if line.startswith(("❯ /", "Now", "This c"))]
    assert [line.partition(" with")[0] for line in lines] == [
        "❯ /model another",
        "❯ /context",
        "❯ /rename Ships",
        "This conversation is called: Ships",
        "Now",
        "❯ /system Be brief.",
    ]
    chat.wait_for(lambda _: "waiting:" not in chat.shown)


def test_a_price_before_an_answer_leaves_one_empty_row(start_chat: StartChat) -> None:
    """/retry with its price left two."""
    chat = start_chat()
    chat.enter("say " * 200).wait_for("tokens, ").enter("/exit").finish()
    again = start_chat("--continue")
    again.wait_for("cold:").enter("/retry").wait_for("/retry re-reads 8").wait_for("first token")
    assert "s.\n\nYou said" in again.text.partition("re-reads")[2]
