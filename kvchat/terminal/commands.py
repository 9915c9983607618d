"""Slash commands: their definition, the parser of typed lines, and the interface they use.

A line is a command only if its first word names one. Anything that may be a path, a comment or a
pasted text is a message. `commands_*.py` implement the commands. A CommandContext gives them the
conversation and a page for output; `Dialogue` and `ScriptCommands` implement it.
"""

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Turn
from kvchat.chat.events import AnswerEnded
from kvchat.core.stats import Cost
from kvchat.core.text import one_line
from kvchat.terminal import warmth
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Role
from kvchat.terminal.view import Choice, Page, tell
from kvchat.tools.toolbox import Toolbox

T = TypeVar("T")

# The commands of every day, in the order of use.
DAILY = (
    *("help", "retry", "edit", "undo", "new", "resume"),
    *("file", "model", "system", "tree", "exit"),
)

# A path, or a comment of a programming language.
_NO_COMMAND = re.compile(r"/[^/]*/|/[*]")
_MIN_PREFIX_CHARS = 3
_PUNCTUATION = "?!.,:;"
# Two letters that changed places in a word of three; "nonsense" and "tokens" are less alike.
_MIN_LIKENESS = 0.65


class Group(StrEnum):
    """The groups of commands in /help."""

    CONVERSATION = "conversation"
    TURNS = "turns"
    INPUT = "input"
    ENGINE = "engine"


class Argument(StrEnum):
    """The kind of argument that completion offers after a command's name."""

    NOTHING = "nothing"
    PATH = "path"
    PIN = "pin"
    ATTACHABLE = "attachable"  # a path or a pin
    SESSION = "session"
    SETTING = "setting"
    COMMAND = "command"
    TURN = "turn"
    PRESET = "preset"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `run` receives the context and the text typed after the name.

    It has the name of `run`, and its help is the docstring. One that `takes_turn` waits for answers
    and other such commands. `subcommands` are words that completion offers as the first argument.
    """

    run: "Callable[[CommandContext, str], Coroutine[object, object, None]]"
    group: Group
    usage: str = ""
    aliases: tuple[str, ...] = ()
    takes_turn: bool = True
    argument: Argument = Argument.NOTHING
    subcommands: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.run.__name__.rstrip("_")

    @property
    def help(self) -> str:
        return self.run.__doc__ or ""

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class Message:
    """The line is a message for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Invocation:
    """The line is a command."""

    command: Command
    arguments: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The line looks like a command but names none; `suggestion` is the closest name, or None."""

    name: str
    suggestion: str | None

    def __str__(self) -> str:
        name = one_line(self.name, 32)
        close = f"Did you mean /{self.suggestion}?" if self.suggestion else "/help lists them."
        if name == f"{self.suggestion}?":  # the question would repeat what was typed
            close = f"Without the question mark it is /{self.suggestion}."
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
        """Return the command with a name, an alias, or a unique prefix of one; None if none."""
        word = word.lower()
        if word in self._by_word:
            return self._by_word[word]
        if len(word) < _MIN_PREFIX_CHARS:
            return None
        found = {c.name: c for w, c in self._by_word.items() if w.startswith(word)}
        return next(iter(found.values())) if len(found) == 1 else None

    def closest(self, word: str) -> str | None:
        """Return the name that is closest to an unknown word, None if no name is close."""
        word = word.lower()
        if not word:
            return None
        begun = [known for known in self._by_word if known.startswith(word)]
        close = begun or difflib.get_close_matches(word, self._by_word, 1, _MIN_LIKENESS)
        return close[0] if close else None

    def parse(self, line: str, is_typed: bool = False) -> Line:
        """Return a line as a message, a command, or an unknown command.

        One that was typed at the prompt and begins with `!` is a command for the shell.
        """
        if is_typed and line.startswith("!") and line[1:].strip() and "\n" not in line.rstrip():
            return Invocation(self._by_word["run"], line[1:].strip())
        if line.strip() == "?":
            line = "/help"
        elif line.strip() == ":q":
            line = "/exit"
        if not line.startswith("/") or "\n" in line.rstrip():
            return Message(line)
        first, _, rest = line.rstrip().partition(" ")
        if _NO_COMMAND.match(first):
            return Message(line)
        command = self.find(first[1:])
        if command is None:
            return Unknown(first[1:], self.closest(first[1:].rstrip(_PUNCTUATION)))
        return Invocation(command, rest.strip())


class Stopped(Exception):
    """The user has stopped a command; its text says what that leaves."""


class CommandContext(ABC):
    """The interface that commands use, on the event loop only.

    `stats_level` says which figures follow every answer, `toolbox` which tools there are.
    `is_at_terminal` is whether a person types the commands.
    """

    is_at_terminal = True
    controller: ChatController
    registry: Registry
    stats_level: StatsLevel
    toolbox: Toolbox | None

    @property
    @abstractmethod
    def page(self) -> Page:
        """The page for output and questions."""

    # Output and questions
    def say(self, text: str, role: Role = Role.NOTE, gap: bool = True, hanging: int = 0) -> None:
        """Show a text permanently; `hanging` as in `tell`."""
        tell(self.page, text, role, gap, hanging)

    def notice(self, text: str) -> None:
        """Show a short text, for a moment where that is possible."""
        self.say(text)

    @abstractmethod
    def show_stage(self, stage: str) -> None:
        """Show what is being loaded; "" shows nothing."""

    async def stoppable(self, work: Awaitable[T], stage: str, if_stopped: str) -> T:
        """Wait for a part of a command that may take long, and show its stage meanwhile.

        Esc, where there are keys, cancels it and raises Stopped with the words `if_stopped`, which
        end the command.
        """
        return await work

    async def confirm(self, question: str, for_scripts: bool | None = None) -> bool:
        """Ask a question whose safe answer is no; a script answers `for_scripts`, or fails."""
        index = await self.page.choose(question, [Choice("no"), Choice("yes")])
        return index == 1

    async def confirm_cost(
        self, cost: Cost | None, action: str, verb: str = "re-reads", gap: bool = True
    ) -> bool:
        """Say what an action costs unless that is low, and ask a person if it is high."""
        if cost is None or cost.is_low:
            return True
        self.say(f"{warmth.price(cost, action, verb)}.", gap=gap)
        if not (cost.is_high and self.is_at_terminal) or await self.confirm("Do it all the same?"):
            return True
        self.say("Nothing is changed.")
        return False

    # Requests for after the command
    @abstractmethod
    def answer_again(self, options: AskOptions) -> None:
        """Answer the last message again, after the command."""

    @abstractmethod
    def continue_answer(self) -> None:
        """Continue the last answer, after the command."""

    @abstractmethod
    def send_instead(self, turn: Turn, text: str) -> None:
        """Send a message in place of an earlier one, after the command."""

    @abstractmethod
    def ask_aside(self, question: str) -> None:
        """Answer a question that does not join the conversation, after the command."""

    @abstractmethod
    async def show_summary(self, plan: CompactionPlan, focus: str) -> AnswerEnded:
        """Let the model summarise, and show the summary; raises the error that prevented it."""

    @abstractmethod
    def hide_thinking(self, is_hidden: bool) -> None:
        """Leave thinking out of the answers that are shown, or show it again."""

    @abstractmethod
    def quit(self, code: int) -> None:
        """Leave, after the command."""

    def leave(self, code: int) -> None:
        """Leave, after the command, on the user's word; a script is asked nothing."""
        self.quit(code)

    def set_stats(self, level: StatsLevel) -> str:
        """Choose the figures after answers; return a sentence that confirms it."""
        self.stats_level = level
        words = {StatsLevel.OFF: "off", StatsLevel.LINE: "one line", StatsLevel.ALL: "all figures"}
        return f"Statistics after answers: {words[level]}."

    # Notifications
    @abstractmethod
    def conversation_changed(self) -> None:
        """Update the view, after the tip moved or another conversation was opened."""

    @abstractmethod
    def refresh(self) -> None:
        """Redraw, because something on the screen may be out of date."""
