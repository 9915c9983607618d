"""Requests of `--input-format jsonl`: parses one line, and puts its history into a session.

`cli/batch.py` answers the requests.
"""

from dataclasses import dataclass, field
from typing import Any

from kvchat.chat.answer_settings import AskOptions, with_values
from kvchat.chat.conversation import Role
from kvchat.chat.json_messages import GivenMessage, parse_messages
from kvchat.chat.session import ChatSession
from kvchat.core.errors import KvchatError, UsageError
from kvchat.core.parameters import BY_NAME, OF_ANSWERS
from kvchat.core.sizes import shown

_FIELDS = ("id", "prompt", "messages", "system", *(parameter.name for parameter in OF_ANSWERS))


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A parsed request: earlier messages, the prompt to answer, and options that replace flags.

    label        fields that identify the request in every result and error
    has_system   whether the request sets `system`, possibly to None; if not, the flags' system
                 prompt is used
    """

    label: dict[str, object]
    prompt: str
    system: str | None = None
    has_system: bool = False
    history: tuple[GivenMessage, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)

    def options(self, base: AskOptions) -> AskOptions:
        """Return `base` with this request's options."""
        return with_values(base, self.values)

    def recall_history(self, session: ChatSession) -> None:
        """Add the earlier messages to a new session as its turns."""
        for message in self.history:
            if message.role is Role.USER:
                session.add_user_turn(message.text, results=message.results)
            else:
                session.add_answer(message.text, calls=message.calls)


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
    has_prompt, has_messages = "prompt" in content, "messages" in content
    if has_prompt == has_messages:
        raise UsageError(f"Line {line} of the input needs either a prompt or messages.")
    messages = content.get("messages", [{"role": "user", "content": content.get("prompt")}])
    system, history = _messages(messages, line)
    if not history or history[-1].role is not Role.USER:
        raise UsageError(f"Line {line} of the input does not end with a user message.")
    if history[-1].results:
        raise UsageError(f"Line {line} of the input has no answer to the result of its last call.")
    if not history[-1].text.strip():
        raise UsageError(f"The prompt of line {line} is empty.")
    return JsonRequest(
        label=label_of(content, line),
        prompt=history[-1].text,
        system=_system(content, line) if "system" in content else system,
        has_system="system" in content or system is not None,
        history=history[:-1],
        values={
            p.name: p.checked(content[p.name], f"{p.name} of line {line}")
            for p in OF_ANSWERS
            if content.get(p.name) is not None
        },
    )


def _messages(messages: object, line: int) -> tuple[str | None, tuple[GivenMessage, ...]]:
    """Return the system prompt and the user and assistant messages."""
    if not isinstance(messages, list):
        raise UsageError(f"The messages of line {line} are not a list.")
    try:
        given = parse_messages(messages)
    except UsageError as error:
        raise UsageError(f"Line {line} of the input: {error.message}") from error
    return given.system, given.turns


def _system(content: dict[str, Any], line: int) -> str | None:
    value = content["system"]
    return None if value is None else BY_NAME["system"].checked(value, f"system of line {line}")
