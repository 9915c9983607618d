"""Conversations as documents, and documents as conversations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.documents import import_file, saved_document, to_markdown
from kvchat.chat.json_requests import ChatDocument, read_document, to_json, to_messages
from kvchat.chat.resent_chat import Message
from kvchat.chat.session_file import turn_line, waiting_line
from kvchat.chat.store import SessionStore, new_session_id
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
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

    given = read_document(to_json(conversation))

    assert given.system == "Be brief."
    assert [(t.role, t.text) for t in given.turns] == [
        (t.role, t.text) for t in conversation.path()
    ]
    assert read_document(json.dumps(to_messages(conversation))) == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a session nor JSON"),
        ("[" * 100_000, "neither a session nor JSON"),
        ("{}", "no list of messages"),
        ("5", "no list of messages"),
        ('{"messages": {}}', "no list of messages"),
        ("[5]", r"messages\[0\].* must be an object"),
        ('[{"role": "user"}]', r"messages\[0\]\.content is missing"),
        ('[{"role": "user", "content": ["x"]}]', r"messages\[0\]\.content\[0\] must be an obj"),
        ('[{"role": "bot", "content": "x"}]', r"messages\[0\]\.role is 'bot', but must be sys"),
        ('[{"content": "x"}]', r"messages\[0\]\.role must be system, dev"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_list_of_messages_is_told(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_document(text)


@pytest.mark.parametrize("has_system", [True, False])
def test_messages_that_begin_with_an_answer_are_refused(has_system: bool) -> None:
    """The context that was made of them had no beginning, and the system prompt was left out."""
    messages = [{"role": "system", "content": "Be brief."}] if has_system else []
    messages += [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Hello"}]

    with pytest.raises(UsageError, match=rf"messages\[{int(has_system)}\]\.role is assistant"):
        read_document(json.dumps(messages))


def _with_calls() -> Conversation:
    """A call, its result, and the answer to it."""
    tools = ToolSet([{"name": "read_file"}, {"name": "echo", "description": "Say it again."}])
    conversation = Conversation("20260101-000000-abcd", 0.0, tools=tools)
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
    return conversation


def test_tool_calls_and_results_stand_in_blocks_of_their_own_in_markdown() -> None:
    """A result stood behind "You:", and its Markdown became part of the document's."""
    conversation = _with_calls()

    text = to_markdown(conversation)

    assert text.partition("\n\n")[2] == (
        "**You:** Read a.md.\n\n"
        "**Assistant:** Let me see.\n\nCalls read_file:\n\n"
        '```\n{"path": "a.md"}\n```\n\n\n'
        "**Result of read_file:**\n\n````\n# Title\n```\nx\n```\n````\n\n"
        "**Assistant:** It is short.\n"
    )


def test_tool_calls_and_results_are_read_back_as_such(tmp_path: Path) -> None:
    """They came back as text: "Calls read_file with ...", which the model then wrote itself."""
    original = _with_calls()
    path = tmp_path / "calls.json"
    path.write_text(to_json(original))
    store = SessionStore(tmp_path / "store")

    copied = store.read(import_file(store, path)).conversation

    assert [(t.role, t.text, t.calls, t.results) for t in copied.path()] == [
        (t.role, t.text, t.calls, t.results) for t in original.path()
    ]
    assert original.tools is not None
    assert copied.tools is not None
    assert copied.tools.text == original.tools.text
    assert to_json(copied) == to_json(original)


def test_calls_have_the_form_of_openais_chat_completions() -> None:
    messages = to_messages(_with_calls())

    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    [call] = messages[1]["tool_calls"]
    assert call["function"] == {"name": "read_file", "arguments": '{"path": "a.md"}'}
    assert messages[2]["tool_call_id"] == call["id"]


def _read(messages: list[dict[str, Any]], tools: object = None) -> ChatDocument:
    return read_document(json.dumps({"messages": messages, "tools": tools}))


def test_results_before_a_users_text_are_of_its_turn_and_null_is_no_text() -> None:
    functions = [{"name": "a", "arguments": "{}"}, {"name": "b", "arguments": ""}]
    calls = [{"id": str(n), "function": each} for n, each in enumerate(functions)]
    given = _read(
        [
            {"role": "user", "content": "Do both."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "0", "content": "one"},
            {"role": "tool", "tool_call_id": "1", "content": "two"},
            {"role": "user", "content": "And?"},
        ]
    )

    results = (ToolResult("a", "one"), ToolResult("b", "two"))
    assert given.turns[1].text == ""
    assert given.turns[1].calls == (ToolCall("a", {}), ToolCall("b", {}))
    assert given.turns[2:] == (Message(Role.USER, "And?", results=results),)


@pytest.mark.parametrize(
    "calls", [5, [5], [{}], [{"id": "1", "function": {"name": 5, "arguments": "{}"}}]]
)
def test_a_call_that_cannot_be_read_is_named_by_its_message(calls: object) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": calls},
    ]
    with pytest.raises(UsageError, match=r"messages\[1\]\.tool_calls"):
        _read(messages)


def test_arguments_that_were_cut_off_are_read_as_a_text() -> None:
    """A document could not be imported for one call that its model had written badly."""
    calls = [
        {"id": "1", "function": {"name": "a", "arguments": text}} for text in ('{"q": ', "[1]")
    ]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "1", "content": "two"},
    ]

    given = _read(messages)

    assert [list(call.arguments.values()) for call in given.turns[1].calls] == [['{"q": '], ["[1]"]]
    assert [result.text for result in given.turns[2].results] == ["one", "two"]


def test_a_result_of_no_call_and_odd_tools_are_refused() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "y"}
    with pytest.raises(UsageError, match=r"messages\[1\]\.tool_call_id names no call"):
        _read([{"role": "user", "content": "x"}, result])
    for tools in (5, [5], [{}], [{"function": {"name": 5}}]):
        with pytest.raises(UsageError, match=r"^tools"):
            _read([{"role": "user", "content": "x"}], tools)


def test_what_was_typed_ahead_is_in_no_exported_file(tmp_path: Path) -> None:
    """A message that was taken back before it was sent stood in the file that was given away."""
    store, session_id = SessionStore(tmp_path), new_session_id()
    log = store.create(Conversation(session_id, 1.0), "demo")
    for line in (waiting_line(["a secret"]), waiting_line([]), turn_line(turn(1, text="hello"))):
        log.write(line)

    text = saved_document(store, session_id)
    assert "hello" in text
    assert "waiting" not in text
    assert b"a secret" in store.read_bytes(session_id)
