"""SeenChats: finds the message in which a resent conversation differs from what was fed before.

A client that changes an early message, such as a date in the system prompt, loses the KV of all
that follows. The server says which message it was.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from kvchat.chat.conversation import Role

_MAX_CHATS = 64
_SHOWN_CHARS = 40

Message = tuple[Role, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a conversation differs from an earlier one that began alike.

    message    index of the message among the user's and the assistant's, None for the system prompt
    character  index of the first other character in it
    was, now   what stood there and what stands there now, shortened
    """

    message: int | None
    character: int
    was: str
    now: str

    def as_dict(self) -> dict[str, object]:
        return {
            "message": "system" if self.message is None else self.message,
            "character": self.character,
            "was": self.was,
            "now": self.now,
        }


class SeenChats:
    """The latest conversations, as texts in memory. One thread uses it."""

    def __init__(self) -> None:
        self._chats: deque[tuple[str, tuple[Message, ...]]] = deque(maxlen=_MAX_CHATS)

    def note(self, system: str | None, messages: tuple[Message, ...]) -> Difference | None:
        """Keep a conversation; return how it differs from the one before that is most like it.

        None if it continues or repeats that one, or if nothing like it was seen.
        """
        text = system or ""
        difference = self._difference(text, messages)
        for known in self._chats:
            if known[0] == text and messages[: len(known[1])] == known[1]:
                self._chats.remove(known)  # this one continues it
                break
        self._chats.append((text, messages))
        return difference

    def _difference(self, system: str, messages: tuple[Message, ...]) -> Difference | None:
        best, best_length = None, 0
        for known_system, known in reversed(self._chats):
            length = _num_equal(known, messages)
            if known_system == system and length == min(len(known), len(messages)):
                return None
            if length > best_length:
                best, best_length = (known_system, known), length
        if best is None:
            return None
        known_system, known = best
        if known_system != system:
            return _located(None, known_system, system)
        if best_length + 1 >= len(known):
            return None  # another last message: nothing after it was fed
        return _located(best_length, known[best_length][1], messages[best_length][1])


def _num_equal(before: tuple[Message, ...], now: tuple[Message, ...]) -> int:
    pairs = zip(before, now, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _located(message: int | None, was: str, now: str) -> Difference:
    pairs = zip(was, now, strict=False)
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    end = place + _SHOWN_CHARS
    return Difference(message, place, was[place:end], now[place:end])
