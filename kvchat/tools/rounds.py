"""Rounds: when a model that answers results with calls, and those with more, is ended."""

from collections.abc import Sequence

from kvchat.chat.tools import ToolCall, ToolResult

MOST_ROUNDS = 50
MOST_EQUAL_ROUNDS = 3  # small models repeat a call whose result they do not understand


class Rounds:
    """The rounds of calls within one answer."""

    def __init__(self) -> None:
        self._last: tuple[list[str], list[ToolResult]] | None = None
        self._num_equal = 0
        self._num = 0

    def add(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> str:
        """Take a round; return a sentence on why it has to be the last one, "" if it has not."""
        this = ([call.key for call in calls], list(results))
        self._num_equal = self._num_equal + 1 if this == self._last else 1
        self._last = this
        self._num += 1
        if self._num_equal >= MOST_EQUAL_ROUNDS:
            return "The model makes the same call again and again, to the same result."
        if self._num >= MOST_ROUNDS:
            return f"The model has called tools {MOST_ROUNDS} times for one answer."
        return ""
