"""Finds a model's tool calls in the text of its answer, in the formats of known templates.

A call that cannot be read stays text: the user sees what the model wrote, and nothing is called.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvchat.chat.tools import ToolCall, ToolSet, is_too_deep

Reader = Callable[[str, ToolSet], list[ToolCall] | None]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    openers      the texts that begin calls; the first that occurs counts
    closer       the text that ends them; empty if the end of the answer does
    read         reads the calls from opener to closer, both included; None if they are none
    is_first     whether calls can only stand at the beginning of an answer
    is_channel   whether openers are control tokens, which count in the model's thinking too
    """

    name: str
    openers: tuple[str, ...]
    closer: str
    read: Reader
    is_first: bool = False
    is_channel: bool = False


@dataclass(frozen=True, slots=True)
class TextBesideCalls:
    """A piece of text; `start` is its place in all that was fed."""

    text: str
    start: int = field(default=0, compare=False)


Part = TextBesideCalls | ToolCall


class CallSplitter:
    """Takes the calls out of the text of one answer, as it arrives.

    White space beside calls belongs to no text. What `feed` returns does not depend on how the text
    is cut into pieces. At most `most` calls are returned; `num_dropped` counts the others.
    """

    def __init__(self, format_: CallFormat, tools: ToolSet, most: int | None = None) -> None:
        self._format = format_
        self._tools = tools
        self._most = most
        self._held = ""
        self._start = 0  # the place of what is held in all that was fed
        self._is_in_calls = False
        self._has_text = False
        self._num_calls = 0
        self.num_dropped = 0

    @property
    def is_channel(self) -> bool:
        return self._format.is_channel

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the texts and calls that it completes, in order."""
        self._held += text
        found: list[Part] = []
        while True:
            step = self._calls() if self._is_in_calls else self._text()
            if step is None:
                return found
            found += step

    def flush(self) -> list[Part]:
        """Return what was held back, at the end of the answer."""
        is_in_calls = self._is_in_calls
        held = self._cut(len(self._held))
        if is_in_calls:
            return self._read(held)
        text = held.text.rstrip() if self._num_calls else held.text
        return [TextBesideCalls(text, held.start)] if text else []

    def _cut(self, length: int) -> TextBesideCalls:
        """Return the beginning of what is held, and hold the rest."""
        cut = TextBesideCalls(self._held[:length], self._start)
        self._held = self._held[length:]
        self._start += length
        return cut

    def _text(self) -> list[Part] | None:
        """Release text up to an opener, or up to what could become one; None to wait for more."""
        if self._num_calls and not self._has_text:
            self._cut(len(self._held) - len(self._held.lstrip()))
        place = self._opening()
        if place is not None:
            before = self._cut(place)
            self._is_in_calls = True
            return self._released(TextBesideCalls(before.text.rstrip(), before.start))
        cut = len(self._held)
        if self._can_begin:  # white space before calls is no text
            cut = len(self._held[: cut - self._overlap()].rstrip())
        if not cut:
            return None
        return self._released(self._cut(cut))

    @property
    def _can_begin(self) -> bool:
        return not (self._format.is_first and self._has_text)

    def _opening(self) -> int | None:
        """Return where the calls begin in the held text, None if they do not."""
        if not self._can_begin:
            return None
        if self._format.is_first:
            start = len(self._held) - len(self._held.lstrip())
            return start if self._held.startswith(self._format.openers, start) else None
        places = (self._held.find(opener) for opener in self._format.openers)
        return min((place for place in places if place >= 0), default=None)

    def _overlap(self) -> int:
        """Return how many characters at the end of the held text could begin an opener."""
        if not self._can_begin:
            return 0
        longest = max(len(opener) for opener in self._format.openers) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            is_all = not self._held[:-length].strip()
            if any(opener.startswith(end) for opener in self._format.openers) and (
                is_all or not self._format.is_first
            ):
                return length
        return 0

    def _calls(self) -> list[Part] | None:
        closer = self._format.closer
        end = self._held.find(closer) if closer else -1
        if end < 0:
            return None
        return self._read(self._cut(end + len(closer)))

    def _read(self, region: TextBesideCalls) -> list[Part]:
        self._is_in_calls = False
        calls = self._format.read(region.text, self._tools)
        if not calls or not all(map(_is_writable, calls)):
            return self._released(region)
        room = len(calls) if self._most is None else max(0, self._most - self._num_calls)
        self._num_calls += len(calls)
        self._has_text = False
        self.num_dropped += max(0, len(calls) - room)
        return list(calls[:room])

    def _released(self, piece: TextBesideCalls) -> list[Part]:
        self._has_text = self._has_text or bool(piece.text.strip())
        return [piece] if piece.text else []


# Reading. Each reader gets the whole region and returns None for what it cannot read.


def _call(value: Any) -> ToolCall | None:
    """Return the call of a JSON object in one of its usual forms."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def _is_writable(call: ToolCall) -> bool:
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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_calls(text: str) -> list[ToolCall] | None:
    """Return the calls of JSON objects, one after another, or in a list."""
    decoder, calls, place = json.JSONDecoder(), [], 0
    while text[place:].strip(" \n\r\t;"):
        place = len(text) - len(text[place:].lstrip(" \n\r\t;"))
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        for item in value if isinstance(value, list) else [value]:
            call = _call(item)
            if call is None:
                return None
            calls.append(call)
    return calls


_FUNCTION = re.compile(
    r'<(?:function=|invoke name=")([^">\s]+)"?>(.*?)</(?:function|invoke)>', re.S
)
_PARAMETER = re.compile(
    r'<parameter(?:=| name=")([^">]+?)"?(?: string="(true|false)")?>(.*?)</parameter>', re.S
)
_KEY_AND_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)
_NAME = re.compile(r"\s*([\w.\-]+)\s*")


def _function_calls(body: str, tools: ToolSet) -> list[ToolCall] | None:
    """Return the calls of elements with one element for each argument."""
    calls = []
    for name, inside in _FUNCTION.findall(body):
        arguments = {}
        for key, said, value in _PARAMETER.findall(inside):
            value = value.removeprefix("\n").removesuffix("\n")
            if said == "true":
                arguments[key] = value
            else:
                arguments[key] = tools.unquoted_value(name, key, value)
        calls.append(ToolCall(name, arguments))
    is_whole = not _FUNCTION.sub("", body).strip()
    return calls if calls and is_whole else None


def _pair_call(body: str, tools: ToolSet) -> list[ToolCall] | None:
    """Return the call of a name followed by pairs of keys and values."""
    named = _NAME.match(body)
    if named is None or _KEY_AND_VALUE.sub("", body[named.end() :]).strip():
        return None
    name = named[1]
    pairs = _KEY_AND_VALUE.findall(body)
    return [ToolCall(name, {k: tools.unquoted_value(name, k, v) for k, v in pairs})]


def _tagged(opener: str, closer: str) -> CallFormat:
    """Return the format of calls between two tags, in any of three forms."""

    def read(region: str, tools: ToolSet) -> list[ToolCall] | None:
        body = region.removeprefix(opener).removesuffix(closer).replace("｜DSML｜", "")
        if body.lstrip().startswith(("{", "[")):
            return _json_calls(body)
        if body.lstrip().startswith(("<function", "<invoke")):
            return _function_calls(body, tools)
        return _pair_call(body, tools)

    return CallFormat(opener, (opener,), closer, read)


_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"([\w.\-]+)\s*:")
_BRACED_CALL = re.compile(r"\s*call:([\w.\-]+)(\{.*\})\s*", re.S)


def _braced_calls(region: str, tools: ToolSet) -> list[ToolCall] | None:
    """Return a call in braces, with bare keys and a token of its own as quotation mark."""
    match = _BRACED_CALL.fullmatch(region.removeprefix("<|tool_call>").removesuffix("<tool_call|>"))
    if match is None:
        return None
    parts = match[2].split(_QUOTE)
    parts[::2] = [_BARE_KEY.sub(r'"\1":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    arguments = _json("".join(parts))
    return [ToolCall(match[1], arguments)] if isinstance(arguments, dict) else None


def _python_calls(region: str, tools: ToolSet) -> list[ToolCall] | None:
    """Return the calls of a list in Python's syntax, with arguments by name."""
    body = region.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    try:
        written = ast.parse(body.strip(), mode="eval").body
        items = written.elts if isinstance(written, ast.List) else [written]
        return [_python_call(item) for item in items]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _python_call(item: ast.expr) -> ToolCall:
    """Return the call of an expression; raises ValueError if it is something else."""
    if not isinstance(item, ast.Call) or item.args or any(k.arg is None for k in item.keywords):
        raise ValueError("no call with named arguments")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in item.keywords}
    json.dumps(arguments)  # a set or bytes are no arguments: TypeError
    return ToolCall(ast.unparse(item.func), arguments)


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]\w*)?\[ARGS\](.*)", re.S)


def _mistral_calls(region: str, tools: ToolSet) -> list[ToolCall] | None:
    """Return the calls of a list, or of names each followed by its arguments."""
    body = region.removeprefix(_MISTRAL)
    if body.lstrip().startswith("["):
        return _json_calls(body)
    calls = []
    for part in body.split(_MISTRAL):
        match = _MISTRAL_CALL.fullmatch(part)
        arguments = _json(match[2]) if match is not None else None
        if match is None or not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(match[1], arguments))
    return calls


_PYTHON_TAG = "<|python_tag|>"


def _bare_calls(region: str, tools: ToolSet) -> list[ToolCall] | None:
    return _json_calls(region.lstrip().removeprefix(_PYTHON_TAG))


_CHANNEL_CALL = re.compile(r".*? to=functions\.([\w.\-]+)[^{]*<\|message\|>\s*(\{.*\})\s*", re.S)
_NEXT = "<|end|><|start|>assistant"
_TO = ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.", " to=functions.")


def _channel_calls(region: str, tools: ToolSet) -> list[ToolCall] | None:
    match = _CHANNEL_CALL.fullmatch(region)
    arguments = _json(match[2]) if match is not None else None
    if match is None or not isinstance(arguments, dict):
        return None
    return [ToolCall(match[1], arguments)]


CALL_FORMATS = (
    *(
        _tagged(f"<{name}>", f"</{name}>")
        for name in (
            *("tool_call", "tool_calls", "seed:tool_call", "minimax:tool_call", "TOOLCALL"),
            *("｜DSML｜function_calls", "｜DSML｜tool_calls"),
        )
    ),
    CallFormat("gemma", ("<|tool_call>",), "<tool_call|>", _braced_calls),
    CallFormat("python", ("<|tool_call_start|>",), "<|tool_call_end|>", _python_calls),
    CallFormat("mistral", (_MISTRAL,), "", _mistral_calls),
    CallFormat(
        "harmony",
        (*(f"{_NEXT}{to}" for to in _TO), f"<|start|>assistant{_TO[2]}", *_TO),
        "",
        _channel_calls,
        is_channel=True,
    ),
    CallFormat("llama", (_PYTHON_TAG, "{"), "", _bare_calls, is_first=True),
)

# Tokens that belong to calls: they stay in the text that is read, though they are special.
CALL_TOKENS = frozenset(
    {
        *(mark for f in CALL_FORMATS if f.closer for mark in (*f.openers, f.closer)),
        *(_MISTRAL, "[CALL_ID]", "[ARGS]", _PYTHON_TAG),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜", _QUOTE),
    }
)
