"""Requests of `--input-format jsonl`: a line is the body of a chat completion, or has a `prompt`.

`cli/batch.py` answers the requests.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from kvchat.chat.answer_settings import AskOptions, with_values
from kvchat.chat.chat_messages import add_messages
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.json_messages import read_tools
from kvchat.chat.resent_chat import ResentChat
from kvchat.core.errors import KvchatError, UsageError
from kvchat.core.parameters import BY_NAME, OF_ANSWERS
from kvchat.core.sizes import shown

_FIELDS = ("id", "prompt", "messages", "tools", "system", *(each.name for each in OF_ANSWERS))


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
    except UsageError as error:
        raise UsageError(f"Line {line} of the input: {error.message}", error.hint) from error
    if "system" in content:
        chat, has_system = replace(chat, system=_system(content, line)), True
    return JsonRequest(
        label=label_of(content, line),
        chat=chat,
        has_system=has_system,
        values={
            p.name: p.checked(content[p.name], f"{p.name} of line {line}")
            for p in OF_ANSWERS
            if content.get(p.name) is not None
        },
    )


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
