"""Finds a model's tool calls in the text of its answer, in the formats of known templates.

A call that cannot be read stays text: the user sees what the model wrote, and nothing is called.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvchat.chat.call_readers import (
    MISTRAL,
    NO_CALLS,
    QUOTE,
    Elements,
    FencedCall,
    Reader,
    Reading,
    begins_fenced_call,
    braced_call,
    channel_call,
    could_begin_fenced_call,
    is_writable,
    json_calls,
    mistral_calls,
    pair_call,
    python_calls,
)
from kvchat.chat.thinking import overlap
from kvchat.chat.tools import ToolCall, ToolSet


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    openers      the texts that begin calls; the first that occurs counts
    closer       the text that ends them; empty if the end of the answer does
    read         reads the calls from opener to closer, both included
    is_first     whether calls can only stand at the beginning of an answer
    is_channel   whether openers are control tokens, which count in the model's thinking too
    elements     how a call looks whose opener the model left out; None if that cannot be seen
    """

    name: str
    openers: tuple[str, ...]
    closer: str
    read: Reader
    is_first: bool = False
    is_channel: bool = False
    elements: Elements | None = None


@dataclass(frozen=True, slots=True)
class TextBesideCalls:
    """A piece of text; `start` is its place in all that was fed."""

    text: str
    start: int = field(default=0, compare=False)


Part = TextBesideCalls | ToolCall


class _Region(Protocol):
    """A part of an answer that may be calls. It begins with the text that is held."""

    def step(self, held: str, is_last: bool) -> tuple[int, tuple[ToolCall, ...]] | None:
        """Return how much of the text belongs to the region, and its calls, none if it is text.

        None to wait for more text, which is never the case with `is_last`.
        """


class CallSplitter:
    """Takes the calls out of the text of one answer, as it arrives.

    White space beside calls belongs to no text. What the parts are does not depend on how the text
    is cut into pieces. At most `most` calls are returned; `num_dropped` counts the others. With
    `takes_habits` calls count that a model writes otherwise than its format has it.
    """

    def __init__(
        self,
        format_: CallFormat,
        tools: ToolSet,
        most: int | None = None,
        takes_habits: bool = True,
    ) -> None:
        self._format = format_
        self._tools = tools
        self._most = most
        self._held = ""
        self._start = 0  # the place of what is held in all that was fed
        self._region: _Region | None = None
        self._space = 0  # the white space that is held before the region
        self._has_text = False
        self._num_calls = 0
        self._tail = ""  # of the text that was released
        self._elements = format_.elements if takes_habits else None
        self._may_be_fenced = takes_habits and not format_.is_channel
        self.num_dropped = 0

    @property
    def is_channel(self) -> bool:
        return self._format.is_channel

    def feed(self, text: str) -> list[Part]:
        """Take more text; return the texts and calls that it completes, in order."""
        self._held += text
        return self._parts(is_last=False)

    def flush(self) -> list[Part]:
        """Return what was held back, at the end of the answer."""
        parts = self._parts(is_last=True)
        rest = self._cut(len(self._held))
        text = rest.text.rstrip() if self._num_calls else rest.text
        return parts + self._released(replace(rest, text=text))

    def _parts(self, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            step = self._text() if self._region is None else self._calls(self._region, is_last)
            if step is None:
                return parts
            parts += step

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
        opening = self._opening()
        place = opening[0] if opening is not None else self._undecided()
        can_begin = place < len(self._held) or self._can_begin or self._is_fence_possible
        cut = len(self._held[:place].rstrip()) if can_begin else place  # space before calls
        if opening is not None:
            before = self._cut(cut)
            self._region, self._space = opening[1], place - cut
            return self._released(before)
        return self._released(self._cut(cut)) if cut else None

    @property
    def _can_begin(self) -> bool:
        return not (self._format.is_first and self._has_text)

    def _opening(self) -> tuple[int, _Region] | None:
        """Return where a region begins in the held text, and the region; None if none does."""
        found: list[tuple[int, _Region]] = []
        for mark in self._marks():
            found.append((mark, _Marked(self._format, self._tools)))
        if self._elements is not None:
            for begin in _begins(self._elements, self._held, self._tools):
                found.append((begin, _Unmarked(self._format.closer, self._elements, self._tools)))
        if self._is_fence_possible:
            place = begins_fenced_call(self._held, not self._has_text, self._tools)
            if place is not None:
                found.append((place, FencedCall(self._tools, self._ends_fenced)))
        return min(found, key=lambda opening: opening[0], default=None)

    def _marks(self) -> list[int]:
        """Return where openers of the format stand in the held text."""
        if not self._can_begin:
            return []
        if self._format.is_first:
            start = len(self._held) - len(self._held.lstrip())
            return [start] if self._held.startswith(self._format.openers, start) else []
        places = (self._held.find(opener) for opener in self._format.openers)
        return [place for place in places if place >= 0]

    @property
    def _is_fence_possible(self) -> bool:
        return self._may_be_fenced and not self._num_calls and "```" not in self._tail

    def _ends_fenced(self, text: str) -> bool:
        """Whether a text has what begins a call, so that a call before it is an example."""
        return any(opener in text for opener in self._format.openers if len(opener) > 1)

    def _undecided(self) -> int:
        """Return from where on the held text could become an opening; its length for nowhere."""
        places = [len(self._held) - self._overlap()]
        if self._elements is not None:
            places.append(_could_begin(self._elements, self._held, self._tools))
        if self._is_fence_possible:
            places.append(could_begin_fenced_call(self._held, not self._has_text, self._tools))
        return min(places)

    def _overlap(self) -> int:
        """Return how many characters at the end of the held text could begin an opener."""
        length = overlap(self._held, self._format.openers) if self._can_begin else 0
        is_behind_text = self._format.is_first and self._held[: len(self._held) - length].strip()
        return 0 if is_behind_text else length

    def _calls(self, region: _Region, is_last: bool) -> list[Part] | None:
        step = region.step(self._held[self._space :], is_last)
        if step is None:
            return None
        length, calls = step
        self._region = None
        if isinstance(region, FencedCall) and not calls:
            self._may_be_fenced = False
        part = self._cut(self._space + length)
        self._space = 0
        if not calls or not all(map(is_writable, calls)):
            return self._released(part)
        room = len(calls) if self._most is None else max(0, self._most - self._num_calls)
        self._num_calls += len(calls)
        self._has_text = False
        self.num_dropped += max(0, len(calls) - room)
        return list(calls[:room])

    def _released(self, piece: TextBesideCalls) -> list[Part]:
        self._has_text = self._has_text or bool(piece.text.strip())
        if "```" not in self._tail:
            seen = self._tail + piece.text
            self._tail = "```" if "```" in seen else seen[-2:]
        return [piece] if piece.text else []


class _Marked:
    """A region from an opener to a closer, which may also be written within an argument."""

    def __init__(self, format_: CallFormat, tools: ToolSet) -> None:
        self._format = format_
        self._tools = tools
        self._first = 0  # the end of the first closer
        self._tried = 0  # the end of the last one that was tried
        self._if_short = NO_CALLS  # what the region is if it ends at its first closer

    def step(self, held: str, is_last: bool) -> tuple[int, tuple[ToolCall, ...]] | None:
        closer = self._format.closer
        while closer and (place := held.find(closer, self._tried)) >= 0:
            end = self._tried = place + len(closer)
            reading = self._format.read(held[:end], self._tools)
            if self._first == 0:
                self._first, self._if_short = end, reading
            if not reading.is_open:
                return (end, reading.calls) if reading.calls else (self._first, self._short_calls)
        return self._at_the_end(held) if is_last else None

    @property
    def _short_calls(self) -> tuple[ToolCall, ...]:
        return self._if_short.calls if self._if_short.is_open else ()

    def _at_the_end(self, held: str) -> tuple[int, tuple[ToolCall, ...]]:
        if self._first:
            return self._first, self._short_calls
        whole = held[: len(held) - overlap(held, (self._format.closer,))]
        return len(held), self._format.read(whole, self._tools).calls


class _Unmarked:
    """A call as elements without the opener of its region, which some models leave out."""

    def __init__(self, closer: str, elements: Elements, tools: ToolSet) -> None:
        self._closer = closer
        self._elements = elements
        self._tools = tools
        self._tried = 0

    def step(self, held: str, is_last: bool) -> tuple[int, tuple[ToolCall, ...]] | None:
        while ended := self._elements.end.search(held, self._tried):
            reading = self._elements.read(held[: ended.end()], self._tools)
            if not reading.is_open:
                return self._whole(held, ended.end(), reading, is_last)
            self._tried = ended.end()
        return (1, ()) if is_last else None

    def _whole(
        self, held: str, end: int, reading: Reading, is_last: bool
    ) -> tuple[int, tuple[ToolCall, ...]] | None:
        """Return the call with the closer behind it, which stands there without an opener."""
        if not reading.calls:
            return 1, ()
        rest = held[end:].lstrip()
        if rest.startswith(self._closer):
            return held.index(self._closer, end) + len(self._closer), reading.calls
        if self._closer.startswith(rest) and not is_last:
            return None
        return (len(held) if self._closer.startswith(rest) else end), reading.calls


_REST_OF_BEGIN = re.compile(r"\s*(?=<(?:/function|/invoke|parameter))")
_REST_SO_FAR = re.compile(r"\s*(?:<[/a-z]{0,10})?\Z")
_MOST_BEGUN = 300  # characters of an element's beginning: its name, and white space


def _begins(elements: Elements, text: str, tools: ToolSet) -> list[int]:
    """Return where the element of an offered tool begins; prose about one is none."""
    begun = elements.begin.finditer(text)
    return [
        match.start()
        for match in begun
        if match[1] in tools.names and _REST_OF_BEGIN.match(text, match.end())
    ][:1]


def _could_begin(elements: Elements, text: str, tools: ToolSet) -> int:
    """Return from where on a text could become such an element; its length for nowhere."""
    for place in range(max(0, len(text) - _MOST_BEGUN), len(text)):
        if text[place] != "<":
            continue
        rest = text[place:]
        whole = elements.begin.match(rest)
        if whole is not None:
            is_open = _REST_SO_FAR.match(rest, whole.end()) is not None
            is_possible = is_open and whole[1] in tools.names
        else:
            is_possible = any(
                start.startswith(rest) for name in tools.names for start in _starts(name)
            )
        if is_possible:
            return place
    return len(text)


def _starts(name: str) -> tuple[str, ...]:
    return f"<function={name}>", f'<invoke name="{name}">'


def _tagged(opener: str, closer: str, mark: str = "") -> CallFormat:
    """Return the format of calls between two tags, in any of three forms."""
    elements = Elements(mark)

    def read(region: str, tools: ToolSet) -> Reading:
        body = region.removeprefix(opener).removesuffix(closer)
        start = body.lstrip()
        if start.startswith(("{", "[")):
            return json_calls(body)
        if elements.begin.match(start):
            return elements.read(body, tools)
        return pair_call(body, tools)

    return CallFormat(opener, (opener,), closer, read, elements=None if mark else elements)


def _braced(region: str, tools: ToolSet) -> Reading:
    return braced_call(region.removeprefix("<|tool_call>").removesuffix("<tool_call|>"))


def _python(region: str, tools: ToolSet) -> Reading:
    body = region.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    return python_calls(body)


_PYTHON_TAG = "<|python_tag|>"


def _bare(region: str, tools: ToolSet) -> Reading:
    return json_calls(region.lstrip().removeprefix(_PYTHON_TAG))


_DSML = "｜DSML｜"
_NEXT = "<|end|><|start|>assistant"
_CHANNELS = ("<|channel|>commentary to=", "<|channel|>analysis to=")
_TO = (*_CHANNELS, " to=functions.")

CALL_FORMATS = (
    *(
        _tagged(f"<{name}>", f"</{name}>")
        for name in ("tool_call", "tool_calls", "seed:tool_call", "minimax:tool_call", "TOOLCALL")
    ),
    *(
        _tagged(f"<{_DSML}{name}>", f"</{_DSML}{name}>", _DSML)
        for name in ("function_calls", "tool_calls")
    ),
    CallFormat("gemma", ("<|tool_call>",), "<tool_call|>", _braced),
    CallFormat("python", ("<|tool_call_start|>",), "<|tool_call_end|>", _python),
    CallFormat("mistral", (MISTRAL,), "", mistral_calls),
    CallFormat(
        "harmony",
        (*(f"{_NEXT}{to}" for to in _TO), "<|start|>assistant to=", *_TO),
        "",
        channel_call,
        is_channel=True,
    ),
    CallFormat("llama", (_PYTHON_TAG, "{"), "", _bare, is_first=True),
)

# Tokens that belong to calls: they stay in the text that is read, though they are special.
CALL_TOKENS = frozenset(
    {
        *(mark for f in CALL_FORMATS if f.closer for mark in (*f.openers, f.closer)),
        *(MISTRAL, "[CALL_ID]", "[ARGS]", _PYTHON_TAG),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", _DSML, QUOTE),
    }
)
