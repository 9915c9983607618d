"""Conversations as JSON messages, in the form of OpenAI's chat completions; reads them again.

A document is a list of messages, or an object with `messages` and perhaps `tools`. An answer that
calls tools has `tool_calls`; a message of the role "tool" holds what one of these calls returned.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvchat.chat.compaction import whole_path
from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.open_calls import OpenCalls
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet, read_arguments
from kvchat.core.errors import UsageError
from kvchat.core.sizes import shown

_TOOL = "tool"


@dataclass(frozen=True, slots=True)
class GivenMessage:
    """One turn of a document; `calls` are an answer's, `results` stand before a user's text."""

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenMessages:
    """A document that was read: the system prompt or None, the turns in order, the tools."""

    system: str | None
    turns: tuple[GivenMessage, ...]
    tools: ToolSet | None = None


def to_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the path to the tip as messages, the system prompt first, with what was left out."""
    messages: list[dict[str, Any]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    call_ids: list[str] = []
    for turn in whole_path(conversation):
        results = zip(turn.results, call_ids, strict=False)
        messages += [
            {"role": _TOOL, "tool_call_id": call_id, "name": result.name, "content": result.text}
            for result, call_id in results
        ]
        call_ids = [f"call_{turn.turn_id}_{number}" for number in range(1, len(turn.calls) + 1)]
        if turn.text or turn.calls or not turn.results:
            messages.append(_message(turn, call_ids))
    return messages


def _message(turn: Turn, call_ids: list[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role.value, "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for call, call_id in zip(turn.calls, call_ids, strict=True)
        ]
    return message


def to_json(conversation: Conversation) -> str:
    """Return the messages, and the tools if there are any, as a JSON document."""
    content: dict[str, Any] = {"messages": to_messages(conversation)}
    if conversation.tools is not None:
        content["tools"] = conversation.tools.definitions
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def read_messages(text: str) -> GivenMessages:
    """Read a JSON document; raises UsageError for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "The file is neither a session nor JSON messages.",
            "Export as json or jsonl to import again.",
        ) from error
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list):
        raise UsageError("The file has no list of messages.")
    return parse_messages(messages, content.get("tools") if isinstance(content, dict) else None)


def parse_messages(messages: list[Any], tools: object = None) -> GivenMessages:
    """Read a list of messages and a list of tools; UsageError names the first bad message."""
    reading = _Reading()
    for number, message in enumerate(messages, start=1):
        reading.take(message, number)
    return GivenMessages(reading.system, tuple(reading.ended()), _tools(tools))


@dataclass(slots=True)
class _Reading:
    """What has been read; results wait in `calls` for the message that follows them."""

    system: str | None = None
    turns: list[GivenMessage] = field(default_factory=list)
    calls: OpenCalls = field(default_factory=OpenCalls)

    def take(self, message: object, number: int) -> None:
        """Add one message; raises UsageError for a bad one."""
        fields = message if isinstance(message, dict) else {}
        role, text = fields.get("role"), fields.get("content")
        calls = tuple(_calls(fields, number))
        if calls and role == Role.ASSISTANT.value and text is None:
            text = ""
        if not isinstance(text, str):
            raise UsageError(f"Message {number} has no text.")
        if role == "system" and number == 1:
            self.system = text
        elif role == _TOOL:
            if not self.calls.add_result(str(fields.get("tool_call_id")), text):
                sentence = f"Message {number} is the result of no call in the answer before it."
                raise UsageError(sentence)
        elif role in (Role.USER.value, Role.ASSISTANT.value):
            self._add(Role(role), text, tuple(call for _, call in calls), number)
            for call_id, call in calls:
                self.calls.add(call_id, call)
        else:
            raise UsageError(f"Message {number} has the role {shown(role)}.")

    def _add(self, role: Role, text: str, calls: tuple[ToolCall, ...], number: int) -> None:
        if role is Role.USER:
            self.turns.append(GivenMessage(role, text, results=self._taken()))
            return
        if not self.turns:  # templates require a user message first
            raise UsageError(
                f"Message {number} is the assistant's, but the first has to be the user's."
            )
        self._end_results()
        self.turns.append(GivenMessage(role, text, calls))

    def _taken(self) -> tuple[ToolResult, ...]:
        return tuple(result for _, result in self.calls.take_results())

    def _end_results(self) -> None:
        """Results that no user's text follows are a turn of their own."""
        if results := self._taken():
            self.turns.append(GivenMessage(Role.USER, "", results=results))

    def ended(self) -> list[GivenMessage]:
        """Return all turns, once the last message has been taken."""
        self._end_results()
        return self.turns


def _calls(fields: dict[str, Any], number: int) -> Iterator[tuple[str, ToolCall]]:
    """Yield the calls of a message, each with its id."""
    given = fields.get("tool_calls")
    if given is None:
        return
    try:
        for call in given:
            function = call["function"]
            arguments = read_arguments(function["arguments"])
            if not isinstance(function["name"], str):
                raise TypeError
            yield str(call["id"]), ToolCall(function["name"], arguments)
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"Message {number} has a tool call that cannot be read.",
            "A call has an id, and a function with a name and with arguments as a JSON text.",
        ) from error


def _tools(given: object) -> ToolSet | None:
    """Return the tools of a document, None without any."""
    if given is None or given == []:
        return None
    try:
        if not isinstance(given, list):
            raise TypeError
        functions = [definition["function"] for definition in given]
        if not all(isinstance(function["name"], str) for function in functions):
            raise TypeError
    except (KeyError, TypeError) as error:
        raise UsageError("The tools of the file cannot be read.") from error
    return ToolSet(functions)
