"""/compact and /btw on the screen, and what a full context says."""

import re
from collections.abc import Callable

import pytest

from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def _figures(count: int) -> Callable[[str], bool]:
    return lambda text: text.count("first token") == count


def test_a_question_aside_is_marked_and_leaves_no_trace(start_chat: StartChat) -> None:
    chat = start_chat(columns=100)
    chat.enter("one").wait_for(_figures(1))
    chat.enter("/btw and two?").wait_for("aside, not part of the conversation:")
    chat.wait_for("You said 'and two?' (0).").wait_for(_figures(2))
    chat.enter("/show chat").wait_for(
        lambda text: "You said 'one'" in text.partition("/show chat")[2]
    )
    assert "two" not in chat.text.partition("/show chat")[2]
    chat.enter("/btw").wait_for("Ask what?")


def test_compacting_says_what_it_costs_and_saves_and_keeps_the_branch(start_chat):
    chat = start_chat(columns=100, rows=40)
    chat.enter("lines 40").wait_for(_figures(1))
    for number, text in enumerate(("two", "three"), start=2):
        chat.enter(text).wait_for(_figures(number))
    chat.enter("/compact").wait_for("Summarising 1 message,").wait_for("Ada has a dog called Rex.")
    chat.wait_for("tokens became").wait_for("/undo or /switch 1 ")
    chat.enter("four").wait_for("You said 'four' (0).").wait_for(_figures(5))
    chat.enter("/tree").wait_for("4 you: four")
    tree = chat.text.rpartition("/tree")[2]
    for row in ("1 you: lines 40", "3 you: three", "summary of messages 1", "4 you: four"):
        assert tree.count(row) == 1, tree
    chat.enter("/show chat").wait_for(
        "Summary of earlier messages: Numbered lines; Ada has a dog called Rex."
    )
    chat.enter("/switch 1").wait_for(lambda text: "❯ three" in text.rpartition("/switch 1")[2])


def test_a_model_that_repeats_the_request_compacts_nothing(start_chat: StartChat) -> None:
    chat = start_chat(columns=100, rows=40)
    chat.enter("lines 40").wait_for(_figures(1))
    chat.enter("/compact an echo").wait_for("repeated the request instead of a summary")
    chat.enter("/tree").wait_for("1 you: lines 40")
    assert "summary of messages" not in chat.text
    assert "Compacted" not in chat.text


def test_a_refusal_compacts_nothing_and_undo_takes_a_compaction_back(start_chat):
    chat = start_chat(columns=100, rows=40)
    chat.enter("lines 30").wait_for(_figures(1))
    chat.enter("/compact a refusal").wait_for("far too short, so nothing is compacted.")
    chat.enter("/compact a refusal in words").wait_for("says nothing of the conversation,")
    chat.enter("two").wait_for("You said 'two' (0).")
    chat.enter("/compact").wait_for("tokens became")
    chat.enter("/undo").wait_for("Back before: /compact")
    chat.enter("/tree").wait_for(lambda text: "2 you: two" in text.rpartition("/tree")[2])


@pytest.mark.parametrize("columns", [40, 100])
def test_a_full_context_names_the_ways_out(start_chat: StartChat, columns: int) -> None:
    chat = start_chat("--context", "300", columns=columns)
    chat.enter("lines 10").wait_for(_figures(1))
    chat.wait_for_shown("full: /compact")
    chat.enter("this is a longer message than what the context still has room for, as it is 300")
    ways_out = "/compact lets a summary take the place of older messages"
    chat.wait_for(lambda text: ways_out in " ".join(text.split()))
    assert "The prompt has " in chat.text


def test_a_full_context_goes_on_without_a_summary_after_a_question(start_chat: StartChat) -> None:
    """/compact could only refuse there; and the size shown was the prompt's, to the end."""
    chat = start_chat("--context", "700", columns=120, rows=40)
    is_live = re.compile(r"full: /compact, .* tokens.* Esc stops").search
    chat.enter("slow 40").wait_for(lambda _: is_live(chat.shown) is not None)
    chat.wait_for("The context is full").enter("/compact a refusal").wait_for("far too short")
    chat.wait_for("Leave out the oldest message instead?").type("\r")
    chat.wait_for("Nothing is changed.").enter("/compact a refusal")
    chat.wait_for_shown("Leave out the oldest message instead?")
    chat.type("yes\r").wait_for("700 tokens became").enter("two").wait_for("You said 'two' (0).")
    chat.enter("/undo 2").wait_for("Back before: leaving out the oldest messages")


@pytest.mark.parametrize("policy", ["drop", "compact"])
def test_a_full_context_goes_on_by_itself(start_chat: StartChat, policy: str) -> None:
    chat = start_chat("--context", "900", columns=120, rows=40)
    chat.enter(f"/set context-policy {policy}").wait_for(f"context-policy is {policy}.")
    chat.enter("lines 31").wait_for(_figures(1))
    chat.wait_for_shown("% full: the oldest messages" if policy == "drop" else "% full: a summary")
    chat.enter("lines 9").wait_for("The context is full: ").wait_for(_figures(2))
    chat.enter("three").wait_for("You said 'three' (0).")
    assert "dog called Rex" not in chat.text, "a summary is not shown as an answer"
    label = "without messages 1" if policy == "drop" else "summary of messages 1"
    chat.enter("/tree").wait_for(label)
    undone = "leaving out the oldest messages" if policy == "drop" else "/compact"
    chat.enter("/undo 3").wait_for(f"Back before: {undone}")


def test_what_waits_for_a_summary_says_so(start_chat: StartChat) -> None:
    """It said that it waited for the answer."""
    chat = start_chat(columns=100)
    for number in range(4):
        chat.enter(f"lines {20 + number}").wait_for(f"line-{19 + number:04}")
        chat.wait_for(lambda text, n=number: text.count("tokens, ") == n + 1)
    chat.enter("/compact slowly")
    chat.wait_for(lambda text: "line-0003" in text.partition("Summarising")[2]).enter("/undo")
    chat.wait_for_shown("/undo waits for the summary. Esc stops it.").type("\x1b")
    chat.wait_for("Stopped: nothing is compacted.")


def test_a_summary_that_fails_compacts_nothing(start_chat: StartChat) -> None:
    chat = start_chat(columns=100, rows=40)
    chat.enter("lines 40").wait_for(_figures(1))
    chat.enter("/compact a crash").wait_for("as the script says").finish()
    assert "tokens became" not in chat.text
    assert "Something went wrong" not in chat.text
    again = start_chat("--continue").enter("/tree").wait_for("1 you: lines 40")
    assert "summary of" not in again.text


def test_a_summary_that_waits_for_a_model_that_cannot_be_loaded(start_chat, tmp_path):
    """Its failure is said once, as the chat's, and nothing is compacted."""
    start_chat().enter("lines 40").wait_for("first token").enter("/exit").finish()
    loaded = tmp_path / "loaded"
    chat = start_chat("--fail", "--loading", str(loaded), "--continue", columns=100)
    chat.enter("/compact").wait_for("Summarising 1 message,")
    loaded.touch()

    assert chat.finish() == 3
    assert "Something went wrong" not in chat.text
    again = start_chat("--continue")
    again.enter("/tree").wait_for("1 you: lines 40")
    assert "summary of" not in again.text
