"""Conversations as documents, and documents as conversations."""

import json
from dataclasses import replace

import pytest

from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.documents import read_messages, to_json, to_markdown, to_messages
from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason
from support.turns import branching_conversation, turn


def test_the_path_to_the_tip_is_what_is_written() -> None:
    conversation = branching_conversation()

    assert to_messages(conversation) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first\nquestion"},
        {"role": "assistant", "content": "text of 2"},
        {"role": "user", "content": "text of 3"},
    ]
    assert json.loads(to_json(conversation))["messages"] == to_messages(conversation)


def test_markdown_leaves_thinking_out_and_says_what_was_cut_off() -> None:
    conversation = Conversation("id", 0.0)
    conversation.add(turn(1, text="Why?"))
    thought = "<think>\nhm\n</think>\n\nBecause"
    conversation.add(turn(2, 1, Role.ASSISTANT, thought, finish=FinishReason.LENGTH))

    text = to_markdown(conversation)

    assert text == "# Why?\n\n**You:** Why?\n\n**Assistant:** Because\n\n*(cut off)*\n"


def test_messages_are_read_back_as_they_were_written() -> None:
    conversation = branching_conversation()

    system, turns = read_messages(to_json(conversation))

    assert system == "Be brief."
    assert turns == [(t.role, t.text) for t in conversation.path()]
    assert read_messages(json.dumps(to_messages(conversation))) == (system, turns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a session nor JSON"),
        ("[" * 100_000, "neither a session nor JSON"),
        ("{}", "no list of messages"),
        ("5", "no list of messages"),
        ('{"messages": {}}', "no list of messages"),
        ("[5]", "Message 1 has no text"),
        ('[{"role": "user"}]', "Message 1 has no text"),
        ('[{"role": "user", "content": ["x"]}]', "Message 1 has no text"),
        ('[{"role": "bot", "content": "x"}]', "Message 1 has the role 'bot'"),
        (
            '[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]',
            "Message 2 has the role 'system'",
        ),
        ('[{"content": "x"}]', "Message 1 has the role None"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_list_of_messages_is_told(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_messages(text)


@pytest.mark.parametrize("has_system", [True, False])
def test_messages_that_begin_with_an_answer_are_refused(has_system: bool) -> None:
    """The context that was made of them had no beginning, and the system prompt was left out."""
    messages = [{"role": "system", "content": "Be brief."}] if has_system else []
    messages += [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Hello"}]

    with pytest.raises(UsageError, match=f"Message {1 + has_system} is the assistant's"):
        read_messages(json.dumps(messages))


def test_tool_calls_and_results_stand_in_blocks_of_their_own_in_markdown() -> None:
    """A result stood behind "You:", and its Markdown became part of the document's."""
    conversation = Conversation("20260101-000000-abcd", 0.0)
    call = ToolCall("read_file", {"path": "a.md"})
    result = ToolResult("read_file", "# Title\n```\nx\n```\n")
    turns = (
        (Role.USER, "Read a.md.", (), ()),
        (Role.ASSISTANT, "Let me see.", (call,), ()),
        (Role.USER, "", (), (result,)),
        (Role.ASSISTANT, "It is short.", (), ()),
    )
    for number, (role, text, calls, results) in enumerate(turns, start=1):
        finish = FinishReason.STOP if role is Role.ASSISTANT else None
        turn = Turn(number, number - 1, role, text, (number,), "", 0.0, finish=finish)
        conversation.add(replace(turn, calls=calls, results=results))

    text = to_markdown(conversation)

    assert text.partition("\n\n")[2] == (
        "**You:** Read a.md.\n\n"
        "**Assistant:** Let me see.\n\nCalls read_file:\n\n"
        '```\n{"path": "a.md"}\n```\n\n\n'
        "**Result of read_file:**\n\n````\n# Title\n```\nx\n```\n````\n\n"
        "**Assistant:** It is short.\n"
    )
