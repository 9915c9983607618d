"""ResentChat: a conversation that a client sends as text with every request, and what it changed.

A client that changes an early message, such as a date in the system prompt, loses the KV of all
that follows. SeenChats finds that message, and the server says which it was.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, takewhile, zip_longest

from kvchat.chat.conversation import Role
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.errors import UsageError
from kvchat.core.text import one_line

_MAX_CHATS = 64
_SHOWN_CHARS, _LINE_CHARS = 40, 100
# The share of two system prompts that has to be equal to call one a change of the other.
_LEAST_SHARE = 0.75

_Lines = tuple[str, ...]


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
class SentMessage:
    """A message as the client sent it, and its index in the client's list."""

    index: int
    message: Message


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

    If the last message is the assistant's, the answer continues it. `sent` are, for each message,
    those of the client that it joins. `moved` are lines of the client's system prompt that do not
    stand in `system`.
    """

    system: str | None
    messages: tuple[Message, ...]
    tools: ToolSet | None = None
    kept: tuple[KeptPart, ...] = ()
    sent: tuple[tuple[SentMessage, ...], ...] = ()
    moved: _Lines = ()

    @property
    def is_continuation(self) -> bool:
        return self.messages[-1].role is Role.ASSISTANT

    def without_oldest(self, count: int) -> "ResentChat":
        """Return the conversation without its first `count` messages; the next is the user's."""
        kept = tuple(
            replace(part, num_messages=max(0, part.num_messages - count))
            for part in self.kept
            if not 0 < part.num_messages <= count
        )
        return replace(self, messages=self.messages[count:], sent=self.sent[count:], kept=kept)

    @property
    def needs_tools(self) -> bool:
        """Whether the template has to write tools or calls."""
        return bool(self.tools) or any(message.calls for message in self.messages)


def resent_chat(
    system: str | None,
    messages: Sequence[Message],
    tools: ToolSet | None = None,
    indexes: Sequence[int] | None = None,
) -> ResentChat:
    """Join neighbouring messages of one role; raises UsageError without a user message first.

    Results have to follow an answer with as many calls. `indexes` are those of the messages in the
    client's list, None if they are that list.
    """
    numbered = zip(indexes or range(len(messages)), messages, strict=True)
    sent = [SentMessage(index, message) for index, message in numbered]
    while len(sent) > 1 and _is_unwritten(sent[-1].message):
        del sent[-1]  # a place for the answer, as some clients send it
    groups = [tuple(group) for _, group in groupby(sent, lambda each: each.message.role)]
    merged = [joined([each.message for each in group]) for group in groups]
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
    return ResentChat(system or None, tuple(merged), tools, sent=tuple(groups))


def _is_unwritten(message: Message) -> bool:
    return message.role is Role.ASSISTANT and not message.text.strip() and not message.calls


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a conversation differs from an earlier one that began alike.

    place      index of the message, where neighbours of one role are one until `as_sent`; or
               `system`, or `tools`
    character  index of the first other character in it
    was, now   what stood there and what stands there now, shortened
    is_moved   whether it is in a line of the system prompt that does not stand there for the model:
               nothing behind it had to be read again. Then `was` and `now` are the lines
    """

    place: int | str
    character: int
    was: str
    now: str
    is_moved: bool = False

    def as_sent(self, chat: ResentChat) -> "Difference":
        """Return the same with a place in the list of the client that has sent the chat."""
        if not isinstance(self.place, int) or self.place >= len(chat.sent):
            return self
        parts = [part for part in _starts(chat.sent[self.place]) if part[0] <= self.character]
        start, index = parts[-1] if parts else (0, chat.sent[self.place][0].index)
        return replace(self, place=index, character=self.character - start)

    def as_dict(self) -> dict[str, object]:
        return {
            "message": self.place,
            "character": self.character,
            "was": self.was,
            "now": self.now,
            **({"is_moved": True} if self.is_moved else {}),
        }


def _starts(group: Sequence[SentMessage]) -> list[tuple[int, int]]:
    """Return where each message of a group begins in `Message.whole` of all, and its index.

    In it come the results of all messages, then the texts, then the calls.
    """
    messages = [(each.index, each.message) for each in group]
    results = [(index, result.text) for index, each in messages for result in each.results]
    texts = [(index, each.text) for index, each in messages if each.text]
    calls = [(index, call.key) for index, each in messages for call in each.calls]
    parts = [(index, len(text) + 1) for index, text in results]
    parts += [(index, len(text) + 2) for index, text in texts[:-1]]
    parts += [(index, len(text) + 1) for index, text in texts[-1:]]
    parts += [(index, len(text) + 1) for index, text in calls]
    ends = accumulate(length for _, length in parts)
    starts = [0, *ends][: len(parts)]
    each = zip(starts, (index for index, _ in parts), strict=True)
    return [next(group) for _, group in groupby(each, lambda part: part[1])]


class SeenChats:
    """The latest conversations, as texts in memory. One thread uses it."""

    def __init__(self) -> None:
        self._chats: deque[_Chat] = deque(maxlen=_MAX_CHATS)

    def note(
        self,
        system: str | None,
        messages: tuple[Message, ...],
        tools: ToolSet | None = None,
        moved: _Lines = (),
    ) -> Difference | None:
        """Keep a conversation; return how it differs from the one before that is most like it.

        None if it continues or repeats that one, or if nothing like it was seen. `moved` are lines
        of the system prompt that stand elsewhere.
        """
        chat = _Chat(system or "", tools.text if tools is not None else "", messages, moved)
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
                return _moved_since(known, chat)
            if length > best_length:
                best, best_length = known, length
        if best is None:
            best = self._begun_alike(chat)
        if best is None:
            return None
        if best.system != chat.system:
            return _located("system", best.system, chat.system)
        if best.tools != chat.tools:
            return _located("tools", best.tools, chat.tools)
        if best_length + 1 >= len(best.messages) or not best_length:
            return _moved_since(best, chat)  # another last message: nothing after it was fed
        was, now = best.messages[best_length], chat.messages[best_length]
        return _located(best_length, was.whole, now.whole)

    def _begun_alike(self, chat: "_Chat") -> "_Chat | None":
        """Return the latest conversation with this opening, or else with one that is like it."""
        latest = list(reversed(self._chats))
        same = (known for known in latest if known.opening == chat.opening)
        alike = (known for known in latest if known.system and known.is_like(chat))
        return next(same, None) or next(alike, None)


@dataclass(frozen=True, slots=True)
class _Chat:
    system: str
    tools: str
    messages: tuple[Message, ...]
    moved: _Lines

    def is_like(self, other: "_Chat") -> bool:
        """Whether the system prompt or the tools are the same, and most of the system prompt."""
        if self.system == other.system or self.tools != other.tools:
            return self.system == other.system
        lines, others = set(self.system.split("\n")), set(other.system.split("\n"))
        num_equal = sum(map(len, lines & others))
        return num_equal >= _LEAST_SHARE * max(sum(map(len, lines)), sum(map(len, others)))

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


def _moved_since(before: _Chat, now: _Chat) -> Difference | None:
    """Return the first line that was moved and differs, None if none does."""
    for was, line in zip_longest(before.moved, now.moved, fillvalue=""):
        if was != line:
            found = _located("system", was, line)
            was, line = one_line(was, _LINE_CHARS), one_line(line, _LINE_CHARS)
            return replace(found, was=was, now=line, is_moved=True)
    return None
