"""Requests of `--input-format jsonl`: parses one line, and puts its history into a session.

`cli/batch.py` answers the requests.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from kvchat.chat.answer_settings import SAMPLING_KINDS, AskOptions
from kvchat.chat.conversation import Role
from kvchat.chat.json_messages import GivenMessage, parse_messages
from kvchat.chat.session import ChatSession
from kvchat.chat.thinking import parse_think
from kvchat.core.config import shown
from kvchat.core.errors import KvchatError, UsageError

_MOST = 2**63 - 1
_OTHERS = ("id", "prompt", "messages", "system", "seed", "max_tokens", "stop", "think")


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
    sampling: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def options(self, base: AskOptions) -> AskOptions:
        """Return `base` with this request's options; raises UsageError for values out of range."""
        sampling = replace(base.sampling, **self.sampling)
        return replace(base, sampling=sampling, **self.others)

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
        if name not in _OTHERS and name not in SAMPLING_KINDS:
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
        sampling=_sampling(content, line),
        others=_others(content, line),
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
    if not isinstance(value, str | None):
        raise UsageError(f"system of line {line} is {shown(value)}, but must be a text.")
    return value


def _sampling(content: dict[str, Any], line: int) -> dict[str, Any]:
    values = {}
    for name, kind in SAMPLING_KINDS.items():
        if name in content:
            value = content[name]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name} of line {line} is {shown(value)}, but must be a number.")
            values[name] = _as_kind(value, kind, name, line)
    return values


def _as_kind(value: float, kind: type[int] | type[float], name: str, line: int) -> int | float:
    if abs(value) > _MOST or kind(value) != value:
        what = "a whole number" if kind is int else "a number that can be computed with"
        raise UsageError(f"{name} of line {line} is {shown(value)}, but must be {what}.")
    return kind(value)


def _others(content: dict[str, Any], line: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("seed", "max_tokens"):
        if name in content:
            value = content[name]
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or abs(value) > _MOST:
                raise UsageError(
                    f"{name} of line {line} is {shown(value)}, but must be a whole number."
                )
            values[name] = value
    if values.get("max_tokens", 1) < 1:
        raise UsageError(f"max_tokens of line {line} must be 1 or more.")
    if "stop" in content:
        stop = content["stop"]
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise UsageError(f"stop of line {line} must be a text or a list of texts.")
        values["stops"] = tuple(stops)
    if "think" in content:
        try:
            values["think"] = parse_think(str(content["think"]))
        except UsageError as error:
            raise UsageError(f"Line {line} of the input: {error.message}") from error
    return values
