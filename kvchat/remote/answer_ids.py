"""AnswerIds: the ids of an answer of a server that takes messages, and gives its parts apart."""

from dataclasses import dataclass, field

from kvchat.remote.message_ids import AFTER_THINKING, THINKING, call_text, text_ids
from kvchat.remote.wire import Piece


@dataclass(slots=True)
class AnswerIds:
    """Joins thinking, answer and calls to one text with marks, piece by piece."""

    is_thinking: bool = False
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)

    def ids_of(self, piece: Piece) -> list[int]:
        """Return the ids that a piece of an answer adds."""
        text = ""
        if piece.thinking:
            text += piece.thinking if self.is_thinking else THINKING + piece.thinking
            self.is_thinking = True
        if piece.text:
            text += self._closed() + piece.text
        for call in piece.calls:
            name, arguments = self.calls.get(call.index, ("", ""))
            self.calls[call.index] = name or call.name, arguments + call.arguments
        return text_ids(text)

    def last_ids(self) -> list[int]:
        """Return the ids of the calls, which are complete at the end only."""
        if not self.calls:
            return []
        calls = (call_text(*self.calls[index]) for index in sorted(self.calls))
        return text_ids(self._closed() + "\n".join(calls))

    def _closed(self) -> str:
        closing = AFTER_THINKING if self.is_thinking else ""
        self.is_thinking = False
        return closing
