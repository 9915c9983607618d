"""ResentChat: a conversation that a client sends as text with every request, and what it changed.

A client that changes an early message, such as a date in the system prompt, loses the KV of all
that follows. SeenChats finds that message, and the server says which it was.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from kvchat.chat.conversation import Role
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.errors import UsageError

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

    @property
    def whole(self) -> str:
        """All that the model reads of the message, to compare it."""
        parts = (*(result.text for result in self.results), self.text)
        return "\n".join((*parts, *(call.key for call in self.calls)))


def joined(messages: Sequence[Message]) -> Message:
    """Return messages of one role, at least one, as one. Each text is copied once."""
    text = "\n\n".join(message.text for message in messages if message.text)
    calls = tuple(call for message in messages for call in message.calls)
    results = tuple(result for message in messages for result in message.results)
    return Message(messages[0].role, text, calls, results)


@dataclass(frozen=True, slots=True)
class KeptPart:
    """The beginning of a conversation whose KV a client wants to be kept on disk for a while.

    num_messages   it ends in this message; 0 is what stands before the first
    ttl_s          for so many seconds
    text           the beginning of the message's text to which it reaches; None for its end
    """

    num_messages: int
    ttl_s: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ResentChat:
    """A system prompt, tools, and messages that alternate, the user's first.

    If the last message is the assistant's, the answer continues it. `num_added` messages at the
    beginning are not the client's.
    """

    system: str | None
    messages: tuple[Message, ...]
    tools: ToolSet | None = None
    kept: tuple[KeptPart, ...] = ()
    num_added: int = 0

    @property
    def is_continuation(self) -> bool:
        return self.messages[-1].role is Role.ASSISTANT

    @property
    def needs_tools(self) -> bool:
        """Whether the template has to write tools or calls."""
        return bool(self.tools) or any(message.calls for message in self.messages)


def resent_chat(
    system: str | None, messages: Iterable[Message], tools: ToolSet | None = None
) -> ResentChat:
    """Join neighbouring messages of one role; raises UsageError without a user message first.

    Results have to follow an answer with as many calls.
    """
    groups = [list(group) for _, group in groupby(messages, lambda message: message.role)]
    merged = [joined(group) for group in groups]
    if not merged:
        raise UsageError("There is no message to answer.")
    if merged[0].role is not Role.USER:
        raise UsageError("The first message has to be the user's.")
    last = merged[-1]
    if not last.text.strip() and not last.results:
        raise UsageError("The last message is empty.")
    if last.calls:
        raise UsageError("The last message calls a tool, but there is no result.")
    for number, message in enumerate(merged):
        num_calls = len(merged[number - 1].calls) if number else 0
        if len(message.results) > num_calls:
            raise UsageError("There is a result of a tool without a call before it.")
    return ResentChat(system or None, tuple(merged), tools)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a conversation differs from an earlier one that began alike.

    place      index of the message among the client's of the user and the assistant, where
               neighbours of one role count as one; or `system`, or `tools`
    character  index of the first other character in it
    was, now   what stood there and what stands there now, shortened
    """

    place: int | str
    character: int
    was: str
    now: str

    def counted_without(self, num_added: int) -> "Difference":
        """Return the same with a place that does not count messages at the beginning."""
        place = self.place - num_added if isinstance(self.place, int) else self.place
        return replace(self, place=place)

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
