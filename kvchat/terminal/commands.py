"""Slash commands: what one is, and what a typed line means.

A line is a command only if its first word names one; anything that might be a path, a comment or a
pasted text is a message. What the commands do is in `commands_*.py`. Knows words; knows no screen.
"""

import difflib
import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvchat.terminal.sanitize import one_line

if TYPE_CHECKING:
    from kvchat.terminal.command_context import CommandContext

_NAME = re.compile(r"/(?:\?|[A-Za-z][\w-]*)$")
_MIN_PREFIX_CHARS = 3


class Group(StrEnum):
    """How /help arranges commands."""

    CONVERSATION = "conversation"
    TURNS = "turns"
    INPUT = "input"
    ENGINE = "engine"


class Argument(StrEnum):
    """What completes after a command's name."""

    NOTHING = "nothing"
    PATH = "path"
    SESSION = "session"
    SETTING = "setting"
    COMMAND = "command"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `run` gets the dialogue and what was typed after the name."""

    name: str
    help: str
    run: "Callable[[CommandContext, str], Coroutine[object, object, None]]"
    group: Group
    usage: str = ""
    aliases: tuple[str, ...] = ()
    is_available_while_answering: bool = False
    argument: Argument = Argument.NOTHING

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class Message:
    """The line is for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Invocation:
    """The line is a command."""

    command: Command
    arguments: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The line looks like a command and is none; `suggestion` is the closest there is."""

    name: str
    suggestion: str | None

    def __str__(self) -> str:
        name = one_line(self.name, 32)
        close = f"Did you mean /{self.suggestion}?" if self.suggestion else "/help lists them."
        return f"There is no command /{name}. {close} (After a space it is a message.)"


Line = Message | Invocation | Unknown


class Registry:
    """All commands by their names and aliases."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self.commands = tuple(commands)
        self._by_word: dict[str, Command] = {}
        for command in self.commands:
            for word in command.words:
                assert word not in self._by_word, f"two commands are called {word}"
                self._by_word[word] = command

    def find(self, word: str) -> Command | None:
        """Return the command of a name, an alias, or an unambiguous beginning of one."""
        word = word.lower()
        if word in self._by_word:
            return self._by_word[word]
        if len(word) < _MIN_PREFIX_CHARS:
            return None
        found = {c.name: c for w, c in self._by_word.items() if w.startswith(word)}
        return next(iter(found.values())) if len(found) == 1 else None

    def closest(self, word: str) -> str | None:
        """Return the name most like a word that names nothing."""
        word = word.lower()
        begun = [known for known in self._by_word if known.startswith(word)]
        close = begun or difflib.get_close_matches(word, self._by_word, n=1, cutoff=0.5)
        return close[0] if close else None

    def parse(self, line: str) -> Line:
        """Decide what a typed line is."""
        if line.strip() == "?":
            line = "/help"
        elif line.strip() == ":q":
            line = "/exit"
        if not line.startswith("/") or "\n" in line.rstrip():
            return Message(line)
        first, _, rest = line.rstrip().partition(" ")
        if not _NAME.match(first):
            return Message(line)
        command = self.find(first[1:])
        if command is None:
            return Unknown(first[1:], self.closest(first[1:]))
        return Invocation(command, rest.strip())
