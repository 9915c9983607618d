"""CommandContext: what a slash command may use, whether a person typed it or a script sent it.

Knows the desk and a page to write on. Whether somebody sits at a terminal, and when an answer that
a command asks for comes, is its two implementations' business: `Dialogue` and `ScriptCommands`.
"""

from abc import ABC, abstractmethod

from kvchat.chat.session import AskOptions
from kvchat.terminal.commands import Registry
from kvchat.terminal.desk import Desk
from kvchat.terminal.face import Choice, Page, tell
from kvchat.terminal.status import Price, price_line
from kvchat.terminal.theme import Role


class CommandContext(ABC):
    """Used on the event loop only. `shows_stats`: a line of figures follows every answer."""

    desk: Desk
    registry: Registry
    shows_stats: bool

    @property
    @abstractmethod
    def face(self) -> Page:
        """Where commands write and ask."""

    # Talking

    def say(self, text: str, role: Role = Role.NOTE, gap: bool = True) -> None:
        """Tell the user something, for good."""
        tell(self.face, text, role, gap)

    @abstractmethod
    def notice(self, text: str) -> None:
        """Tell something that matters for the moment only."""

    @abstractmethod
    def show_stage(self, stage: str) -> None:
        """Show what is being loaded, nothing for nothing."""

    async def confirm(self, question: str) -> bool:
        """Ask a question whose safe answer is no."""
        index = await self.face.choose(question, [Choice("no"), Choice("yes")])
        return index == 1

    async def afford(self, price: Price | None, action: str) -> bool:
        """Say what an action costs where that is a lot, and ask where it is very much."""
        if price is None or price.is_cheap:
            return True
        self.say(f"{action} {price_line(price)}.")
        return not price.is_dear or await self.confirm("Do it all the same?")

    # Having something done

    @abstractmethod
    def answer_again(self, options: AskOptions) -> None:
        """Have the last message answered once more, after the command."""

    @abstractmethod
    def continue_answer(self) -> None:
        """Have the last answer gone on with, after the command."""

    @abstractmethod
    def quit(self, code: int) -> None:
        """Leave, after the command."""

    def set_stats(self, is_on: bool) -> None:
        """Switch the line of figures after answers."""
        self.shows_stats = is_on
        self.notice(f"Statistics are {'on' if is_on else 'off'}.")

    # Being told

    @abstractmethod
    def conversation_changed(self) -> None:
        """The tip has moved, or another conversation is open."""

    @abstractmethod
    def refresh(self) -> None:
        """Something that may be on the screen is stale."""
