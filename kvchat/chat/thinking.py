"""Thinking: how much of it is asked of a model, and which part of streamed text is thinking.

Templates have no common name for the switch: a ThinkSwitch holds what one template reads. The text
is separated by the marks around thinking, for display only; the ledger stores the whole text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

# The channels of gpt-oss: an answer consists of messages. Each has a header of control tokens,
# which names its channel: `analysis` is thinking, all others are for the user.

CHANNEL_TOKEN = "<|channel|>"
CHANNEL_TOKENS = frozenset({CHANNEL_TOKEN, "<|start|>", "<|message|>", "<|end|>"})
# With these a message begins, or ends; the first two may begin an answer.
MESSAGE_BEGINS = (CHANNEL_TOKEN, "<|start|>")
NEXT_MESSAGE = "<|end|><|start|>"
_MARKS = (*MESSAGE_BEGINS, "<|end|>")
_THINKING = "analysis"
_FIELDS = (
    r"\s*(?:<\|end\|>)?(?:<\|start\|>[^<]*)?(?:<\|channel\|>([^<]*))?(?:<\|constrain\|>[^<]*)?"
)
_HEADER = re.compile(rf"{_FIELDS}<\|message\|>")
_HEADER_SO_FAR = re.compile(rf"{_FIELDS}(?:<\|?[a-z]*\|?)?")
_MOST_HEADER = 200
_GAP = "\n\n"


@dataclass(frozen=True, slots=True)
class Passage:
    """A run of text that is either thinking or answer; `start` is its place in the whole text.

    is_gap   whether it is not in the whole text: it stands between two messages, at their mark
    """

    text: str
    is_thinking: bool
    start: int = field(default=0, compare=False)
    is_gap: bool = field(default=False, compare=False)

    @property
    def end(self) -> int:
        return self.start if self.is_gap else self.start + len(self.text)


class ChannelSplitter:
    """Splits a stream of messages into passages, without the headers.

    The passages' text does not depend on how the stream is cut into pieces.
    """

    def __init__(self, start: int, has_thought: bool) -> None:
        """Begin at a header, which has the place `start` in the whole text.

        has_thought   whether thinking stands before it
        """
        self._start = start
        self._held = ""
        self._is_header = True
        self.is_thinking = False
        self._has_said = {True} if has_thought else set[bool]()
        self._is_new = True  # whether nothing of the message was returned

    def feed(self, text: str) -> list[Passage]:
        """Take more text; return the passages it completes, in order."""
        self._held += text
        passages: list[Passage] = []
        while self._held:
            step = self._header() if self._is_header else self._message()
            if step is None:
                return passages
            passages += step
        return passages

    def flush(self) -> list[Passage]:
        """Return the text that was held back, at the end of the stream; no part of a header."""
        is_header = self._is_header and _HEADER_SO_FAR.fullmatch(self._held) is not None
        text = "" if is_header else self._held
        return self._said(text, len(self._held))

    def _header(self) -> list[Passage] | None:
        """Read a header; None to wait for more text."""
        header = _HEADER.match(self._held)
        if header is not None:
            self._is_header, self._is_new = False, True
            channel = (header[1] or "").strip()
            self.is_thinking = channel.startswith(_THINKING) and " to=" not in channel
            if " to=" in header[0]:  # a call that could not be read is shown as it was written
                return self._said(header[0], header.end())
            return self._said("", header.end())
        if len(self._held) > _MOST_HEADER or _HEADER_SO_FAR.fullmatch(self._held) is None:
            self._is_header, self._is_new, self.is_thinking = False, True, False
            return self._said(self._held[:1], 1)
        return None

    def _message(self) -> list[Passage] | None:
        """Return the text up to the next mark, or up to what could become one."""
        places = [place for mark in _MARKS if (place := self._held.find(mark)) >= 0]
        if places:
            self._is_header = True
            return self._said(self._held[: min(places)], min(places))
        cut = len(self._held) - overlap(self._held, _MARKS)
        return self._said(self._held[:cut], cut) if cut else None

    def _said(self, text: str, length: int) -> list[Passage]:
        """Return the passage of a text, which with its marks takes so much of what is held."""
        passages = []
        if text and self._is_new and self.is_thinking in self._has_said:
            passages.append(Passage(_GAP, self.is_thinking, self._start, is_gap=True))
        if text:
            passages.append(Passage(text, self.is_thinking, self._start))
            self._has_said.add(self.is_thinking)
            self._is_new = False
        self._held = self._held[length:]
        self._start += length
        return passages


def overlap(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` could begin one of `marks`."""
    longest = max(len(mark) for mark in marks) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


THINKING_MARKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    # Models with channels close one channel and open the next; their marks are these tokens.
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>",
}
_OPENERS = "|".join(map(re.escape, THINKING_MARKS))
_CLOSERS = "|".join(map(re.escape, THINKING_MARKS.values()))
# A closing mark between two backticks is quoted, as is an opening one after a backtick. Quoted
# marks do not count.
_CLOSING = f"(?<!`)(?:{_CLOSERS})|(?:{_CLOSERS})(?!`)"
_ANY_CLOSER = re.compile(_CLOSING)
_ANY_MARK = re.compile(f"(?<!`)(?:{_OPENERS})|{_CLOSING}")


class _Stage(Enum):
    """The part of an answer that the text has reached."""

    OPENING = auto()
    CHANNELS = auto()
    THINKING = auto()
    BETWEEN = auto()
    ANSWER = auto()


class ThinkingSplitter:
    """Splits a stream into passages. Thinking can only come first: later marks are text.

    Blank lines around thinking are in no passage. `starts_thinking` is for prompts that end with an
    opened mark. The passages' text does not depend on how the stream is cut into pieces.
    """

    def __init__(self, starts_thinking: bool = False) -> None:
        self._stage = _Stage.THINKING if starts_thinking else _Stage.OPENING
        self._closers: tuple[str, ...] = (NEXT_MESSAGE, *THINKING_MARKS.values())
        self._before = ""  # the last character of the thinking that was returned
        self._channels: ChannelSplitter | None = None
        self._has_thought = False
        self._held = ""
        self._start = 0  # the place of what is held in the whole text

    @property
    def is_thinking(self) -> bool:
        if self._channels is not None:
            return self._channels.is_thinking
        return self._stage is _Stage.THINKING

    def feed(self, text: str) -> list[Passage]:
        """Take more text; return the passages it completes, in order."""
        if self._stage is _Stage.ANSWER and text and not self._held:  # nearly every token
            self._start += len(text)
            return [Passage(text, False, self._start - len(text))]
        if self._channels is not None:
            return self._channels.feed(text)
        self._held += text
        passages: list[Passage] = []
        if self._stage is _Stage.OPENING:
            self._open()
        if self._stage is _Stage.THINKING:
            passages += self._think()
        if self._stage is _Stage.CHANNELS:
            return passages + self._open_channels()
        if self._stage is _Stage.BETWEEN:
            self._keep(self._held.lstrip("\n"))
            if self._held:
                self._stage = _Stage.ANSWER
        if self._stage is _Stage.ANSWER:
            passages += self.flush()
        return passages

    def flush(self) -> list[Passage]:
        """Return the text that was held back, at the end of the stream."""
        if self._channels is not None:
            return self._channels.flush()
        found = self._closer(is_last=True) if self.is_thinking else None
        return self._take(self._held[: found[0]] if found is not None else self._held, "")

    def _open_channels(self) -> list[Passage]:
        """Leave all that is held, and what follows, to the splitter of channels."""
        self._channels = ChannelSplitter(self._start, has_thought=self._has_thought)
        held, self._held = self._held, ""
        return self._channels.feed(held)

    def _keep(self, rest: str) -> None:
        """Drop the beginning of what is held."""
        assert self._held.endswith(rest)
        self._start += len(self._held) - len(rest)
        self._held = rest

    def _take(self, text: str, rest: str) -> list[Passage]:
        """Return the passage of `text`, the beginning of what is held; hold only `rest`."""
        passages = [Passage(text, self.is_thinking, self._start)] if text else []
        self._before = text[-1:] or self._before
        self._keep(rest)
        return passages

    def _open(self) -> None:
        """Leave the opening stage once the beginning is a mark or cannot become one."""
        start = self._held.lstrip()
        if start.startswith(MESSAGE_BEGINS):
            self._keep(start)
            self._stage = _Stage.CHANNELS
            return
        for opener, closer in THINKING_MARKS.items():
            if start.startswith(opener):
                self._stage = _Stage.THINKING
                self._closers = (closer,)
                self._keep(start[len(opener) :])
                return
        if not any(mark.startswith(start) for mark in (*THINKING_MARKS, *MESSAGE_BEGINS)):
            self._stage = _Stage.ANSWER

    def _think(self) -> list[Passage]:
        if not self._has_thought:
            self._keep(self._held.lstrip("\n"))
        found = self._closer(is_last=False)
        if found is not None:
            end, mark = found
            rest = end if mark == NEXT_MESSAGE else end + len(mark)
            thinking = self._take(self._held[:end].rstrip("\n"), self._held[rest:])
            self._has_thought = self._has_thought or bool(thinking)
            self._stage = _Stage.CHANNELS if mark == NEXT_MESSAGE else _Stage.BETWEEN
            return thinking
        whole = next((mark for mark in self._closers if self._held.endswith(mark)), "")
        cut = len(self._held) - max(len(whole), overlap(self._held, self._closers))
        cut = len(self._held[:cut].rstrip("\n"))
        thinking = self._take(self._held[:cut], self._held[cut:])
        self._has_thought = self._has_thought or bool(thinking)
        return thinking

    def _closer(self, is_last: bool) -> tuple[int, str] | None:
        """Return the first closing mark that is not quoted, and its place; None to wait."""
        for found in re.finditer("|".join(map(re.escape, self._closers)), self._held):
            before = self._held[found.start() - 1] if found.start() else self._before
            if before != "`":
                return found.start(), found[0]
            after = self._held[found.end() : found.end() + 1]
            if after != "`":
                return (found.start(), found[0]) if after or is_last else None
        return None


def whole_passages(text: str, starts_thinking: bool | None = None) -> list[Passage]:
    """Return the passages of a whole text, such as a saved one.

    With `starts_thinking` None, the prompt opened a mark if the text's first mark is a closing one.
    """
    if starts_thinking is None:
        starts_thinking = first_mark_closes(text)
    splitter = ThinkingSplitter(starts_thinking)
    return splitter.feed(text) + splitter.flush()


def split_thinking(text: str, starts_thinking: bool | None = None) -> tuple[str, str]:
    """Return the thinking and the answer in a whole text."""
    passages = whole_passages(text, starts_thinking)
    thinking = "".join(p.text for p in passages if p.is_thinking)
    return thinking, "".join(p.text for p in passages if not p.is_thinking)


def first_mark_closes(text: str) -> bool:
    """Return whether the first mark in a text is a closing one.

    A mark directly after a backtick is quoted, and does not count.
    """
    match = _ANY_MARK.search(text)
    return match is not None and match[0] in THINKING_MARKS.values()


def cut_at_marks(text: str) -> list[tuple[str, bool]]:
    """Return a whole answer in pieces, and whether each is one of the marks around its thinking.

    The pieces are the text. Thinking comes first, as in ThinkingSplitter; other marks are text.
    """
    match = _ANY_MARK.search(text)
    if match is None:
        return [(text, False)]
    closer = THINKING_MARKS.get(match[0])
    if closer is None:  # the prompt opened the mark
        return [(text[: match.start()], False), (match[0], True), (text[match.end() :], False)]
    if text[: match.start()].strip():
        return [(text, False)]
    before = [(text[: match.start()], False), (match[0], True)]
    found = next((m for m in _ANY_CLOSER.finditer(text, match.end()) if m[0] == closer), None)
    if found is None:
        return [*before, (text[match.end() :], False)]
    return [
        *before,
        (text[match.end() : found.start()], False),
        (found[0], True),
        (text[found.end() :], False),
    ]


def joined(thinking: str, answer: str, written: str) -> str:
    """Return thinking and answer as one text, with the marks with which an answer was written.

    written   the whole text of that answer, whose mark of thinking the prompt may have opened
    """
    if written.lstrip().startswith(MESSAGE_BEGINS) or NEXT_MESSAGE in written:
        opener, closer = next((o, c) for o, c in THINKING_MARKS.items() if NEXT_MESSAGE in c)
        return f"{opener}{thinking}{closer}{answer}" if answer else f"{opener}{thinking}"
    found = _ANY_CLOSER.search(written)
    if found is None:
        return answer or thinking
    return f"{written[: found.start()]}{found[0]}\n\n{answer}"


# The names of real templates: Qwen, GLM and SmolLM read the first, Granite and DeepSeek the second.
_TOGGLES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_NO_EFFORT = re.compile(r"""["']none["']""")


class Think(StrEnum):
    """How an answer is asked for. `AUTO` leaves it to the template; the last three are efforts."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def is_effort(self) -> bool:
        return self in _EFFORTS


_EFFORTS = (Think.LOW, Think.MEDIUM, Think.HIGH)


@dataclass(frozen=True, slots=True)
class ThinkSwitch:
    """The variables of one template that switch thinking.

    toggles      the names of its variables that are true or false
    has_effort   whether it reads `reasoning_effort`
    has_none     whether that effort may be `none`
    """

    toggles: tuple[str, ...] = ()
    has_effort: bool = False
    has_none: bool = False

    @classmethod
    def of(cls, source: str, names: Iterable[str]) -> "ThinkSwitch":
        """Return the switch of a template; `names` are the variables that it reads."""
        read = frozenset(names)
        has_effort = _EFFORT in read
        return cls(
            tuple(name for name in _TOGGLES if name in read),
            has_effort,
            has_effort and _NO_EFFORT.search(source) is not None,
        )

    @property
    def known(self) -> tuple[Think, ...]:
        """The values that change what the template writes, and `AUTO`."""
        is_off = self.toggles or self.has_none
        return (
            Think.AUTO,
            *((Think.ON,) if self.toggles else ()),
            *((Think.OFF,) if is_off else ()),
            *(_EFFORTS if self.has_effort else ()),
        )

    def variables(self, think: Think) -> dict[str, object]:
        """Return what to pass to the template; nothing for a value that is not `known`."""
        if think is Think.AUTO or think not in self.known:
            return {}
        values: dict[str, object] = dict.fromkeys(self.toggles, think is not Think.OFF)
        if think.is_effort:
            values[_EFFORT] = think.value
        elif think is Think.OFF and self.has_none:
            values[_EFFORT] = "none"
        return values

    def problem(self, think: Think, name: str) -> str | None:
        """Return one sentence if the template of model `name` ignores `think`, else None."""
        if think in self.known:
            return None
        if len(self.known) == 1:
            return (
                f"The chat template of {name} has no switch for thinking; {think} changes nothing."
            )
        others = ", ".join(self.known)
        return f"The chat template of {name} does not know thinking {think}; it knows {others}."
