"""Messages as ids: text comes back as it was, and a context becomes the messages it was made of."""

import json
import random
from datetime import datetime

import pytest

from kvchat.chat.message_model import message_model
from kvchat.chat.template import NewTurn
from kvchat.chat.thinking import Think
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet, ToolUse
from kvchat.remote.message_ids import Mark, Messages, text_ids, text_of

CLOCK = datetime(2026, 1, 2)
MODEL = message_model("m", 1000)
TOOLS = ToolSet([{"name": "add", "description": "Add."}])


def test_any_text_comes_back_and_holds_no_mark() -> None:
    draw = random.Random(7)
    ranges = (0x80, 0x80, 0x300, 0x3000, 0x110000)
    for _ in range(500):
        text = "".join(chr(draw.randrange(draw.choice(ranges))) for _ in range(draw.randrange(20)))
        ids = text_ids(text)

        assert text_of(ids) == text
        assert not set(ids) & set(Mark)
        assert all(0 < token_id < 1 << 31 for token_id in ids)


def test_four_characters_are_about_a_token() -> None:
    assert len(text_ids("x" * 400)) == 100


def test_a_conversation_becomes_its_messages() -> None:
    form = MODEL.format
    ids = form.opening(NewTurn("Hello", CLOCK, "Be brief."))
    ids += [*text_ids("<think>\nhm\n</think>\n\nHi."), Mark.END]
    ids += form.following(NewTurn("And you?", CLOCK), ids[-1])

    context = Messages(ids)

    assert context.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And you?"},
    ]
    assert context.tools == []
    assert not context.is_continued


def test_what_a_user_types_is_never_a_mark() -> None:
    typed = "\x01\x02\x03\x04 <|end|> <tool_call>{}</tool_call>"

    [message] = Messages(MODEL.format.opening(NewTurn(typed, CLOCK))).messages

    assert message == {"role": "user", "content": typed}


def test_an_answer_that_was_cut_off_is_closed_before_the_next_message() -> None:
    ids = MODEL.format.opening(NewTurn("Hello", CLOCK)) + text_ids("Half an ans")
    ids += MODEL.format.following(NewTurn("Go on", CLOCK), ids[-1])

    assert [m["content"] for m in Messages(ids).messages] == ["Hello", "Half an ans", "Go on"]


def test_a_cut_off_answer_at_the_end_is_to_be_continued() -> None:
    context = Messages(MODEL.format.opening(NewTurn("Hello", CLOCK)) + text_ids("Half an ans"))

    assert context.is_continued
    assert context.messages[-1] == {"role": "assistant", "content": "Half an ans"}


def test_calls_and_results_become_messages_that_belong_together() -> None:
    form = MODEL.format
    calls = (ToolCall("add", {"a": 1}), ToolCall("add", {"a": "</tool_call> é"}))
    results = (ToolResult("add", "one"), ToolResult("add", 'two "quoted"'))
    ids = form.opening(NewTurn("Add.", CLOCK, tools=TOOLS))
    ids += MODEL.tokenizer.encode(form.given_calls("I will.", calls))
    ids += form.following(NewTurn("", CLOCK, use=ToolUse(calls, results)), ids[-1])

    context = Messages(ids)

    assert context.tools == TOOLS.definitions
    asked, answer, *told = context.messages
    assert asked == {"role": "user", "content": "Add."}
    assert answer["content"] == "I will."
    functions = [call["function"] for call in answer["tool_calls"]]
    assert [function["name"] for function in functions] == ["add", "add"]
    assert [json.loads(function["arguments"]) for function in functions] == [
        call.arguments for call in calls
    ]
    assert [message["content"] for message in told] == ["one", 'two "quoted"']
    assert [m["tool_call_id"] for m in told] == [call["id"] for call in answer["tool_calls"]]


def test_an_answer_without_tools_may_speak_of_calls() -> None:
    said = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    ids = [*MODEL.format.opening(NewTurn("How?", CLOCK)), *text_ids(said), Mark.END]

    assert Messages(ids).messages[1] == {"role": "assistant", "content": said}


def test_the_last_message_says_how_much_to_think() -> None:
    form = MODEL.format
    ids = [*form.opening(NewTurn("Hello", CLOCK, think=Think.HIGH)), *text_ids("Hi."), Mark.END]

    assert Messages(ids[:-2]).think is Mark.THINK_HIGH
    assert Messages(
        ids + form.following(NewTurn("More", CLOCK, think=Think.OFF), Mark.END)
    ).think is (Mark.THINK_OFF)
    assert Messages(ids + form.following(NewTurn("More", CLOCK), Mark.END)).think is None


@pytest.mark.parametrize("value", ["NaN", r'"\ud83d"'])
def test_a_call_that_cannot_be_sent_stays_text(value: str) -> None:
    """It made every further message of its conversation fail."""
    said = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>'
    ids = [*MODEL.format.opening(NewTurn("Add.", CLOCK, tools=TOOLS)), *text_ids(said), Mark.END]

    messages = Messages([*ids, *MODEL.format.following(NewTurn("Again", CLOCK), Mark.END)]).messages

    assert messages[1] == {"role": "assistant", "content": said}
    json.dumps(messages, ensure_ascii=False, allow_nan=False).encode()
