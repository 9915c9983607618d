"""Tells a model's thinking from its answer in streamed text.

Knows the marks models put around thinking. The ledger keeps everything; this is about what is
shown.
"""

from dataclasses import dataclass

THINKING_MARKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
}


@dataclass(frozen=True, slots=True)
class Passage:
    """A run of text that is either thinking or answer."""

    text: str
    is_thinking: bool


class ThinkingSplitter:
    """Splits a stream into passages. Thinking can only come first: marks later on are text.

    `starts_thinking` is for prompts that end inside an opened mark.
    """

    def __init__(self, starts_thinking: bool = False) -> None:
        self._closers = tuple(THINKING_MARKS.values()) if starts_thinking else ()
        self._is_settled = False
        self._has_thought = starts_thinking
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return bool(self._closers)

    def feed(self, text: str) -> list[Passage]:
        """Take more text; return the passages it completes, in order."""
        if self._is_settled:
            return self._passages(text, False)
        self._held += text
        if self._closers:
            return self._close()
        return self._open()

    def flush(self) -> list[Passage]:
        """Return what was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return self._passages(held, self.is_thinking)

    def _open(self) -> list[Passage]:
        """Wait until the beginning either is a mark or cannot become one."""
        start = self._held.lstrip()
        for opener, closer in THINKING_MARKS.items():
            if start.startswith(opener):
                self._closers = (closer,)
                self._has_thought = True
                self._held = start[len(opener) :].lstrip("\n")
                return self._close()
        if any(opener.startswith(start) for opener in THINKING_MARKS):
            return []
        return self._settle(self._held)

    def _close(self) -> list[Passage]:
        for closer in self._closers:
            before, mark, after = self._held.partition(closer)
            if mark:
                self._closers = ()
                thinking = self._passages(before.rstrip("\n"), True)
                self._held = ""
                return thinking + self._settle(after)
        keep = _overlap(self._held, self._closers)
        cut = len(self._held) - keep
        thinking, self._held = self._passages(self._held[:cut], True), self._held[cut:]
        return thinking

    def _settle(self, answer: str) -> list[Passage]:
        """Begin the answer, without the blank lines models put between thinking and answer."""
        if self._has_thought:
            answer = answer.lstrip("\n")
        self._is_settled = bool(answer)
        self._held = ""
        return self._passages(answer, False)

    def _passages(self, text: str, is_thinking: bool) -> list[Passage]:
        return [Passage(text, is_thinking)] if text else []


def split_thinking(text: str, starts_thinking: bool = False) -> tuple[str, str]:
    """Return the thinking and the answer in a whole text."""
    splitter = ThinkingSplitter(starts_thinking)
    passages = splitter.feed(text) + splitter.flush()
    thinking = "".join(p.text for p in passages if p.is_thinking)
    return thinking, "".join(p.text for p in passages if not p.is_thinking)


def _overlap(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` could begin one of `marks`."""
    longest = max(len(mark) for mark in marks) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
