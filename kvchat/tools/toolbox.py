"""Toolbox: the tools of a chat, what the user allows, and how a call becomes a result.

A call never raises: what went wrong is the result that the model reads.
"""

import json
import logging
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvchat.chat.tools import ToolCall, ToolResult, ToolSet, is_too_deep
from kvchat.core.text import exact_line, one_line, sanitize

MOST_RESULT_CHARS = 16_000
# A definition stands in every context; longer ones leave no room for a conversation.
_MOST_NAME_CHARS, _MOST_DEFINITION_BYTES = 128, 64_000
_log = logging.getLogger(__name__)


class ToolFailed(Exception):
    """A tool did not do what was asked; the message tells the model why, in a sentence."""


class Tool(Protocol):
    """One tool. `run` is called on a thread of its own."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""

    @property
    def is_allowed_by_call(self) -> bool:
        """Whether "always" allows the same call again only, and no other one of this tool.

        A name says nothing of what a shell command does.
        """

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        """Do it and return what the model reads; ends soon after `stop` is set.

        Raises ToolFailed, or anything else for arguments of a wrong kind.
        """


def schema_of(required: tuple[str, ...], **properties: tuple[str, str]) -> dict[str, Any]:
    """Return the JSON schema of arguments, each given as its type and what it means."""
    described = {
        name: {"type": kind, "description": meaning} for name, (kind, meaning) in properties.items()
    }
    return {"type": "object", "properties": described, "required": list(required)}


@dataclass(slots=True)
class Permissions:
    """What the user allows without a question: tools by their names, and single calls by `key`."""

    always: set[str]
    never: set[str]
    calls: dict[str, ToolCall] = field(default_factory=dict)

    def of_call(self, call: ToolCall) -> bool | None:
        """Return whether a call may run; None if the user has to be asked."""
        allowed = self.of(call.name)
        return True if allowed is None and call.key in self.calls else allowed

    def of(self, name: str) -> bool | None:
        """Return whether a tool may run; None if the user has to be asked."""
        if name in self.never:
            return False
        return True if name in self.always else None

    def allowed_calls(self, name: str) -> list[ToolCall]:
        """Return the calls of a tool that run without a question although others of it do not."""
        return [c for c in self.calls.values() if c.name == name and self.of(name) is None]

    def forget_calls(self, name: str) -> None:
        """Ask again about all calls of a tool that were allowed one by one."""
        self.calls = {key: call for key, call in self.calls.items() if call.name != name}


class LateTools(Protocol):
    """Tools that take a while to start, such as those of other programs."""

    def when_started(self, tell: Callable[[], None]) -> None:
        """Call `tell` once all have started or failed, on any thread; at once if they have."""

    def wait(self) -> tuple[list[Tool], tuple[str, ...]]:
        """Wait for them; return the tools, and sentences on those that are not there."""

    def close(self) -> None:
        """End them, started or not. Idempotent."""


class Toolbox:
    """The tools in the order in which they are offered; `late` ones join them once they start.

    `problems` are sentences on tools that are not there. The box owns `late`.
    """

    def __init__(
        self, tools: Sequence[Tool], allowed: Collection[str] = (), late: LateTools | None = None
    ) -> None:
        self._by_name = {tool.name: tool for tool in tools}
        self.permissions = Permissions(set(allowed), set())
        self.problems: tuple[str, ...] = ()
        self._late = late
        self.is_complete = late is None

    def when_complete(self, tell: Callable[[], None]) -> None:
        """Call `tell` once `complete` does not wait; on any thread, at once if that is now."""
        if self._late is None:
            tell()
        else:
            self._late.when_started(tell)

    def complete(self) -> None:
        """Wait for the late tools, and offer them too. Idempotent."""
        if self._late is None or self.is_complete:
            return
        tools, problems = self._late.wait()
        self.problems = (*problems, *filter(None, map(self._add, tools)))
        self.is_complete = True

    def _add(self, tool: Tool) -> str:
        """Offer a tool, or return a sentence on why not.

        A permission is given to a name, so that no second tool may take a name that there is.
        """
        if tool.name in self._by_name:
            return f"There are two tools {one_line(tool.name, 80)}; the first is offered."
        about = [tool.name, tool.description, tool.parameters]
        try:
            written = json.dumps(about, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):  # NaN, or half of a character
            return f"The tool {one_line(tool.name, 80)} is not offered: its definition is not JSON."
        if is_too_deep(tool.parameters):
            return f"The tool {one_line(tool.name, 80)} is not offered: its schema is too deep."
        if len(tool.name) > _MOST_NAME_CHARS or len(written) > _MOST_DEFINITION_BYTES:
            return f"The tool {one_line(tool.name, 80)} is not offered: its definition is too long."
        self._by_name[tool.name] = tool
        return ""

    def close(self) -> None:
        if self._late is not None:
            self._late.close()

    @property
    def definitions(self) -> ToolSet:
        return ToolSet(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in self._by_name.values()
        )

    @property
    def tools(self) -> list[Tool]:
        return list(self._by_name.values())

    def has(self, name: str) -> bool:
        return name in self._by_name

    def is_allowed_by_call(self, name: str) -> bool:
        """Whether `allow` of a call of this tool allows that call only."""
        return name in self._by_name and self._by_name[name].is_allowed_by_call

    def allow(self, call: ToolCall) -> None:
        """Ask no more about this tool; of one whose calls are allowed one by one, this call."""
        if self.is_allowed_by_call(call.name):
            self.permissions.calls[call.key] = call
        else:
            self.permissions.always.add(call.name)

    def run(self, call: ToolCall, stop: threading.Event) -> ToolResult:
        """Run a call that the user allows, and return its result, cut and sanitised."""
        tool = self._by_name.get(call.name)
        if tool is None:
            known = ", ".join(self._by_name) or "none"
            return ToolResult(call.name, f"Error: there is no such tool. There are: {known}.")
        try:
            text = sanitize(tool.run(call.arguments, stop))
        except ToolFailed as error:
            text = sanitize(f"Error: {error}")
        except Exception as error:  # whatever it is, the turn goes on: the model reads it
            # Without the message, which may hold text of the conversation.
            where = "".join(traceback.format_tb(error.__traceback__))
            _log.info("the tool %s failed: %s\n%s", call.name, type(error).__name__, where)
            text = f"Error: {type(error).__name__}: {one_line(str(error), 200)}"
        return ToolResult(call.name, cut(text) or "(nothing)")


def refused(call: ToolCall) -> ToolResult:
    """Return the result of a call that the user does not allow."""
    return ToolResult(call.name, "Error: the user does not allow this call.")


def cut(text: str, most: int = MOST_RESULT_CHARS) -> str:
    """Return a text with at most `most` characters: what is left out is in the middle."""
    if len(text) <= most:
        return text
    half = most // 2
    left_out = f"\n[{len(text) - 2 * half:,} characters left out]\n"
    return text[:half] + left_out + text[-half:]


def call_in_words(call: ToolCall, max_chars: int = 200) -> str:
    """Return a call as one safe line: its name and its arguments."""
    return one_line(_call(call), max_chars)


def call_in_full(call: ToolCall) -> str:
    """Return a call as one safe line from which nothing is missing: what the user allows."""
    return exact_line(_call(call))


def _call(call: ToolCall) -> str:
    parts = (f"{name}={json.dumps(v, ensure_ascii=False)}" for name, v in call.arguments.items())
    return f"{call.name}({', '.join(parts)})"
