"""The interactive chat on an emulated screen: what a person sees."""

import codecs
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvchat.chat.store import SessionStore
from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def _numbered(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^line-(\d{4}) of the answer$", text, re.M)]


def _count_of(what: str, count: int) -> Callable[[str], bool]:
    return lambda text: text.count(what) == count


def _turns(sessions: Path) -> list[tuple[str, str]]:
    """The role and text of every turn of the session changed last."""
    store = SessionStore(sessions)
    conversation = store.read(store.latest()).conversation
    return [(turn.role.value, turn.text) for turn in conversation.turns()]


def test_a_long_answer_is_in_the_scrollback_once_and_in_order(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("lines 200").wait_for("tokens, ")

    assert _numbered(chat.text) == list(range(200))


def test_the_answer_looks_like_markdown(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("markdown").wait_for("tokens, ")

    shown = chat.text
    for expected in ("Title", "Some bold text and code", "• one", "  1. nested", "─── python"):
        assert expected in shown
    assert "def f(x):\n    return x  # comment\n──" in shown
    assert "a   b\n─────\n1   2" in shown
    assert b"\x1b[34mdef" in chat.raw, "code is coloured"


def test_thinking_is_shown_apart(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("think").wait_for("tokens, ")

    assert "┊ Let me see.\n┊ Yes.\n\nThe answer is 42." in chat.text


def test_messages_typed_meanwhile_wait_and_are_answered_in_order(start_chat, tmp_path):
    gate = tmp_path / "gate"
    chat = start_chat("--gate", str(gate))
    chat.enter("gated 80").wait_for("word30 ")
    chat.enter("second question").enter("third question").type("half typed")
    chat.wait_for("queued 1: second question").wait_for("queued 2: third question")
    gate.touch()
    chat.wait_for("You said 'third question' (0).").wait_for(_count_of("tokens, ", 3))

    order = [chat.text.index(said) for said in ("word79", "'second ques", "'third ques")]
    assert order == sorted(order)
    assert chat.text.count("You said") == 2
    chat.wait_for_shown("❯ half typed")  # what is being typed stays in the prompt


def test_a_waiting_message_can_be_edited(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("slow 200").wait_for("line-0002")
    chat.enter("first").enter("secnod").wait_for("queued 2: secnod")
    chat.type("\x1b[A").wait_for("editing 2: secnod").type("\x7f" * 4).enter("cond")
    chat.wait_for("queued 2: second")
    chat.type("\x03").wait_for("You said 'second' (0).")

    assert "You said 'first' (0)." in chat.text


@pytest.mark.parametrize("key", ["\x1b", "\x03"])
def test_an_answer_is_stopped_and_what_there_is_of_it_kept(start_chat, tmp_path, key):
    chat = start_chat()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.type(key).wait_for("stopped")

    role, kept = _turns(tmp_path / "sessions")[-1]
    shown = chat.text.split("❯ slow 3000")[1].split("stopped")[0].strip()
    assert role == "assistant"
    assert kept.rstrip() == shown
    chat.enter("go on").wait_for("You said 'go on' (0).")


def test_a_very_small_window_still_works(start_chat: StartChat) -> None:
    chat = start_chat(columns=24, rows=6)
    chat.enter("lines 30").wait_for("at")
    chat.enter("hello").wait_for("You said 'hello'")

    assert _numbered(chat.text) == list(range(30))


def test_a_paste_of_several_lines_is_one_message_even_after_a_slash(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.paste("/exit\n/etc/hosts\nlast").wait_for("last").type("\r")
    chat.wait_for("You said '/exit\\n/etc/hosts\\nlast' (0).")


def test_an_unknown_command_is_explained_and_back_in_the_prompt(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("/hepl me").wait_for("Did you mean /help?")

    chat.wait_for_shown("❯ /hepl me")
    assert "You said" not in chat.text


def test_a_command_typed_after_a_refused_one_takes_its_place(start_chat: StartChat) -> None:
    """It was glued to the line, and "/hepl/help" went to the model as a path."""
    chat = start_chat()
    chat.type("/hepl\r/help undo\r").wait_for("Did you mean /help?").wait_for("/undo [how many]")


def test_a_refused_line_can_be_amended(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("/hepl").wait_for("❯ /hepl").type("\x7f\x7flp undo\r").wait_for("/undo [how many]")


def test_the_prompt_is_live_while_the_model_loads(start_chat: StartChat, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    chat = start_chat("--loading", str(loaded))
    chat.wait_for("reading weights").enter("early question").wait_for("❯ early question")
    chat.enter("a second one").wait_for("queued 1: a second one")
    chat.enter("/help undo").wait_for("/undo [how many]")
    loaded.touch()
    chat.wait_for("You said 'early question' (0).").wait_for("You said 'a second one' (0).")


def test_a_long_prompt_shows_how_far_it_is_read_and_can_be_stopped(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("read 200 " + "x" * 600).wait_for("% ·").wait_for("left")
    chat.type("\x1b").wait_for("stopped")
    chat.enter("next").wait_for("You said 'next' (0).")


def test_an_engine_that_fails_is_a_sentence_not_a_traceback(start_chat: StartChat) -> None:
    """It was not said that the conversation stays."""
    chat = start_chat()
    chat.enter("hello").wait_for("You said 'hello' (0).")
    chat.enter("crash")

    assert chat.finish() == 1
    assert "The engine stopped" in chat.text
    assert "1 message was not sent. kvchat -c offers it again." in chat.text
    assert "This conversation is kept: kvchat -c goes on with it." in chat.text
    assert "Traceback" not in chat.text


def test_a_message_too_long_for_the_context_comes_back(start_chat: StartChat) -> None:
    chat = start_chat("--context", "300")
    chat.enter("y" * 400).wait_for("the context holds 300")
    chat.wait_for(lambda text: "yyyy" in chat.shown.rpartition("❯")[2])
    chat.type("\x1b\x1b\x15").type("\x03").enter("short").wait_for("You said 'short' (0).")


def test_nothing_a_model_says_acts_on_the_terminal(start_chat: StartChat) -> None:
    chat = start_chat()
    before = len(chat.raw)
    chat.enter("evil").wait_for("end").wait_for("tokens, ")

    assert "␛]0;owned" in chat.text
    assert "␛[2J" in chat.text
    assert chat.screen.title == ""
    raw = chat.raw[before:]
    allowed = re.compile(rb"\x1b\[[0-9;]*[mABCDGJKH]|\x1b\[\?(?:25|7|12|2004|2026)[hl]|\r|\n|\x08")
    # The screen is still being written to: what was read may end inside a character.
    rest = codecs.getincrementaldecoder("utf-8")().decode(allowed.sub(b"", raw))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", rest)


def test_nothing_moves_while_nothing_happens(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("hello").wait_for("on device")
    chat.wait_until_quiet(1.0)
