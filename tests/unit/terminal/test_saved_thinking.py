"""Saved answers whose prompt opened the mark of thinking: the thinking is told from the answer."""

import io

import pytest

from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.documents import to_markdown
from kvchat.chat.events import AnswerText
from kvchat.chat.thinking import split_thinking
from kvchat.core.types import FinishReason
from kvchat.terminal.answer_view import AnswerView
from kvchat.terminal.history_view import answer_rows, tree_rows, turn_summary
from kvchat.terminal.line_view import LineView
from kvchat.terminal.paint import Painter, RenderContext
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from support.turns import turn

_PAINTER = Painter(Look(has_colour=False, is_plain=True, is_spoken=True))
_SAVED = "Well, let me see.\n</think>\n\nIt is 42."


def _view() -> LineView:
    return LineView(io.StringIO(), io.StringIO(), _PAINTER, 60, "")


def _conversation() -> Conversation:
    conversation = Conversation("id", 0.0)
    conversation.add(turn(1, text="What?"))
    conversation.add(turn(2, 1, Role.ASSISTANT, _SAVED, finish=FinishReason.STOP))
    return conversation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_SAVED, ("Well, let me see.", "It is 42.")),
        ("hm[/THINK]yes </think>", ("hm", "yes </think>")),
        ("</think>yes", ("", "yes")),
        ("<think>a</think>b", ("a", "b")),
        ("Write <think> and then </think>.", ("", "Write <think> and then </think>.")),
        ("The mark `</think>` ends it.", ("", "The mark `</think>` ends it.")),
        ("never closed", ("", "never closed")),
    ],
)
def test_a_whole_text_that_closes_a_mark_first_begins_with_thinking(text, expected):
    """Templates of reasoning models open the mark in the prompt, so that what is saved has only
    the closing one, and all of it counted as answer."""
    assert split_thinking(text) == expected


def test_what_was_thought_is_in_no_export_list_or_tree() -> None:
    """Exports, lists and trees used to tell the thinking of models whose prompt opens its mark."""
    conversation = _conversation()
    tree = [row.plain for row in tree_rows(conversation, RenderContext(_PAINTER, 60), {})]

    assert to_markdown(conversation).endswith("**Assistant:** It is 42.\n")
    assert turn_summary(conversation.turn(2), 60) == "It is 42."
    assert not any("see" in row or "</think>" in row for row in tree)


def test_a_saved_answer_looks_as_it_did_when_it_came() -> None:
    """A saved answer whose prompt opened the mark was shown as an answer with `</think>` in it."""
    rows = answer_rows(_conversation().turn(2), _view())

    shown = [row.plain.strip() for row in rows if row.plain.strip()]
    assert shown == ["Thinking:", "Well, let me see.", "Answer:", "It is 42."]


@pytest.mark.parametrize("said", ["Well, let me", "<think>Well, let me"])
def test_thinking_that_is_continued_goes_on_in_its_row(said: str) -> None:
    """Thinking cut off before its end was taken for an answer where the prompt had opened the
    mark, and went on below a gap and a new heading."""
    view = AnswerView(_view(), lambda: None, stats_level=StatsLevel.OFF, said_before=said)

    rows = view.take([AnswerText(0, " see.", is_thinking=True), AnswerText(0, "It is 42.\n\n")])

    assert [row.plain for row in rows] == ["Well, let me see.", "", "Answer:", "It is 42."]


def test_an_answer_that_is_continued_goes_on_in_its_row() -> None:
    """Of an answer whose prompt had opened the mark the thinking was shown again as answer."""
    view = AnswerView(_view(), lambda: None, stats_level=StatsLevel.OFF, said_before=_SAVED)

    rows = view.take([AnswerText(0, " Really.\n\n")])

    assert [row.plain for row in rows] == ["It is 42. Really."]
