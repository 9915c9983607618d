"""Passages of an answer, and the channels in which some models (gpt-oss) write them.

Such an answer consists of messages. Each has a header of control tokens, which names its channel:
`analysis` is thinking, all others are for the user.
"""

import re
from dataclasses import dataclass, field

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
