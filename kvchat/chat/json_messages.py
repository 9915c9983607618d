"""Conversations as JSON messages, in the form of OpenAI's chat completions; reads them again.

A document is a list of messages, or an object with `messages` and perhaps `tools`. An answer that
calls tools has `tool_calls`; a message of the role "tool" holds what one of these calls returned.
"""

import json
from dataclasses import dataclass
from typing import Any

from kvchat.chat.chat_messages import add_messages
from kvchat.chat.compaction import whole_path
from kvchat.chat.conversation import Conversation, Turn
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.resent_chat import Message
from kvchat.chat.tools import ToolSet
from kvchat.core.errors import UsageError

_TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """A document that was read: the system prompt or None, the turns in order, the tools."""

    system: str | None
    turns: tuple[Message, ...]
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


def read_document(text: str) -> ChatDocument:
    """Read a JSON document; raises UsageError for anything else.

    Its answers may call tools without a result: a chat can be left before the call has run.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "The file is neither a session nor JSON messages.",
            "Export as json or jsonl to import again.",
        ) from error
    fields = Fields(content if isinstance(content, dict) else {"messages": content})
    if not isinstance(fields.raw("messages"), list):
        raise UsageError("The file has no list of messages.")
    chat = IncomingChat(needs_results=False)
    _require_texts(fields.objects_if_any("messages"))
    if fields.raw("messages"):
        add_messages(chat, fields)
    return ChatDocument(chat.system or None, chat.turns(), read_tools(fields))


def _require_texts(messages: list[Fields]) -> None:
    """Raise UsageError unless the first message is the user's, and all of the user's say something.

    A request is answered without; a document would be one with a gap for ever.
    """
    said = [each for each in messages if each.raw("role") not in ("system", "developer")]
    if said and said[0].raw("role") == "assistant":
        raise said[0].fault("role", "is assistant, but the first message has to be the user's")
    for message in said:
        if message.raw("role") == "user" and "content" not in message:
            raise message.fault("content", "is missing")


def read_tools(fields: Fields) -> ToolSet | None:
    """Return the functions that a body offers, None without any; raises UsageError."""
    functions = [tool.nested("function") for tool in fields.objects_if_any("tools")]
    for function in functions:
        if not function.text("name"):
            raise function.fault("name", "is missing")
    return ToolSet(function.values for function in functions) if functions else None
