"""ToolForm: how one chat template writes tools, a model's calls and the results of calls.

The form is found by rendering a conversation with one call whose parts are placeholders. A template
takes tools if it writes the definition and the result, and if the call can be read back.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvchat.chat.thinking import split_thinking
from kvchat.chat.tool_calls import (
    CALL_FORMATS,
    CALL_TOKENS,
    CallFormat,
    CallSplitter,
    TextBesideCalls,
)
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.errors import ModelError

if TYPE_CHECKING:
    from kvchat.chat.tokenizer import ChatTokenizer

# Sets of roles whose content a template may want as a list of parts, the commonest first.
PART_ROLES: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"system", "user", "assistant", "tool"}),
    frozenset({"user"}),
    frozenset({"assistant"}),
)
# A list of parts that was written as a value instead of read part by part.
_WRITTEN_PARTS = ("'type': 'text'", '"type": "text"')
# White space that a template may name in `strip`. Without names `strip` and `trim` take all kinds.
_NAMED_SPACES = " \n\t\r\v\f"
_UNNAMED_SPACE = "\N{IDEOGRAPHIC SPACE}"


def with_parts(
    messages: Sequence[Mapping[str, Any]], roles: Collection[str]
) -> list[Mapping[str, Any]]:
    """Return messages in which the texts of these roles are lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in roles
        else message
        for message in messages
    ]


def writes_parts(rendered: str) -> bool:
    """Return whether a template wrote a list of parts as it is, in place of the text in it."""
    return any(written in rendered for written in _WRITTEN_PARTS)


@dataclass(frozen=True, slots=True)
class Spaces:
    """The white space characters that a template strips at each end of a message."""

    leading: str = ""
    trailing: str = ""

    def strip(self, text: str) -> str:
        return text.lstrip(self.leading).rstrip(self.trailing)


NO_SPACES = Spaces()


def find_spaces(render: Callable[[str], str], text: str) -> Spaces:
    """Find the white space that a template strips from a message.

    `render` renders a message; `text` is one that stands nowhere else in the template's text.
    """
    leading = trailing = ""
    for space in (_UNNAMED_SPACE, *_NAMED_SPACES):
        run = 4 * space  # longer than any white space a template itself puts there
        rendered = render(f"{run}{text}{run}")
        leading += "" if f"{run}{text}" in rendered else space
        trailing += "" if f"{text}{run}" in rendered else space
        if leading == trailing == _UNNAMED_SPACE:
            break
    return Spaces(_all_kinds(leading), _all_kinds(trailing))


def _all_kinds(spaces: str) -> str:
    """Return all that Python's `str.strip` removes, and so Jinja's `trim`, for the unnamed space.

    No white space has a higher number.
    """
    if _UNNAMED_SPACE not in spaces:
        return spaces
    return "".join(filter(str.isspace, map(chr, range(ord(_UNNAMED_SPACE) + 1))))


_TOOL = "kv7_tool_stands_here"
_ARGUMENT = "kv7_argument_stands_here"
_VALUE = "Kv7Value3Stands9Here"
_RESULT = "Kv7Result3Stands9Here"
_MEANING = "Kv7Meaning3Stands9Here"
_USER = "Kv7Caller3Stands9Here"
_RESERVED = "Kv7Reserved3Stands9Here"
_PROBE_CALL = ToolCall(_TOOL, {_ARGUMENT: _VALUE})
_SCHEMA = {"type": "object", "properties": {_ARGUMENT: {"type": "string", "description": "x"}}}
_PROBE_TOOLS = ToolSet([{"name": _TOOL, "description": _MEANING, "parameters": _SCHEMA}])


class Render(Protocol):
    """Renders messages at the time of the probe, with `is_open` up to the next answer's start."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        is_open: bool = True,
    ) -> str: ...


class StandIns:
    """Replaces what a template must not read as its own text by placeholders.

    `texts` are what the placeholders stand for.
    """

    def __init__(self, reserved: re.Pattern[str]) -> None:
        self._reserved = reserved
        self.texts: dict[str, str] = {}

    def whole(self, name: str, text: str) -> str:
        """Return a placeholder for a text."""
        stand_in = f"{name}x{len(self.texts)}x"
        self.texts[stand_in] = text
        return stand_in

    def guarded(self, value: Any) -> Any:
        """Return a value of JSON in which the texts of reserved tokens are placeholders."""
        if isinstance(value, str):
            return self._reserved.sub(lambda match: self.whole(_RESERVED, match[0]), value)
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(item) for item in value]
        return value


@dataclass(frozen=True, slots=True)
class ToolForm:
    """What a template writes around calls and results.

    calls                how the model writes calls
    has_text_arguments   whether the template takes a call's arguments as JSON text
    escapes_results      whether it writes results as JSON texts
    closing              the token's text that ends an answer with calls; empty if none does
    spaces               the white space that it strips from results
    """

    calls: CallFormat
    has_text_arguments: bool
    escapes_results: bool
    closing: str
    spaces: Spaces = NO_SPACES

    def answer(
        self, text: str, calls: Sequence[ToolCall], stand_ins: StandIns
    ) -> dict[str, object]:
        """Return the message of an answer with calls, as the template takes it."""
        return _answer(text, calls, self.has_text_arguments, stand_ins)

    def results(self, results: Sequence[ToolResult], stand_ins: StandIns) -> list[dict[str, Any]]:
        """Return the messages of results, as the template takes them."""
        stripped = (self.spaces.strip(result.text) for result in results)
        texts = (_escaped(text) if self.escapes_results else text for text in stripped)
        return [
            _result(number, stand_ins.guarded(result.name), stand_ins.whole(_RESULT, text))
            for number, (result, text) in enumerate(zip(results, texts, strict=True))
        ]

    def asked_calls(self, calls: Sequence[ToolCall], stand_ins: StandIns) -> dict[str, object]:
        """Return an answer with the names of calls; `after` finds where it ends."""
        named = [ToolCall(call.name, {_ARGUMENT: _VALUE}) for call in calls]
        return self.answer("", named, stand_ins)

    def after(self, rendered: str, tokenizer: "ChatTokenizer") -> str:
        """Return what was rendered after the answer of `asked_calls`, from its closing token on."""
        rest = rendered.rpartition(_VALUE)[2]
        return rest[_place_of_closing(rest, self.closing, self.calls, tokenizer) :]


def find_tool_form(
    render: Render, tokenizer: "ChatTokenizer", lead: Sequence[str]
) -> ToolForm | None:
    """Return a template's form of tools, None if it takes none.

    `lead` are the texts that may stand before an answer to `probe_message()`.
    """
    for has_text_arguments in (False, True):
        try:
            form = _form_with(has_text_arguments, render, tokenizer, lead)
        except ModelError:
            continue
        if form is not None:
            return form
    return None


def probe_message() -> dict[str, str]:
    """Return the user's message before the call of the probe."""
    return {"role": "user", "content": _USER}


def _form_with(
    has_text_arguments: bool, render: Render, tokenizer: "ChatTokenizer", lead: Sequence[str]
) -> ToolForm | None:
    asked, tools = probe_message(), _PROBE_TOOLS.definitions
    if _MEANING not in render([asked], tools):
        return None
    called = _answer("", [_PROBE_CALL], has_text_arguments, StandIns(tokenizer.reserved_texts))
    region, closing = cut_answer(render([asked, called], is_open=False), lead, tokenizer)
    read = next((form for form in CALL_FORMATS if _reads(form, region)), None)
    result = _result(0, _TOOL, f'{_RESULT}"{_RESULT}')
    rest = render([asked, called, result]).rpartition(_VALUE)[2]
    if read is None or _RESULT not in rest:
        return None
    spaces = find_spaces(lambda text: render([asked, called, _result(0, _TOOL, text)]), _RESULT)
    escapes = f'{_RESULT}\\"{_RESULT}' in rest
    # Escaped white space stands in other characters, so it would look stripped.
    return ToolForm(read, has_text_arguments, escapes, closing, NO_SPACES if escapes else spaces)


def _reads(form: CallFormat, region: str) -> bool:
    splitter = CallSplitter(form, _PROBE_TOOLS, takes_habits=False)
    found = [*splitter.feed(region), *splitter.flush()]
    texts = "".join(part.text for part in found if isinstance(part, TextBesideCalls))
    calls = [part for part in found if isinstance(part, ToolCall)]
    return calls == [_PROBE_CALL] and not split_thinking(texts)[1].strip()


def cut_answer(rendered: str, leads: Sequence[str], tokenizer: "ChatTokenizer") -> tuple[str, str]:
    """Return the text of the answer at the end of a rendered conversation, and what closes it.

    `leads` are the texts that may stand before it, the first that does counts. The closing token is
    the last one, if it controls the model and does not belong to a call.
    """
    lead = next((lead for lead in leads if rendered.startswith(lead)), "")
    text = rendered[len(lead) :]
    last = list(tokenizer.written(text))[-1:]
    for token_id, begin, end in last:
        token = text[begin:end]
        if tokenizer.is_control(token_id) and token not in CALL_TOKENS and not text[end:].strip():
            return text[:begin], token
    return text, ""


def _place_of_closing(
    rest: str, closing: str, calls: CallFormat, tokenizer: "ChatTokenizer"
) -> int:
    """Return where an answer is closed in the text after its last argument."""
    if closing:
        return rest.index(closing) if closing in rest else 0
    after_calls = rest.find(calls.closer) + len(calls.closer) if calls.closer in rest else 0
    for token_id, begin, _ in tokenizer.written(rest[after_calls:]):
        if tokenizer.is_control(token_id):
            return after_calls + begin
    return after_calls


def _answer(
    text: str, calls: Sequence[ToolCall], has_text_arguments: bool, stand_ins: StandIns
) -> dict[str, object]:
    written = []
    for number, call in enumerate(calls):
        guarded = ToolCall(stand_ins.guarded(call.name), stand_ins.guarded(call.arguments))
        arguments = guarded.arguments_text if has_text_arguments else guarded.arguments
        function = {"name": guarded.name, "arguments": arguments}
        written.append({"id": _call_id(number), "type": "function", "function": function})
    return {"role": "assistant", "content": text, "tool_calls": written}


def _result(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _call_id(number), "name": name, "content": text}


def _call_id(number: int) -> str:
    """Return the id of an answer's call: the same in every rendering; some templates want nine."""
    return f"call{number:05}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
