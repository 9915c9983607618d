"""ScriptCommands: carries out slash commands between the turns of a script.

The very commands of the interactive chat, one after another, each to its end. Knows no streams and
no exit codes; whoever runs the script asks what answer a command wants, and writes it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvchat.chat.reply import Reply
from kvchat.chat.session import AskOptions
from kvchat.core.errors import UsageError
from kvchat.terminal.command_context import CommandContext
from kvchat.terminal.commands import Invocation, Registry
from kvchat.terminal.desk import Desk
from kvchat.terminal.face import Page
from kvchat.terminal.status import Price, price_line


@dataclass(frozen=True, slots=True)
class Wish:
    """An answer that is wanted: `ask` begins it."""

    ask: Callable[[], Reply]
    num_samples: int = 1


class ScriptCommands(CommandContext):
    """`has_left` once a command has ended the run."""

    def __init__(self, desk: Desk, page: Page, registry: Registry, shows_stats: bool) -> None:
        self.desk = desk
        self.registry = registry
        self.shows_stats = shows_stats
        self.has_left = False
        self._page = page
        self._wish: Wish | None = None

    @property
    def face(self) -> Page:
        return self._page

    def carry_out(self, line: Invocation) -> Wish | None:
        """Carry out a command; return the answer it wants. Raises what kept it from its work."""
        self._wish = None
        asyncio.run(line.command.run(self, line.arguments))
        return self._wish

    # What commands use

    def notice(self, text: str) -> None:
        self.say(text)

    def show_stage(self, stage: str) -> None:
        """Nobody watches it load."""

    async def confirm(self, question: str) -> bool:
        raise UsageError(f"{question} Only somebody at a terminal can say yes to that.")

    async def afford(self, price: Price | None, action: str) -> bool:
        """Say the price, and pay it: a script asks for what it wants."""
        if price is not None and not price.is_cheap:
            self.say(f"{action} {price_line(price)}.")
        return True

    def answer_again(self, options: AskOptions) -> None:
        self.desk.user_turn("")
        self._wish = Wish(lambda: self.desk.retry(options), options.num_samples)

    def continue_answer(self) -> None:
        self.desk.require_conversation()
        self._wish = Wish(self.desk.continue_answer)

    def quit(self, code: int) -> None:
        self.has_left = True

    def conversation_changed(self) -> None:
        """There are no figures on display."""

    def refresh(self) -> None:
        """There is nothing on display."""
