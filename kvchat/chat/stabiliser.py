"""Stabiliser: moves lines of a system prompt that change between requests to the end.

A client that writes the time or a billing number near the top of its prompt loses the KV of all
that follows, at every request. With `--stabilise` such lines are given to the model in a note at
the end of the user's last message instead. Messages keep the notes that they were sent to the model
with, so a conversation that goes on is read from its first new token.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import takewhile

from kvchat.chat.conversation import Role
from kvchat.chat.resent_chat import Message, ResentChat

_MAX_PROMPTS = 16
_MAX_CHATS = 64
# Comparing two prompts takes time with the product of their lines.
_MAX_LINES = 4096
# The share of two prompts that has to be equal: others are of different programs.
_LEAST_SHARE = 0.75
NOTE = "[System note]\n{}\n[End of the system note]"

_Lines = tuple[str, ...]


@dataclass(slots=True)
class _Prompt:
    """A system prompt with these tools; `stable` are its lines that have not changed so far."""

    tools: str
    stable: _Lines
    has_changed: bool = False


@dataclass(frozen=True, slots=True)
class _Noted:
    """A conversation as the client sent it, and the notes by the index of their message."""

    tools: str
    system: str
    messages: tuple[Message, ...]
    notes: dict[int, str] = field(default_factory=dict)


class Stabiliser:
    """Knows the latest prompts and conversations, as texts in memory. One thread uses it."""

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque(maxlen=_MAX_PROMPTS)
        self._chats: deque[_Noted] = deque(maxlen=_MAX_CHATS)

    def stabilised(self, chat: ResentChat, is_kept: bool = True) -> ResentChat:
        """Return a conversation with the lines that change in notes.

        With `is_kept` false nothing is remembered: the conversation is only counted.
        """
        lines = tuple((chat.system or "").split("\n"))
        tools = chat.tools.text if chat.tools is not None else ""
        if not chat.system or len(lines) > _MAX_LINES:
            return chat
        stable = self._stable_lines(tools, lines, is_kept)
        if stable is None:
            return chat
        system = "\n".join(stable)
        noted = self._noted(tools, system, chat.messages, "\n".join(_beside(stable, lines)))
        if is_kept:
            self._keep(noted)
        return replace(chat, system=system, messages=tuple(_with_notes(noted)))

    def _stable_lines(self, tools: str, lines: _Lines, is_kept: bool) -> _Lines | None:
        """Return the lines of a prompt that do not change, None if none of it is known to."""
        for prompt in reversed(self._prompts):
            if prompt.tools != tools:
                continue
            common = _common(prompt.stable, lines)
            if not _is_most(common, lines) or not _is_most(common, prompt.stable):
                continue
            has_changed = prompt.has_changed or common != prompt.stable or common != lines
            if is_kept:
                prompt.stable, prompt.has_changed = common, has_changed
            return common if has_changed else None
        if is_kept:
            self._prompts.append(_Prompt(tools, lines))
        return None

    def _noted(self, tools: str, system: str, messages: tuple[Message, ...], note: str) -> _Noted:
        """Return a conversation with the notes that it had, and one for its last question.

        A note that says the same as the one before it is not needed.
        """
        notes: dict[int, str] = {}
        num_equal = 0
        for known in reversed(self._chats):
            length = _num_equal(known.messages, messages)
            if (known.tools, known.system) == (tools, system) and length > num_equal:
                num_equal = length
                notes = {i: text for i, text in known.notes.items() if i < length}
        last = max(i for i, message in enumerate(messages) if message.role is Role.USER)
        before = [notes[i] for i in sorted(notes) if i < last]
        notes = {i: text for i, text in notes.items() if i < last}
        if note and before[-1:] != [note]:
            notes[last] = note
        return _Noted(tools, system, messages, notes)

    def _keep(self, noted: _Noted) -> None:
        for known in self._chats:
            is_same = (known.tools, known.system) == (noted.tools, noted.system)
            if is_same and noted.messages[: len(known.messages)] == known.messages:
                self._chats.remove(known)  # this one continues it
                break
        self._chats.append(noted)


def _with_notes(noted: _Noted) -> list[Message]:
    messages = list(noted.messages)
    for index, note in noted.notes.items():
        texts = (messages[index].text, NOTE.format(note))
        text = "\n\n".join(text for text in texts if text)
        messages[index] = replace(messages[index], text=text)
    return messages


def _common(one: _Lines, other: _Lines) -> _Lines:
    """Return the lines of both, in their order; all of `one` where `other` has them all."""
    left = iter(other)
    if all(line in left for line in one):
        return one
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return tuple(line for block in blocks for line in one[block.a : block.a + block.size])


def _beside(stable: _Lines, lines: _Lines) -> list[str]:
    """Return the lines that are not stable; white space alone is not told."""
    left = list(stable)
    others = []
    for line in lines:
        if left and left[0] == line:
            left.pop(0)
        elif line.strip():
            others.append(line)
    return others


def _is_most(some: _Lines, lines: _Lines) -> bool:
    return sum(map(len, some)) >= _LEAST_SHARE * sum(map(len, lines)) > 0


def _num_equal(before: tuple[Message, ...], now: tuple[Message, ...]) -> int:
    pairs = zip(before, now, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
