"""ScriptPage: where commands write when a script gives them: plain lines, and nobody to ask.

What needs somebody at a screen is refused in a sentence. Knows that there is no terminal; knows
nothing of streams.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from kvchat.core.errors import UsageError
from kvchat.terminal.face import Choice
from kvchat.terminal.leaves import Sheet
from kvchat.terminal.paint import Painter, Row


class ScriptPage:
    """Implements `Page`. `write_text` takes whole lines; `columns` is how wide they may be."""

    def __init__(self, write_text: Callable[[str], None], painter: Painter, columns: int) -> None:
        assert painter.look.is_plain, "a script's output has no escape sequences"
        self.painter = painter
        self._write_text = write_text
        self._columns = columns

    @property
    def sheet(self) -> Sheet:
        return Sheet(self.painter, self._columns)

    @property
    def prompt_text(self) -> str:
        return ""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows without the empty ones around them, which only part things on a screen."""
        text = self.painter.ansi(rows).strip("\n")
        if text:
            self._write_text(f"{text}\n")

    def write_turn(self, text: str, is_said_now: bool = True) -> None:
        """Write what the user said before; what is said now is the script's own line."""
        if not is_said_now:
            self.write(self.painter.wrapped(f"You: {text}", self._columns))

    def put_text(self, text: str) -> None:
        """There is no prompt to put it into: the script sends what it means to send."""

    async def choose(self, title: str, choices: Sequence[Choice], current: int = 0) -> int | None:
        raise UsageError(
            f"“{title}” takes somebody at a terminal.",
            "In a script, name what you want after the command.",
        )

    @asynccontextmanager
    async def lent(self, takes_interrupts: bool = True) -> AsyncIterator[None]:
        yield

    async def edit(self, text: str) -> str:
        raise UsageError("An editor takes a terminal.", "In a script, a line is the message.")

    def unlearn(self, texts: Collection[str]) -> None:
        """A script's lines are not remembered."""

    def copy(self, text: str) -> None:
        raise UsageError("A script has no clipboard.", "/export writes a file.")
