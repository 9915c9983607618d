"""The chat without cursor motion, in this process: words for boxes, colours and what happens."""

from collections.abc import Callable
from pathlib import Path

from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def test_what_boxes_and_colours_would_say_is_said_in_words(start_chat):
    chat = start_chat("--spoken")
    chat.enter("markdown").wait_for("End of answer.")
    for words in ("Code, python:", "End of code.", "a: 1; b: 2", "`code`"):
        assert words in chat.text
    chat.enter("think").wait_for("Thinking:").wait_for("Answer:")
    chat.enter("/stats").wait_for("first token")


def test_pickers_are_numbered_lists(start_chat: StartChat) -> None:
    chat = start_chat("--spoken")
    chat.enter("one").wait_for("End of answer.")
    # Headings and the list have the numbers that /tree shows: the first answer is older.
    chat.enter("/retry -n 2").wait_for("Answer 2 of 3").wait_for("Answer 3 of 3")
    chat.wait_for("1. answer 2 (").wait_for("2. answer 3 (").wait_for("Type a number")
    chat.wait_for("Number:").enter("7").wait_for("A number from 1 to 2, please.").enter("2")
    chat.enter("/tree").wait_for("(here)")


def test_messages_typed_meanwhile_are_queued_and_ctrl_c_stops(start_chat):
    chat = start_chat("--spoken")
    chat.enter("slow 3000").wait_for("line-0002")
    chat.enter("the next").wait_for("Queued.")
    chat.type("\x03").wait_for("Now: the next").wait_for("You said 'the next' (0).")
    chat.type("\x03").wait_for("Ctrl-C again leaves.").type("\x03")

    assert chat.finish() == 130


def test_several_lines_make_one_message(start_chat: StartChat) -> None:
    chat = start_chat("--plain")
    chat.enter('"""').enter("one").enter('two"""').wait_for("You said 'one\\ntwo' (0).")
    chat.enter("three\\").enter("four").wait_for("You said 'three\\nfour' (0).")


def test_a_refused_line_is_told_again(start_chat: StartChat) -> None:
    chat = start_chat("--spoken")
    chat.enter("/hepl").wait_for("Did you mean /help?").wait_for("The text was: /hepl")


def test_those_who_listen_hear_that_the_model_loads(start_chat: StartChat, tmp_path: Path) -> None:
    chat = start_chat("--spoken", "--loading", str(tmp_path / "never"))
    chat.wait_for("The model is loading. What you type waits for it.")


def test_ctrl_c_gives_up_an_edit_on_plain_lines(start_chat: StartChat) -> None:
    """The next message took the edited one's place all the same."""
    chat = start_chat("--plain")
    chat.enter("one").wait_for("tokens, ")
    chat.enter("/edit").wait_for("Editing message 1").type("\x03").wait_for("again leaves")
    chat.enter("two").wait_for("You said 'two' (0).").enter("/tree").wait_for("2 you: two")
    assert "1 you: one · " in chat.text


def test_plain_lines_show_a_commands_words_after_the_answer(start_chat, tmp_path):
    gate = tmp_path / "gate"
    chat = start_chat("--plain", "--gate", str(gate))
    chat.enter("gated 80").wait_for("word30 ")
    chat.enter("/set seed 5").wait_for("Shown after the answer.")
    gate.touch()
    chat.wait_for("seed is 5.")
    assert "word79" in chat.text.partition("seed is 5.")[0]
