"""Reads the calls of a region of an answer, in the forms in which known templates write them.

A region goes from what begins a call to what ends one. The end may also be written in the value of
an argument: a reader then says that the region is open, and is asked again with more text. A value
is never cut: where a region can be read in two ways, it is no call.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvchat.chat.tools import ToolCall, ToolSet, is_too_deep
from kvchat.core.text import read_json_text


@dataclass(frozen=True, slots=True)
class Reading:
    """The calls in a region; without any it is text.

    is_open   whether the region ends within a call, as far as can be seen. `calls` are then those
              of a region after which no other end comes.
    """

    calls: tuple[ToolCall, ...] = ()
    is_open: bool = False


NO_CALLS = Reading()
Reader = Callable[[str, ToolSet], Reading]


def is_writable(call: ToolCall) -> bool:
    """Whether a call can be written as JSON in UTF-8: NaN and halves of characters cannot.

    What is nested too deeply for a template counts as such too.
    """
    if is_too_deep(call.arguments):
        return False
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


# JSON

_SEPARATORS = " \n\r\t;"


def call_of(value: Any) -> ToolCall | None:
    """Return the call of a JSON object in one of its usual forms."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        value = read_json_text(text, has_raw_controls=True)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def decoded(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `place`, and where it ends.

    Line ends and tabs may stand within its strings. Raises ValueError, or RecursionError.
    """
    return json.JSONDecoder(strict=False).raw_decode(text, place)


def ends_within_string(error: Exception) -> bool:
    """Whether a text was no JSON because it ended within a string."""
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")


def json_calls(text: str) -> Reading:
    """Return the calls of JSON objects, one after another, or in a list."""
    calls, place = [], 0
    while text[place:].strip(_SEPARATORS):
        place = len(text) - len(text[place:].lstrip(_SEPARATORS))
        try:
            value, place = decoded(text, place)
        except (ValueError, RecursionError) as error:
            return Reading(is_open=ends_within_string(error))
        for item in value if isinstance(value, list) else [value]:
            call = call_of(item)
            if call is None:
                return NO_CALLS
            calls.append(call)
    return Reading(tuple(calls))


# Values without quotation marks


class _Values:
    """Finds the ends of values that stand between two tags without quotation marks.

    A value may hold such tags in pairs. Its closing tag is the first outside a pair behind which
    the call can go on.
    """

    def __init__(self, opener: str, closer: str, goes_on: str) -> None:
        """Take three expressions: the tags, and what may follow the closing one."""
        self._tag = re.compile(f"({opener})|{closer}")
        self._goes_on = re.compile(rf"\s*(?:{goes_on}|\Z)")

    def end(self, text: str, start: int) -> tuple[int, int] | None:
        """Return where the value ends that begins at `start`, and its tag; None if neither does."""
        depth = 0
        for tag in self._tag.finditer(text, start):
            if tag[1] is not None:
                depth += 1
            elif depth:
                depth -= 1
            elif self._goes_on.match(text, tag.end()):
                return tag.start(), tag.end()
        return None

    def has_tag(self, text: str) -> bool:
        return self._tag.search(text) is not None


class Elements:
    """Calls as elements, with one element for each argument. Their tags may begin with a mark."""

    def __init__(self, mark: str = "") -> None:
        parameter = f'<{mark}parameter(?:=| name=")[^">]+"?(?: string="(?:true|false)")?>'
        end = f"</{mark}(?:function|invoke)>"
        self.begin = re.compile(f'<{mark}(?:function=|invoke name=")([^"<>\\s]+)"?>')
        self.end = re.compile(end)
        self.parameter = re.compile(
            f'<{mark}parameter(?:=| name=")([^">]+?)"?(?: string="(true|false)")?>'
        )
        self.values = _Values(parameter, f"</{mark}parameter>", f"{parameter}|{end}")

    def read(self, body: str, tools: ToolSet) -> Reading:
        """Return the calls of elements, one after another."""
        calls: list[ToolCall] = []
        place, is_open = _after_space(body, 0), False
        while place < len(body):
            opener = self.begin.match(body, place)
            if opener is None or is_open:
                return NO_CALLS
            one = _OneElement(self, opener[1], tools)
            place = one.read(body, opener.end())
            if one.arguments is None:
                return Reading(is_open=one.is_open)
            calls.append(ToolCall(opener[1], one.arguments))
            is_open = one.is_open
        return Reading(tuple(calls), is_open)


class _OneElement:
    """Reads the arguments of one element; `arguments` is None if they cannot be read."""

    def __init__(self, tags: Elements, name: str, tools: ToolSet) -> None:
        self._tags = tags
        self._name = name
        self._tools = tools
        self.arguments: dict[str, Any] | None = {}
        self.is_open = False

    def read(self, body: str, place: int) -> int:
        """Read from behind the first tag; return the place behind the element."""
        while True:
            place = _after_space(body, place)
            if closer := self._tags.end.match(body, place):
                return _after_space(body, closer.end())
            if place == len(body):  # its closing tag is missing, or the region ends in a value
                self.is_open = True
                return place
            opener = self._tags.parameter.match(body, place)
            if opener is None:
                self.arguments = None
                return place
            place = self._argument(body, opener)
            if self.arguments is None or self.is_open:
                return place

    def _argument(self, body: str, opener: re.Match[str]) -> int:
        end = self._tags.values.end(body, opener.end())
        if end is None:
            self.is_open = True
            return self._unclosed(body, opener)
        self._keep(opener, body[opener.end() : end[0]])
        return end[1]

    def _unclosed(self, body: str, opener: re.Match[str]) -> int:
        """Take a value whose closing tag is missing, if the element ends behind it."""
        closer = self._tags.end.search(body, opener.end())
        value = body[opener.end() : closer.start()] if closer is not None else ""
        if closer is None or body[closer.end() :].strip() or self._tags.values.has_tag(value):
            self.arguments = None
        else:
            self._keep(opener, value)
        return len(body)

    def _keep(self, opener: re.Match[str], value: str) -> None:
        name, string = opener.groups()
        if self.arguments is None or name in self.arguments:  # perhaps a value that holds tags
            self.arguments = None
            return
        value = value.removeprefix("\n").removesuffix("\n")
        is_text = string == "true"
        read = value if is_text else self._tools.unquoted_value(self._name, name, value)
        self.arguments[name] = read


_NAME = re.compile(r"\s*([\w.\-]+)\s*")
_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.S)
_PAIR_VALUES = _Values("<arg_value>", "</arg_value>", "<arg_key>")


def pair_call(body: str, tools: ToolSet) -> Reading:
    """Return the call of a name followed by pairs of keys and values."""
    name = _NAME.match(body)
    if name is None:
        return NO_CALLS
    arguments: dict[str, Any] = {}
    place = name.end()
    while body[place:].strip():
        key = _KEY.match(body, place)
        if key is None or key[1] in arguments:
            return NO_CALLS
        end = _PAIR_VALUES.end(body, key.end())
        if end is None:
            return Reading(is_open=True)
        arguments[key[1]] = tools.unquoted_value(name[1], key[1], body[key.end() : end[0]])
        place = end[1]
    return Reading((ToolCall(name[1], arguments),))


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


# Other forms

QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"([\w.\-]+)\s*:")
_BRACED_CALL = re.compile(r"\s*call:([\w.\-]+)(\{.*\})\s*", re.S)


def braced_call(body: str) -> Reading:
    """Return a call in braces, with bare keys and a token of its own as quotation mark."""
    if body.count(QUOTE) % 2:
        return Reading(is_open=True)
    match = _BRACED_CALL.fullmatch(body)
    if match is None:
        return NO_CALLS
    parts = match[2].split(QUOTE)
    parts[::2] = [_BARE_KEY.sub(r'"\1":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    arguments = _arguments("".join(parts))
    return _one(match[1], arguments)


def python_calls(body: str) -> Reading:
    """Return the calls of a list in Python's syntax, with arguments by name."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else [tree]
        return Reading(tuple(_python_call(item) for item in items))
    except SyntaxError as error:
        return Reading(is_open="unterminated" in str(error.msg))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return NO_CALLS


def _python_call(item: ast.expr) -> ToolCall:
    """Return the call of an expression; raises ValueError if it is something else."""
    if not isinstance(item, ast.Call) or item.args or any(k.arg is None for k in item.keywords):
        raise ValueError("no call with named arguments")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in item.keywords}
    json.dumps(arguments)  # a set or bytes are no arguments: TypeError
    return ToolCall(ast.unparse(item.func), arguments)


MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*")
_MISTRAL_NEXT = re.compile(rf"\s*(?:{re.escape(MISTRAL)}|\Z)")


def mistral_calls(region: str, tools: ToolSet) -> Reading:
    """Return the calls of a list, or of names each followed by its arguments."""
    body = region.removeprefix(MISTRAL)
    if body.lstrip().startswith("["):
        return json_calls(body)
    calls, place = [], 0
    while place < len(body):
        name = _MISTRAL_CALL.match(body, place)
        try:
            arguments, place = decoded(body, name.end()) if name is not None else (None, place)
        except (ValueError, RecursionError):
            return NO_CALLS
        follows = _MISTRAL_NEXT.match(body, place)
        if name is None or follows is None or not isinstance(arguments, dict):
            return NO_CALLS
        calls.append(ToolCall(name[1], arguments))
        place = follows.end()
    return Reading(tuple(calls))


_CHANNEL_CALL = re.compile(
    r".*? to=(functions\.)?([\w.\-]+)[^{]*<\|message\|>\s*(\{.*\})\s*(?:<\|call\|>)?\s*", re.S
)


def channel_call(region: str, tools: ToolSet) -> Reading:
    """Return the call of a message to a function; a name alone has to be that of a tool."""
    match = _CHANNEL_CALL.fullmatch(region)
    if match is None or not (match[1] or match[2] in tools.names):
        return NO_CALLS
    return _one(match[2], _arguments(match[3]))


def _one(name: str, arguments: dict[str, Any] | None) -> Reading:
    return Reading((ToolCall(name, arguments),)) if arguments is not None else NO_CALLS


# Qwen2.5-Coder writes a call as a JSON object in its prose, mostly in a fence, without marks. It
# counts if it names a tool that is offered, and the answer holds nothing
# beside it but prose: no other fence, no call in the model's own form.

# A fence and an object up to the name's opening quotation mark, as parts that follow each other.
_FENCE = ("`", "`", "`", r"[\w-]*", r"[ \t]*", r"\n", r"\s*")
_OBJECT = (r"\{", r"\s*", '"', "n", "a", "m", "e", '"', r"\s*", ":", r"\s*", '"')
_NAME_SO_FAR = r"[^\"\\\n]*"
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_FENCE_ENDS = re.compile(r"\s*```[ \t]*(?=\n|\Z)")
_FENCE_ENDING = re.compile(r"\s*`{0,3}[ \t]*\Z")
_MOST_BEGUN = 400


def _so_far(parts: tuple[str, ...]) -> str:
    """Return the expression of what could become a text that consists of parts."""
    return "".join(f"(?:{part}" for part in parts) + ")?" * len(parts)


_BEGIN = re.compile(f'(?:{"".join(_FENCE)})?{"".join(_OBJECT)}({_NAME_SO_FAR})"')
_SO_FAR = re.compile(
    rf"(?:{_so_far((*_FENCE, *_OBJECT, _NAME_SO_FAR))}|{_so_far((*_OBJECT, _NAME_SO_FAR))})\Z"
)


def begins_fenced_call(text: str, is_first: bool, tools: ToolSet) -> int | None:
    """Return where the call of an offered tool begins in a text; None if none does.

    is_first   whether the text is the beginning of the answer, and so of a line
    """
    for place in _line_starts(text, is_first):
        opening = _BEGIN.match(text, place)
        if opening is not None and "```" not in text[:place]:
            return place if opening[1] in tools.names else None
    return None


def could_begin_fenced_call(text: str, is_first: bool, tools: ToolSet) -> int:
    """Return from where on a text could become such a call; its length for nowhere."""
    for place in _line_starts(text, is_first):
        is_near = len(text) - place <= _MOST_BEGUN and "```" not in text[:place]
        if is_near and _SO_FAR.match(text, place):
            return place
    return len(text)


def _line_starts(text: str, is_first: bool) -> list[int]:
    """Return where a fence or an object stands at the beginning of a line."""
    pattern = r"(?:\A|\n)[ \t]*(?=[`{])" if is_first else r"\n[ \t]*(?=[`{])"
    return [match.end() for match in re.finditer(pattern, text)]


class FencedCall:
    """The region of such a call: from its beginning to the end of the answer."""

    def __init__(self, tools: ToolSet, ends_it: Callable[[str], bool]) -> None:
        """Take what says whether a text behind the call has a call in the model's own form."""
        self._tools = tools
        self._ends_it = ends_it
        self._call: ToolCall | None = None
        self._end = 0

    def step(self, held: str, is_last: bool) -> tuple[int, tuple[ToolCall, ...]] | None:
        if self._call is None:
            start = held.index("{")
            try:
                value, end = decoded(held, start)
            except (ValueError, RecursionError) as error:
                return None if _may_go_on(error, held) and not is_last else (1, ())
            self._call = self._offered(value)
            if self._call is None:
                return 1, ()
            self._end = end
        return self._beside(held, is_last)

    def _offered(self, value: Any) -> ToolCall | None:
        call = call_of(value)
        is_plain = isinstance(value, dict) and set(value) <= _KEYS and len(value) > 1
        return call if call is not None and is_plain and call.name in self._tools.names else None

    def _beside(self, held: str, is_last: bool) -> tuple[int, tuple[ToolCall, ...]] | None:
        """Judge by what stands behind the object, which is prose to the end of the answer."""
        assert self._call is not None
        end = self._end
        if held.startswith("`"):
            fence = _FENCE_ENDS.match(held, end)
            if fence is None:
                is_waiting = _FENCE_ENDING.match(held, end) is not None and not is_last
                return None if is_waiting else (1, ())
            end = fence.end()
        rest = held[end:]
        if "```" in rest or self._ends_it(rest) or re.search(r"^[ \t]*\{", rest, re.M):
            return 1, ()
        return (end, (self._call,)) if is_last else None


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether a text that is no JSON could become an object with more text."""
    place = getattr(error, "pos", 0)
    return ends_within_string(error) or place >= len(text.rstrip()) - len("false")
