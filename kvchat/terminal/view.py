"""View and Listener: the interfaces between the chat and the terminal, in both directions.

There are two views: the live prompt (`prompt.py`), and plain lines (`line_view.py`) for screen
readers and for terminals that cannot move the cursor. Commands use only the Page part of a view;
scripts implement only that part (`script_commands.py`).
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kvchat.terminal.paint import Painter, RenderContext, Row
from kvchat.terminal.theme import Role


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a picker. `detail` is shown after the label, dimmed.

    name        what a new title is made from, if the choice can be renamed
    preview     lines below the list while it is the current choice
    searched    more text that the filter searches, in lower case
    is_hidden   shown after a key, or if a search finds hidden ones alone; `is_gone` never
    """

    label: str
    detail: str = ""
    name: str = ""
    preview: tuple[str, ...] = ()
    searched: str = ""
    is_hidden: bool = False
    is_gone: bool = False

    @property
    def searched_text(self) -> str:
        return f"{self.label} {self.detail} ".lower() + self.searched


class PickerActions(Protocol):
    """What can be done in a picker besides picking. Indexes are those of its choices."""

    def highlighted(self, index: int | None) -> None:
        """Another choice is the current one; None for no choice."""

    def rename(self, index: int, title: str) -> None:
        """Give a choice another title, or tell why not."""

    def delete(self, index: int) -> None:
        """Delete what a choice stands for, or tell why not."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """The content of the region below the finished rows, which is redrawn.

    tail       rows of the answer that may still change
    progress   one line about a long operation
    notice     one line in reply to a key; the next key removes it
    queue      messages waiting; `edited` is the index of the one in the prompt
    commands   commands that wait for another one
    toolbar    returns the toolbar's text for a width in columns
    is_open    whether an answer's rows stand above, and not yet its last: rows that are not the
               answer's own wait, and are shown below it meanwhile, or announced
    """

    tail: Sequence[Row] = ()
    progress: str = ""
    notice: str = ""
    queue: tuple[str, ...] = ()
    edited: int | None = None
    commands: tuple[str, ...] = ()
    toolbar: Callable[[int], str] = field(default=lambda width: "")
    is_open: bool = False


class Page(Protocol):
    """Output and questions of commands. Used on the event loop only."""

    painter: Painter

    @property
    def render_context(self) -> RenderContext:
        """The painter and width that rows must currently be laid out for."""

    @property
    def num_rows(self) -> float:
        """The rows of the screen; infinity where there is none that scrolls rows away."""

    def has_room(self, rows: Sequence[Row]) -> bool:
        """Whether all of these rows would be seen at once, now, below the line that asked."""

    @property
    def prompt_text(self) -> str:
        """The text in the prompt."""

    def write(self, rows: Sequence[Row]) -> None:
        """Show rows permanently."""

    def write_turn(self, text: str, is_said_now: bool = True) -> None:
        """Show a user message permanently; `is_said_now` if it has just been typed."""

    def put_text(self, text: str) -> None:
        """Replace the prompt's text."""

    async def choose(
        self,
        title: str,
        choices: Sequence[Choice],
        current: int = 0,
        actions: PickerActions | None = None,
    ) -> int | None:
        """Return the index that the user picks, None if cancelled; UsageError without a user."""

    def choices_changed(self) -> None:
        """Show the choices of the open picker as they are now."""

    def lent(self, takes_interrupts: bool = True) -> AbstractAsyncContextManager[None]:
        """Release the terminal to another program, such as an editor or a download bar.

        `takes_interrupts` says that the other program handles Ctrl-C; if false, Ctrl-C leaves
        kvchat.
        """

    async def edit(self, text: str) -> str:
        """Let the user edit a text in their editor; return the edited text."""

    def unlearn(self, session_ids: Collection[str], texts: Collection[str]) -> None:
        """Bring back nothing that was typed in these conversations, and none of these messages."""

    def copy(self, text: str) -> None:
        """Ask the user's terminal to put a text on its clipboard; UsageError if not possible."""


class PlainPage:
    """The part that all pages of plain lines share: no prompt to fill, no picker, no history."""

    num_rows = math.inf
    prompt_text = ""

    def __init__(self, painter: Painter, columns: int) -> None:
        self.painter = painter
        self._columns = columns

    @property
    def render_context(self) -> RenderContext:
        return RenderContext(self.painter, self._columns)

    def has_room(self, rows: Sequence[Row]) -> bool:
        return True

    def choices_changed(self) -> None:
        """Do nothing: printed choices do not change."""

    def unlearn(self, session_ids: Collection[str], texts: Collection[str]) -> None:
        """Do nothing: plain lines have no input history."""


class View(Page, Protocol):
    """A page with a prompt and a changing region below it."""

    @property
    def max_tail_rows(self) -> int:
        """The most rows of an open block to show; 0 if the view cannot show any."""

    def write(self, rows: Sequence[Row], state: LiveState | None = None) -> None:
        """Show rows permanently above the prompt, and with them a new state below, if given.

        Without a state they are not an answer's: while the state `is_open`, they wait for its end.
        """

    def put_back(self, text: str, gives_way: bool = False) -> None:
        """Put refused text back into the prompt, with the cursor at its end.

        What is typed next takes its place if it `gives_way`; a command also takes a command's.
        """

    def show(self, state: LiveState) -> None:
        """Show another state below the finished rows soon."""

    async def run(self, listener: "Listener") -> None:
        """Pass input to `listener` until `leave` is called or the input ends."""

    def leave(self) -> None:
        """End `run` soon; `run` restores the terminal before it returns. Text in the prompt goes to
        the input history.
        """

    @property
    def keeps_history(self) -> bool:
        """Whether all that was typed is in the input history of the next chat."""


def tell(page: Page, text: str, role: Role = Role.NOTE, gap: bool = True, hanging: int = 0) -> None:
    """Show a sentence or a few lines permanently; with `gap`, an empty row follows.

    What does not fit in a line's first row is indented by `hanging` cells.
    """
    rows = page.painter.wrapped(text, page.render_context.width, role, hanging)
    page.write([*rows, *([page.painter.text("")] if gap else [])])


class Listener(Protocol):
    """Receives keys and lines from a view. No method blocks."""

    @property
    def is_answering(self) -> bool:
        """Whether there is an answer, or a long command, that Esc and Ctrl-C would stop."""

    @property
    def stoppable_name(self) -> str:
        """What Esc and Ctrl-C would stop, with its article, such as "the answer"."""

    @property
    def is_at_work(self) -> bool:
        """Whether more output may come without input: an answer, or a running command's."""

    @property
    def has_queue(self) -> bool:
        """Whether there are waiting messages to edit."""

    @property
    def has_warned(self) -> bool:
        """Whether the user was told what leaving loses, and has sent nothing since."""

    def accept(self, text: str) -> None:
        """Handle a message or a command."""

    def stop(self) -> None:
        """Stop the answer or the command in progress."""

    def notice(self, text: str) -> None:
        """Show a line until the next key."""

    def key_pressed(self) -> None:
        """Remove the notice, at any key."""

    def draft_changed(self, text: str) -> None:
        """The prompt's text has changed."""

    def edit_queue(self, current: str, step: int) -> str | None:
        """Move through the waiting messages; return the text to edit, None to change nothing."""

    def stop_editing(self) -> None:
        """Stop editing, after the prompt was cleared; the message keeps its earlier text."""

    def rewind(self) -> None:
        """Let the user go back to an earlier message."""

    def show_sibling(self, step: int) -> None:
        """Go to another answer to the same message."""

    def toggle_stats(self) -> None:
        """Switch the statistics line on or off."""

    def leave(self, code: int) -> None:
        """Leave with an exit code, unless something would be lost that was not said before."""

    def quit(self, code: int) -> None:
        """Leave with an exit code, whatever is lost."""

    def input_ended(self) -> None:
        """The input has ended, and the view is ending."""

    def terminal_lost(self) -> None:
        """Writing to the terminal has failed."""

    def failed(self, error: Exception) -> None:
        """A background operation of the view has failed."""
