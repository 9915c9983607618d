"""SeenChats: finds the message in which a resent conversation differs from what was fed before.

A client that changes an early message, such as a date in the system prompt, loses the KV of all
that follows. The server says which message it was.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from kvchat.chat.conversation import Role
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet

_MAX_CHATS = 64
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the user or of the assistant.

    calls     of an answer: the tools that it calls
    results   of a user's message: what the calls before it returned, which stands before its text
    """

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()

    def joined(self, later: "Message") -> "Message":
        """Return this message and a later one of the same role as one."""
        text = "\n\n".join(text for text in (self.text, later.text) if text)
        calls, results = (*self.calls, *later.calls), (*self.results, *later.results)
        return Message(self.role, text, calls, results)

    @property
    def whole(self) -> str:
        """All that the model reads of the message, to compare it."""
        parts = (*(result.text for result in self.results), self.text)
        return "\n".join((*parts, *(call.key for call in self.calls)))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a conversation differs from an earlier one that began alike.

    place      index of the message among the user's and the assistant's, or `system`, or `tools`
    character  index of the first other character in it
    was, now   what stood there and what stands there now, shortened
    """

    place: int | str
    character: int
    was: str
    now: str

    def as_dict(self) -> dict[str, object]:
        return {
            "message": self.place,
            "character": self.character,
            "was": self.was,
            "now": self.now,
        }


class SeenChats:
    """The latest conversations, as texts in memory. One thread uses it."""

    def __init__(self) -> None:
        self._chats: deque[_Chat] = deque(maxlen=_MAX_CHATS)

    def note(
        self, system: str | None, messages: tuple[Message, ...], tools: ToolSet | None = None
    ) -> Difference | None:
        """Keep a conversation; return how it differs from the one before that is most like it.

        None if it continues or repeats that one, or if nothing like it was seen.
        """
        chat = _Chat(system or "", tools.text if tools is not None else "", messages)
        difference = self._difference(chat)
        for known in self._chats:
            if known.opening == chat.opening and messages[: len(known.messages)] == known.messages:
                self._chats.remove(known)  # this one continues it
                break
        self._chats.append(chat)
        return difference

    def _difference(self, chat: "_Chat") -> Difference | None:
        best, best_length = None, 0
        for known in reversed(self._chats):
            length = _num_equal(known.messages, chat.messages)
            is_within = length == min(len(known.messages), len(chat.messages))
            if known.opening == chat.opening and is_within:
                return None
            if length > best_length:
                best, best_length = known, length
        if best is None:
            return None
        if best.system != chat.system:
            return _located("system", best.system, chat.system)
        if best.tools != chat.tools:
            return _located("tools", best.tools, chat.tools)
        if best_length + 1 >= len(best.messages):
            return None  # another last message: nothing after it was fed
        was, now = best.messages[best_length], chat.messages[best_length]
        return _located(best_length, was.whole, now.whole)


@dataclass(frozen=True, slots=True)
class _Chat:
    system: str
    tools: str
    messages: tuple[Message, ...]

    @property
    def opening(self) -> tuple[str, str]:
        return self.system, self.tools


def _num_equal(before: tuple[Message, ...], now: tuple[Message, ...]) -> int:
    pairs = zip(before, now, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _located(where: int | str, was: str, now: str) -> Difference:
    pairs = zip(was, now, strict=False)
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    end = place + _SHOWN_CHARS
    return Difference(where, place, was[place:end], now[place:end])
