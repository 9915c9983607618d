"""Conversations as JSON messages, and the requests of `--input-format jsonl`: a line is the body
of a chat completion, or has a `prompt`.

`cli/batch.py` answers the requests.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from kvchat.chat.answer_format import answer_format
from kvchat.chat.answer_settings import AskOptions, with_values
from kvchat.chat.compaction import whole_path
from kvchat.chat.conversation import Conversation, Turn
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat, add_messages
from kvchat.chat.resent_chat import Message, ResentChat
from kvchat.chat.tools import ToolSet
from kvchat.core.errors import KvchatError, UsageError
from kvchat.core.parameters import BY_NAME, OF_ANSWERS
from kvchat.core.text import shown

# A document is a list of messages, or an object with `messages` and perhaps `tools`. An answer that
# calls tools has `tool_calls`; a message of the role "tool" holds what one of these calls returned.

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


_FORMAT = "response_format"
_OWN_FIELDS = ("id", "prompt", "messages", "tools", "system", _FORMAT)
_FIELDS = (*_OWN_FIELDS, *(each.name for each in OF_ANSWERS))


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A parsed request: the conversation to answer, and options that replace flags.

    label        fields that identify the request in every result and error
    has_system   whether the request sets the system prompt, possibly to None; if not, the flags'
                 is used
    """

    label: dict[str, object]
    chat: ResentChat
    has_system: bool = False
    values: dict[str, Any] = field(default_factory=dict)

    def options(self, base: AskOptions) -> AskOptions:
        """Return `base` with this request's options."""
        return with_values(base, self.values)


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A line that is not a valid request: the error, and the label for its result."""

    error: KvchatError
    label: dict[str, object] = field(default_factory=dict)


def label_of(content: object, line: int) -> dict[str, object]:
    """Return the fields that identify a request in results: its id, or else its line from 1."""
    request_id = content.get("id") if isinstance(content, dict) else None
    return {"id": request_id} if _is_id(request_id) else {"line": line}


def _is_id(value: object) -> bool:
    """Whether a value can be an id. Nested values are refused: they may be too deep to write."""
    return isinstance(value, str | int | float)


def parse_request(content: object, line: int) -> JsonRequest:
    """Parse one request; raises UsageError that names the line and the problem."""
    if not isinstance(content, dict):
        raise UsageError(f'Line {line} of the input is not a JSON object like {{"prompt": "..."}}.')
    for name in content:
        if name not in _FIELDS:
            raise UsageError(f"Line {line} of the input has an unknown field {shown(name)}.")
    if content.get("id") is not None and not _is_id(content["id"]):
        raise UsageError(f"id of line {line} must be a text or a number.")
    if ("prompt" in content) == ("messages" in content):
        raise UsageError(f"Line {line} of the input needs either a prompt or messages.")
    if "prompt" in content and not isinstance(content["prompt"], str):
        raise UsageError(
            f"prompt of line {line} is {shown(content['prompt'])}, but must be a text."
        )
    try:
        chat, has_system = _chat(Fields(content))
        wanted = answer_format(Fields(content), _FORMAT, ("json_schema", "schema"))
    except UsageError as error:
        raise UsageError(f"Line {line} of the input: {error.message}", error.hint) from error
    if "system" in content:
        chat, has_system = replace(chat, system=_system(content, line)), True
    return JsonRequest(
        label=label_of(content, line),
        chat=chat,
        has_system=has_system,
        values=_values(content, line) | ({"format": json.dumps(wanted.schema)} if wanted else {}),
    )


def _values(content: dict[str, Any], line: int) -> dict[str, Any]:
    """Return the settings of a request's answer, by their names."""
    return {
        p.name: p.checked(content[p.name], f"{p.name} of line {line}")
        for p in OF_ANSWERS
        if content.get(p.name) is not None
    }


def _chat(fields: Fields) -> tuple[ResentChat, bool]:
    """Return the conversation of a request, and whether its messages have the system prompt."""
    chat = IncomingChat()
    if "prompt" in fields:
        chat.ask(fields.text("prompt") or "")
    else:
        add_messages(chat, fields)
    return chat.chat(read_tools(fields)), bool(chat.system)


def _system(content: dict[str, Any], line: int) -> str | None:
    value = content["system"]
    return None if value is None else BY_NAME["system"].checked(value, f"system of line {line}")
