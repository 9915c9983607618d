"""Slash commands in script input: the chat's own commands, with plain lines and no questions.

ScriptCommands runs them one after another, and returns the answer that a command requests.
ScriptPage takes their output, and refuses what needs an interactive user.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Turn
from kvchat.chat.events import AnswerEnded
from kvchat.chat.making_room import summarise
from kvchat.chat.reply import Reply
from kvchat.core.errors import UsageError
from kvchat.terminal.commands import CommandContext, Invocation, Registry
from kvchat.terminal.paint import Painter, Row
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.view import Choice, Page, PickerActions, PlainPage
from kvchat.tools.toolbox import Toolbox


class ScriptPage(PlainPage):
    """Implements `Page`. `write_text` takes whole lines of at most `columns` cells."""

    def __init__(self, write_text: Callable[[str], None], painter: Painter, columns: int) -> None:
        assert painter.look.is_plain, "a script's output has no escape sequences"
        super().__init__(painter, columns)
        self._write_text = write_text

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows without the empty rows around them, which only separate blocks on a screen."""
        text = self.painter.ansi(rows).strip("\n")
        if text:
            self._write_text(f"{text}\n")

    def write_turn(self, text: str, is_said_now: bool = True) -> None:
        """Write an earlier user message; nothing for a current one, the script's own line."""
        if not is_said_now:
            self.write(self.painter.wrapped(f"You: {text}", self._columns))

    def put_text(self, text: str) -> None:
        """Do nothing: a script has no prompt."""

    async def choose(
        self,
        title: str,
        choices: Sequence[Choice],
        current: int = 0,
        actions: PickerActions | None = None,
    ) -> int | None:
        raise UsageError(
            f"“{title}” needs a terminal.", "In a script, name what you want after the command."
        )

    @asynccontextmanager
    async def lent(self, takes_interrupts: bool = True) -> AsyncIterator[None]:
        yield

    async def edit(self, text: str) -> str:
        raise UsageError("An editor needs a terminal.", "In a script, a line is the message.")

    def copy(self, text: str) -> None:
        raise UsageError("A script has no clipboard.", "/export writes a file.")


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """An answer that a command requested; `ask` starts it. `goes_on` if it continues the last."""

    ask: Callable[[], Reply]
    num_samples: int = 1
    goes_on: bool = False


class ScriptCommands(CommandContext):
    """Runs commands for a script. `has_left` is true after a command has ended the run."""

    is_at_terminal = False

    def __init__(
        self,
        controller: ChatController,
        page: Page,
        registry: Registry,
        stats_level: StatsLevel,
        toolbox: Toolbox | None = None,
    ) -> None:
        self.controller = controller
        self.registry = registry
        self.stats_level = stats_level
        self.toolbox = toolbox
        self.has_left = False
        self._page = page
        self._request: AnswerRequest | None = None

    @property
    def page(self) -> Page:
        return self._page

    def carry_out(self, line: Invocation) -> AnswerRequest | None:
        """Run a command; return the answer that it requests, or None. Raises its KvchatError."""
        self._request = None
        asyncio.run(line.command.run(self, line.arguments))
        return self._request

    # What commands use

    def show_stage(self, stage: str) -> None:
        """Do nothing: a script does not show loading."""

    async def confirm(self, question: str, for_scripts: bool | None = None) -> bool:
        if for_scripts is not None:
            return for_scripts
        raise UsageError(f"{question} It has to be confirmed at a terminal.")

    def answer_again(self, options: AskOptions) -> None:
        self.controller.place.user_turn("")
        self._request = AnswerRequest(lambda: self.controller.retry(options), options.num_samples)

    def continue_answer(self) -> None:
        self.controller.require_conversation()
        self._request = AnswerRequest(self.controller.continue_answer, goes_on=True)

    def send_instead(self, turn: Turn, text: str) -> None:
        def ask() -> Reply:
            self.controller.place.edited = turn
            try:
                return self.controller.ask(text)
            finally:
                # If it was refused, the next line is a new message.
                self.controller.place.edited = None

        self._request = AnswerRequest(ask)

    def ask_aside(self, question: str) -> None:
        self.controller.require_conversation()
        self._request = AnswerRequest(lambda: self.controller.ask_aside(question))

    async def show_summary(self, plan: CompactionPlan, focus: str) -> AnswerEnded:
        """Wait for the summary, and print it with what the command says."""
        summary = await asyncio.to_thread(summarise(self.controller, plan, focus).wait)
        self.say(summary.text)
        return summary

    def hide_thinking(self, is_hidden: bool) -> None:
        raise UsageError("A script's text output has no thinking; --json has it apart.")

    def quit(self, code: int) -> None:
        self.has_left = True

    def conversation_changed(self) -> None:
        """Do nothing: a script has no toolbar."""

    def refresh(self) -> None:
        """Do nothing: a script has no live region."""
