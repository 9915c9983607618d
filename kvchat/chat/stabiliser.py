"""Stabiliser: moves lines of a system prompt that change between requests to the end.

A client that writes the time, a directory or a billing number near the top of its prompt loses the
KV of all that follows, which are the tools too with most templates. Such lines are given to the
model in a note at the end of the user's last message instead. Some are known (`volatile_lines`),
others are found where two prompts are compared. Messages keep the notes that they were sent to the
model with, so a conversation that goes on is read from its first new token.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from kvchat.chat.answer_memory import ResponseMemory
from kvchat.chat.conversation import Role
from kvchat.chat.resent_chat import Message, ResentChat

# Agents write lines that change from one session, day or directory to the next near the top of a
# system prompt, so that all behind them would be new to the cache: the rest of the
# prompt, and the tools, which most templates write behind the system prompt.

# Claude Code's line for the billing of Anthropic's own servers, which do not show it to a model
# either. Its numbers are others in every session. The text of the next block may follow directly.
_BILLING = re.compile(
    r"^x-anthropic-billing-header:(?:[ \t]*\w+=[^;\n]*;)*(?:[ \t]*\w+=[^;\s]*(?=\n|\Z))?[ \t]*\n?",
    re.M,
)
_DATE = (
    r"(?:(?:the )?(?:current|today'?s|today’s|local|system) )*(?:date|time|datetime)"
    r"(?: ?(?:and|&|/) ?time)?|timestamp|today|now"
)
_PLACE = (
    r"(?:the |current |primary |initial |your )*working (?:directory|dir|folder)|cwd|pwd"
    r"|(?:the )?current (?:workspace |project )?(?:directory|dir|folder|workspace|project)"
    r"|(?:the )?(?:workspace|project|repository|repo)(?: base| root)?(?: path| folder| directory)?"
    r"|(?:i'm |i am |you are )?currently working in (?:the )?directory"
)
_IS_REPOSITORY = r"(?:is )?(?:(?:the )?(?:working )?directory )?(?:in )?(?:a )?git repo(?:sitory)?"
_NAME = r"(?:current |git )+branch|(?:session|request|conversation)[ _-]?id"
_ITEM = r"[ \t]*(?:[-*•][ \t]+)?(?:\*\*|`)?"
_IS = r"(?:\*\*|`)?(?:[ \t]*[:=]| is(?: now)?:?)(?:\*\*)?[ \t]*"
_QUOTE = "[`'\"]?"
# What stands behind a label has to look like such a value: "Today: be nice" is a rule.
_LABELLED = re.compile(
    rf"{_ITEM}(?:(?:{_DATE}){_IS}(?=.*\d).{{1,60}}"
    rf"|(?:{_PLACE}){_IS}{_QUOTE}(?:[/~\\]|\.$|[a-z]:\\).*"
    rf"|(?:{_IS_REPOSITORY}){_IS}(?:yes|no|true|false)\b.*"
    rf"|(?:{_NAME}){_IS}\S+)[ \t]*",
    re.I,
)
_ELEMENT = re.compile(
    r"[ \t]*<((?:current[_-]?|today[_-]?)?(?:date|time|datetime|cwd|working[_-]?directory|branch))>"
    r".*</\1>[ \t]*",
    re.I,
)
# A value this long is no date and no directory.
_MOST_CHARACTERS = 300


def without_billing(system: str) -> tuple[str, list[str]]:
    """Return a system prompt without lines for the billing of other servers, and those lines."""
    lines = [match[0].strip() for match in _BILLING.finditer(system)]
    return (_BILLING.sub("", system), lines) if lines else (system, [])


def is_volatile(line: str) -> bool:
    """Return whether a line says the date, the time, a directory or a number of the session."""
    if len(line) > _MOST_CHARACTERS:
        return False
    return any(form.fullmatch(line) for form in (_LABELLED, _ELEMENT))


_MAX_PROMPTS = 8  # with the same tools
_MAX_TOOL_SETS = 64
# Comparing two prompts takes time with the product of their lines.
_MAX_LINES = 4096
# The share of two prompts that has to be equal: others are of different programs.
_LEAST_SHARE = 0.75
NOTE = "[System note]\n{}\n[End of the system note]"

_NOTHING = "What the note before says does not hold any more."

_Lines = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A system prompt; `stable` are its lines that have not changed so far."""

    stable: _Lines
    has_changed: bool = False


class Stabiliser:
    """Knows the latest prompts, and the notes of conversations. One thread uses it.

    Owns its records until `close`.

    records       where prompts and notes are kept
    is_for_all    whether it changes the prompts of all chats, or of those with tools alone, which
                  are agents'. Lines for the billing of other servers are left out of all
    """

    def __init__(self, records: ResponseMemory, is_for_all: bool = True) -> None:
        self._records = records
        self._is_for_all = is_for_all
        # By the digest of the tools, the latest first: reading them is slower than using them.
        self._prompts: dict[str, list[_Prompt]] = {}

    def stabilised(self, chat: ResentChat, is_kept: bool = True) -> ResentChat:
        """Return a conversation with the lines that change in notes.

        With `is_kept` false nothing is remembered: the conversation is only counted.
        """
        system, billing = without_billing(chat.system or "")
        lines = tuple(system.split("\n"))
        is_changed = self._is_for_all or bool(chat.tools)
        if not system or len(lines) > _MAX_LINES or not is_changed:
            return replace(chat, system=system or None, moved=tuple(billing))
        tools = _digest(chat.tools.text if chat.tools is not None else "")
        known = tuple(line for line in lines if not is_volatile(line))
        stable = self._stable_lines(tools, known, is_kept)
        moved = _beside(stable, lines)
        text = "\n".join(stable)
        messages = self._noted(f"{tools}\0{text}", chat.messages, "\n".join(moved), is_kept)
        moved = (*billing, *moved)
        return replace(chat, system=text or None, messages=messages, moved=moved)

    def close(self) -> None:
        self._records.close()

    def _stable_lines(self, tools: str, lines: _Lines, is_kept: bool) -> _Lines:
        """Return the lines of a prompt that are not known to change."""
        prompts = self._known_prompts(tools)
        for prompt in prompts:
            common = _common(prompt.stable, lines)
            if not _is_most(common, lines) or not _is_most(common, prompt.stable):
                continue
            has_changed = prompt.has_changed or common != prompt.stable or common != lines
            if is_kept:
                others = [known for known in prompts if known is not prompt]
                now = _Prompt(common, has_changed)
                self._keep(tools, [now, *others], is_new=now != prompt)
            return common if has_changed else lines
        if is_kept:
            self._keep(tools, [_Prompt(lines), *prompts], is_new=True)
        return lines

    def _known_prompts(self, tools: str) -> list[_Prompt]:
        """Return the prompts that are known with these tools, the latest first."""
        if tools not in self._prompts:
            return _prompts_in(self._records.find(f"prompts {tools}"))
        return self._prompts[tools]

    def _keep(self, tools: str, prompts: list[_Prompt], is_new: bool) -> None:
        """Keep the prompts with these tools; on the disk only where one is new."""
        self._prompts.pop(tools, None)
        self._prompts[tools] = prompts[:_MAX_PROMPTS]
        if len(self._prompts) > _MAX_TOOL_SETS:
            del self._prompts[next(iter(self._prompts))]
        if is_new:
            told = [(prompt.stable, prompt.has_changed) for prompt in prompts[:_MAX_PROMPTS]]
            self._records.put(f"prompts {tools}", {"prompts": told})

    def _noted(
        self, opening: str, messages: tuple[Message, ...], note: str, is_kept: bool
    ) -> tuple[Message, ...]:
        """Return the messages with the notes that they had, and one for the last question.

        A note that says the same as the one before it is not needed. One that holds no more is
        followed by one that says so.
        """
        noted, before = list(messages), ""
        last = max(i for i, message in enumerate(messages) if message.role is Role.USER)
        for index, name in enumerate(_names(opening, messages[: last + 1])):
            if messages[index].role is not Role.USER:
                continue
            if index < last:
                found = _note_in(self._records.find(name))
            else:
                now = note or (_NOTHING if before else "")
                found = now if now != before else ""
                if found and is_kept:
                    self._records.put(name, {"note": found})
            if found:
                before = found
                noted[index] = _with_note(messages[index], found)
        return tuple(noted)


def _prompts_in(record: dict[str, Any] | None) -> list[_Prompt]:
    """Return the prompts in a record, none of one that this program did not write."""
    try:
        found = [(list(lines), is_changed) for lines, is_changed in (record or {})["prompts"]]
    except (LookupError, TypeError, ValueError):
        return []
    is_good = all(isinstance(line, str) for lines, _ in found for line in lines)
    return [_Prompt(tuple(lines), bool(is_changed)) for lines, is_changed in found if is_good]


def _note_in(record: dict[str, Any] | None) -> str:
    note = (record or {}).get("note")
    return note if isinstance(note, str) else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _names(opening: str, messages: tuple[Message, ...]) -> Iterator[str]:
    """Yield the name of each message's note: it stands for all up to the message."""
    hash_ = hashlib.blake2b(opening.encode(errors="surrogatepass"), digest_size=16)
    for message in messages:
        hash_.update(f"\0{message.role}\0{message.whole}".encode(errors="surrogatepass"))
        yield f"note {hash_.hexdigest()}"


def _with_note(message: Message, note: str) -> Message:
    texts = (message.text, NOTE.format(note))
    return replace(message, text="\n\n".join(text for text in texts if text))


def _common(one: _Lines, other: _Lines) -> _Lines:
    """Return the lines of both, in their order; all of `one` where `other` has them all."""
    left = iter(other)
    if all(line in left for line in one):
        return one
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return tuple(line for block in blocks for line in one[block.a : block.a + block.size])


def _beside(stable: _Lines, lines: _Lines) -> _Lines:
    """Return the lines that are not stable; white space alone is not told."""
    place, others = 0, []
    for line in lines:
        if place < len(stable) and stable[place] == line:
            place += 1
        elif line.strip():
            others.append(line)
    return tuple(others)


def _is_most(some: _Lines, lines: _Lines) -> bool:
    return sum(map(len, some)) >= _LEAST_SHARE * sum(map(len, lines)) > 0
