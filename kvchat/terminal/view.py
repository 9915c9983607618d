"""View: what the conversation needs from a screen, and what a screen needs from the conversation.

Two views exist: the live prompt (`prompt.py`) and plain lines (`line_view.py`) for terminals that
cannot move a cursor and for people who listen. Of a view, commands use the Page alone, and scripts
have no more than that (`script_commands.py`). Knows none of them.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kvchat.terminal.paint import Painter, RenderContext, Row
from kvchat.terminal.theme import Role


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a picker. `detail` is shown after it, quietly."""

    label: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LiveState:
    """What is shown below the finished rows, and changes.

    tail       rows of the answer that are still open
    progress   one line about what takes time
    notice     one line that answers a key, gone at the next
    queue      messages waiting; `edited` is the place of the one in the prompt
    toolbar    gives the toolbar's text for a width
    """

    tail: Sequence[Row] = ()
    progress: str = ""
    notice: str = ""
    queue: tuple[str, ...] = ()
    edited: int | None = None
    toolbar: Callable[[int], str] = field(default=lambda width: "")


class Page(Protocol):
    """Where commands write and ask. Used on the event loop only."""

    painter: Painter

    @property
    def render_context(self) -> RenderContext:
        """What rows are laid out for right now."""

    @property
    def prompt_text(self) -> str:
        """What the user has typed so far."""

    def write(self, rows: Sequence[Row]) -> None:
        """Show rows for good."""

    def write_turn(self, text: str, is_said_now: bool = True) -> None:
        """Show for good what the user said; `is_said_now` where it has just been typed."""

    def put_text(self, text: str) -> None:
        """Put a text into the prompt in place of what is there."""

    async def choose(self, title: str, choices: Sequence[Choice], current: int = 0) -> int | None:
        """Let the user pick; None where they would rather not, UsageError where nobody is there."""

    def lent(self, takes_interrupts: bool = True) -> AbstractAsyncContextManager[None]:
        """While entered the terminal is somebody else's: an editor's, a download bar's.

        Whoever has it either takes Ctrl-C as well, or Ctrl-C leaves the program.
        """

    async def edit(self, text: str) -> str:
        """Let the user edit a text in their editor; return what came of it."""

    def unlearn(self, texts: Collection[str]) -> None:
        """Forget what was typed of these messages, where it is remembered."""

    def copy(self, text: str) -> None:
        """Ask the user's terminal to put a text on its clipboard; UsageError where it cannot be."""


class View(Page, Protocol):
    """A screen: a page, and below it a prompt and what changes."""

    @property
    def max_tail_rows(self) -> int:
        """How many rows of an open block are worth showing; 0 where they cannot be."""

    def write(self, rows: Sequence[Row], state: LiveState | None = None) -> None:
        """Show rows for good, above the prompt, and in the same stroke another state below them."""

    def put_back(self, text: str) -> None:
        """Put text into the prompt that could not be used; what is typed next takes its place."""

    def show(self, state: LiveState) -> None:
        """Show something else below the finished rows, soon."""

    async def run(self, listener: "Listener") -> None:
        """Take input until `leave` is called or the input ends."""

    def leave(self) -> None:
        """End `run` soon; the terminal is as it was before when it has ended."""


def tell(page: Page, text: str, role: Role = Role.NOTE, gap: bool = True) -> None:
    """Show a sentence or a few lines for good, an empty row after them unless told otherwise."""
    rows = page.painter.wrapped(text, page.render_context.width, role)
    page.write([*rows, *([page.painter.text("")] if gap else [])])


class Listener(Protocol):
    """What a view tells: keys and lines. Everything returns at once."""

    @property
    def is_answering(self) -> bool:
        """Whether there is something Esc and Ctrl-C would stop."""

    @property
    def is_busy(self) -> bool:
        """Whether something is being answered or waits to be."""

    @property
    def is_at_work(self) -> bool:
        """Whether more may be said without anything being typed: an answer, a command's output."""

    @property
    def has_queue(self) -> bool:
        """Whether messages wait that could be edited."""

    def accept(self, text: str) -> None:
        """Take a message or a command."""

    def stop(self) -> None:
        """Stop the answer in progress."""

    def notice(self, text: str) -> None:
        """Show a line until the next key."""

    def key_pressed(self) -> None:
        """Any key: notices go."""

    def edit_queue(self, current: str, step: int) -> str | None:
        """Move through the waiting messages; return the text to edit, None to leave the prompt."""

    def stop_editing(self) -> None:
        """The prompt was cleared: what was edited stays as it was."""

    def rewind(self) -> None:
        """Let the user go back to an earlier message."""

    def show_sibling(self, step: int) -> None:
        """Go to another answer to the same message."""

    def toggle_stats(self) -> None:
        """Switch the statistics line on or off."""

    def quit(self, code: int) -> None:
        """Leave with an exit code."""

    def input_ended(self) -> None:
        """There is no more input: the view ends."""

    def terminal_lost(self) -> None:
        """The terminal cannot be written to any more."""

    def failed(self, error: Exception) -> None:
        """Something the view did by itself went wrong."""
