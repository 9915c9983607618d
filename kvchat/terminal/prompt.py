"""LivePrompt: the view for a terminal that can move its cursor; its prompt always takes input.

Finished rows go to the terminal's own scrollback and are never redrawn. Below them a small region
is redrawn: the open end of the answer, waiting messages, the prompt and a toolbar. There is no
alternate screen. Only this view writes to the terminal. Only LiveApplication uses private parts of
prompt_toolkit (3.0.51 to 3.0.53).
"""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prompt_toolkit.application import Application, in_terminal
from prompt_toolkit.application.current import set_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer
from prompt_toolkit.data_structures import Size
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.input.defaults import create_input
from prompt_toolkit.styles import Style
from rich.text import Text

from kvchat.chat.controller import ChatController
from kvchat.chat.messages import MessageNumbers
from kvchat.chat.typed_lines import TypedLines
from kvchat.core.errors import UsageError
from kvchat.core.text import one_line
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import Argument
from kvchat.terminal.completion import LineCompleter, PrivateHistory
from kvchat.terminal.history_view import turn_summary
from kvchat.terminal.key_parser import parse_keys
from kvchat.terminal.keys import build_keys
from kvchat.terminal.layout import ROWS_BELOW_ANSWER, LiveRegion, build_layout, num_below_answer
from kvchat.terminal.multiline import edit_text
from kvchat.terminal.paint import Painter, RenderContext, Row, prefixed
from kvchat.terminal.pickers import Picker
from kvchat.terminal.status import plural
from kvchat.terminal.terminal_io import HeldOutput, StrayOutput, typed_ahead
from kvchat.terminal.theme import Role
from kvchat.terminal.view import Choice, Listener, LiveState, PickerActions

# tmux wraps its lines for a new width at once, but tells the program of a second change only
# 250 ms after the first. Rows drawn in between are for a width that the window no longer has.
_SETTLING_S = 0.3


class LiveApplication(Application[None]):
    """prompt_toolkit's application, with a redraw that handles terminals that reflow.

    `reflows` says that the terminal wraps earlier lines again when it becomes narrower. After a
    change of the width it draws once and then waits until the width has settled; `on_settled` is
    called then, and has to draw.
    """

    def __init__(
        self,
        reflows: bool,
        held_output: HeldOutput,
        on_settled: Callable[[], None],
        **settings: Any,
    ) -> None:
        self._reflows = reflows
        self._held_output = held_output
        self._on_settled = on_settled
        self._drawn_columns = 0
        self._settling: asyncio.TimerHandle | None = None
        super().__init__(**settings)
        self.after_render += self._remember_width

    @property
    def is_settling(self) -> bool:
        return self._settling is not None

    def redraw_now(self) -> None:
        """Draw before returning; `invalidate` would draw later."""
        self._redraw()

    def erase_region(self) -> None:
        """Erase the region at its current place, which may be above the place it was drawn at."""
        self.output.cursor_up(self._num_rows_added())
        self.renderer.erase(leave_alternate_screen=False)

    def _remember_width(self, sender: object) -> None:
        self._drawn_columns = self.output.get_size().columns

    def _redraw(self, render_as_done: bool = False) -> None:
        """Draw, also in a window that has become wider or narrower before the signal says so."""
        screen = self.renderer.last_rendered_screen
        if screen is not None and self._drawn_columns != self.output.get_size().columns:
            with self._held_output.stroke():
                self.erase_region()
                super()._redraw(render_as_done)
            self._settle()
        elif render_as_done or not self.is_settling:
            super()._redraw(render_as_done)

    def _on_resize(self) -> None:
        self._end_settling()
        with self._held_output.stroke():
            self.erase_region()
            super()._on_resize()
        self._settle()

    def _settle(self) -> None:
        """Draw nothing for a while, unless the width changes again."""
        self._end_settling()
        if self.loop is not None and not self.is_done:
            self._settling = self.loop.call_later(_SETTLING_S, self._settled)

    def _end_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        self._settling = None

    def _settled(self) -> None:
        self._settling = None
        self._on_settled()

    def _num_rows_added(self) -> int:
        """Return how many rows a narrower terminal has added above the cursor by wrapping.

        0 if the terminal is not known to reflow: moving up would then erase rows of other output,
        which is worse than a stale row.
        """
        columns = self.output.get_size().columns
        screen = self.renderer.last_rendered_screen
        if not self._reflows or screen is None or columns >= self._drawn_columns:
            return 0
        cursor = screen.get_cursor_position(self.layout.current_window)
        added = cursor.x // columns
        for number in range(cursor.y):
            row = screen.data_buffer[number]
            used = max((x for x, cell in row.items() if cell.char != " "), default=0) + 1
            added += (used - 1) // columns
        return added


# Longer lines are hard to read, however wide the window.
_MAX_TEXT_COLUMNS = 100
# A window may change its width while rows for the other width are on their way. What a terminal
# that reflows then makes of them stays in its scrollback, so there must be few.
_MAX_TAIL_ROWS = 2
_MAX_ECHOED_ROWS = 12
_MAX_ECHOED_CHARS = 20_000  # wrapping megabytes takes seconds
# What was typed stands above what a command says; below, an empty row, the prompt, the toolbar.
_ROWS_AROUND = 4
_MAX_COPIED_BYTES = 200_000

# Esc alone, and not the first byte of an arrow key, if no byte follows within this time.
_ESCAPE_WAIT_S = 0.05
_SEQUENCE_WAIT_S = 0.3


@dataclass(frozen=True, slots=True)
class Terminal:
    """The terminal to use. Tests can replace `get_size` and `stdin`."""

    stdin: Input
    stdout: TextIO
    get_size: Callable[[], Size]
    term: str | None = None


class LivePrompt:
    """Implements `View`. `run` owns the terminal while it runs."""

    def __init__(
        self,
        terminal: Terminal,
        painter: Painter,
        completer: Completer,
        history: History,
        editor: str,
    ) -> None:
        self.painter = painter
        self.region = LiveRegion()
        self._editor = editor
        self._listener: Listener | None = None
        self._refused = ""  # the text that was put back last
        self._gives_way = False
        self._picked: asyncio.Future[int | None] | None = None
        self._num_lent = 0
        self.interrupts_leave = False
        self._waiting: list[str] = []
        self._stray = StrayOutput(self._show_stray)
        self._output = HeldOutput(terminal.stdout, terminal.get_size, terminal.term, self._lost)
        self.buffer = Buffer(
            multiline=True,
            history=history,
            completer=completer,
            complete_while_typing=Condition(self._completes_while_typing),
            auto_suggest=AutoSuggestFromHistory(),
            enable_history_search=False,
        )
        self.buffer.on_text_changed += lambda buffer: self._tell_draft(buffer.text)
        look = painter.look
        parse_keys(terminal.stdin)
        self._app = LiveApplication(
            reflows=look.reflows,
            held_output=self._output,
            on_settled=self._draw_what_waited,
            layout=build_layout(self),
            key_bindings=build_keys(self),
            style=Style.from_dict(look.prompt_styles()),
            include_default_pygments_style=False,
            input=terminal.stdin,
            output=self._output,
            erase_when_done=True,
            terminal_size_polling_interval=None,  # SIGWINCH reports it; no timer while idle
        )
        self._app.key_processor.before_key_press += lambda _: self.listener.key_pressed()
        self._app.ttimeoutlen = _ESCAPE_WAIT_S
        self._app.timeoutlen = _SEQUENCE_WAIT_S

    # The view

    @property
    def listener(self) -> Listener:
        assert self._listener is not None, "keys come while the prompt runs"
        return self._listener

    @property
    def size(self) -> Size:
        return self._output.get_size()

    @property
    def render_context(self) -> RenderContext:
        return RenderContext(self.painter, max(8, min(self.size.columns, _MAX_TEXT_COLUMNS)))

    @property
    def num_rows(self) -> float:
        return self.size.rows - (ROWS_BELOW_ANSWER if self.region.state.is_open else 0)

    def has_room(self, rows: Sequence[Row]) -> bool:
        if self.region.state.is_open:
            below = [Text("/", end=""), *rows]  # what was typed waits too, above them
            return num_below_answer(self, below) == len(below)
        return len(rows) + _ROWS_AROUND <= self.size.rows

    @property
    def max_tail_rows(self) -> int:
        return _MAX_TAIL_ROWS

    @property
    def prompt_text(self) -> str:
        return self.buffer.text

    @property
    def is_lent(self) -> bool:
        return self._num_lent > 0

    def write(self, rows: Sequence[Row], state: LiveState | None = None) -> None:
        """Show rows permanently: erase the region, write, and redraw it, as one output."""
        if state is not None:
            self.region.state = state
        elif self.region.state.is_open:
            self.region.held += rows
            self._app.invalidate()
            return
        self._write_now(rows)

    def _write_held(self) -> None:
        if self.region.held:
            held, self.region.held = self.region.held, []
            self._write_now(self.painter.refit(held, self.render_context.width))

    def _write_now(self, rows: Sequence[Row]) -> None:
        text = self.painter.ansi(rows).replace("\n", "\r\n")
        if self.is_lent or not self._app.is_running or self._app.is_settling:
            self._waiting.append(text)
            return
        self._write_above(text)

    def _write_above(self, text: str) -> None:
        with self._output.stroke():
            self._app.erase_region()
            self._output.write_raw(text)
            self._app.redraw_now()

    def write_turn(self, text: str, is_said_now: bool = True) -> None:
        """Show a user message after the prompt's glyph; of a long one only the first 12 rows."""
        glyph = self.painter.look.glyphs.prompt
        marker = Text(end="").append(f"{glyph} ", self.painter.style(Role.HEADING))
        below = Text(" " * marker.cell_len, end="")
        shown = text.strip("\n")[:_MAX_ECHOED_CHARS]
        wrapped = self.painter.wrapped(shown, self.render_context.width - 2, Role.USER)
        rows = [
            prefixed(row, below if number else marker)
            for number, row in enumerate(wrapped[:_MAX_ECHOED_ROWS])
        ]
        more = f"{len(wrapped) - len(rows)} more lines"
        if len(text) > _MAX_ECHOED_CHARS:
            more = f"{len(text):,} characters in all"
        if len(wrapped) > len(rows):
            rows.append(self.painter.text(f"  … {more}", Role.DIM))
        if not is_said_now:
            rows.append(Text(end=""))
        self.write(rows)

    def show(self, state: LiveState) -> None:
        self.region.state = state
        self._settle_history()
        if not state.is_open:
            self._write_held()
        self._app.invalidate()

    def put_text(self, text: str) -> None:
        self.buffer.reset()
        self.buffer.insert_text(text)
        self._app.invalidate()

    def put_back(self, text: str, gives_way: bool = False) -> None:
        self.put_text(text)
        self._refused = text if gives_way or text.startswith("/") else ""
        self._gives_way = gives_way

    @property
    def gives_way_to_command(self) -> bool:
        """Whether the prompt holds a text as it was put back, the cursor after it, that is a
        command or gives way.
        """
        buffer = self.buffer
        is_at_end = buffer.cursor_position == len(buffer.text)
        return bool(self._refused) and is_at_end and buffer.text == self._refused

    @property
    def gives_way_to_text(self) -> bool:
        """Whether anything typed takes the place of the text: it would join the end of it."""
        return self._gives_way and self.gives_way_to_command

    def begin_anew(self) -> None:
        """Clear the prompt for other text; Up returns what was in it."""
        self.keep_cleared()
        self.buffer.reset()

    async def choose(
        self,
        title: str,
        choices: Sequence[Choice],
        current: int = 0,
        actions: PickerActions | None = None,
    ) -> int | None:
        """Show a picker in place of the prompt; return the index picked, None if cancelled."""
        if not choices:
            return None
        self.region.picker = Picker(title, choices, current, actions)
        self._picked = asyncio.get_running_loop().create_future()
        self._app.invalidate()
        try:
            return await self._picked
        finally:
            self.region.picker = None
            self._picked = None
            self._app.invalidate()

    def choices_changed(self) -> None:
        if self.region.picker is not None:
            self.region.picker.refresh()
            self._app.invalidate()

    def pick(self, index: int | None) -> None:
        """End the picker with an index, or None for no choice; the next key goes to the prompt."""
        self.region.picker = None
        if self._picked is not None and not self._picked.done():
            self._picked.set_result(index)

    @asynccontextmanager
    async def lent(self, takes_interrupts: bool = True) -> AsyncIterator[None]:
        """Release the terminal in its original state; output waits until the block ends."""
        with set_app(self._app):
            async with in_terminal():
                self._num_lent += 1
                self.interrupts_leave = not takes_interrupts
                try:
                    with self._stray.let_through():
                        yield
                finally:
                    self._num_lent -= 1
                    self.interrupts_leave = False
        self._write_waiting()

    async def edit(self, text: str) -> str:
        async with self.lent():
            return await edit_text(self._editor, text)

    def edit_prompt(self) -> None:
        """Let the user edit the prompt's text in their editor, in a background task."""

        async def edit() -> None:
            try:
                self.put_text(await self.edit(self.buffer.text))
            except Exception as error:
                self.listener.failed(error)

        self._app.create_background_task(edit())

    def unlearn(self, session_ids: Collection[str], texts: Collection[str]) -> None:
        """Bring back nothing of these conversations, and none of these messages."""
        if isinstance(self.buffer.history, PrivateHistory):
            self.buffer.history.forget(session_ids, texts)
            self.buffer.reset()

    def copy(self, text: str) -> None:
        """Ask the terminal to put a text on its clipboard (OSC 52); UsageError above 200 kB."""
        data = text.encode(errors="replace")
        if len(data) > _MAX_COPIED_BYTES:
            raise UsageError("This is too much for a clipboard.", "/export writes a file.")
        with self._output.stroke():
            self._output.write_raw(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")

    async def run(self, listener: Listener) -> None:
        """Show the prompt and handle input until `leave` is called or the input ends."""
        self._listener = listener
        self._app.after_render += self._begin
        try:
            with self._app.input.raw_mode(), self._stray.kept():
                self._take_typed_ahead(listener)
                await self._app.run_async(set_exception_handler=False)
        except EOFError:
            listener.input_ended()
        finally:
            self._settle_history(is_end=True)
            self._write_held()  # of an answer that has not ended in time
            self._write_waiting(at_end=True)

    def _settle_history(self, is_end: bool = False) -> None:
        if isinstance(self.buffer.history, PrivateHistory):
            self.buffer.history.settle(is_end)

    def keep_cleared(self) -> None:
        """Put the prompt's text into the history, so that Up restores it: it is not sent."""
        history = self.buffer.history
        if history.get_strings()[-1:] == [self.buffer.text]:
            return
        if isinstance(history, PrivateHistory):
            history.store_cleared(self.buffer.text)
        else:
            self.buffer.append_to_history()

    @property
    def keeps_history(self) -> bool:
        history = self.buffer.history
        return isinstance(history, PrivateHistory) and history.is_complete

    def leave(self) -> None:
        if self.buffer.text.strip():
            self.buffer.append_to_history()
        if self._app.is_running and not self._app.is_done:
            self._app.exit()

    # Inside

    def _tell_draft(self, text: str) -> None:
        if self._listener is not None:
            self._listener.draft_changed(text)

    def _show_stray(self, line: str) -> None:
        self.write(self.painter.wrapped(line, self.render_context.width, Role.DIM))

    def _take_typed_ahead(self, listener: Listener) -> None:
        lines, rest = typed_ahead(self._app.input)
        for line in lines:
            listener.accept(line)
        if rest:
            self.buffer.insert_text(rest)

    def _begin(self, sender: object) -> None:
        """After the first drawing, when keys reach the prompt, write the rows that waited."""
        self._app.after_render -= self._begin
        asyncio.get_running_loop().call_soon(self._write_waiting)

    def _draw_what_waited(self) -> None:
        """Write and draw what came while the width of the window settled."""
        if self._app.is_running and not self.is_lent:
            self._write_waiting()
            self._app.invalidate()

    def _write_waiting(self, at_end: bool = False) -> None:
        if self._app.is_settling and not at_end:
            return
        text = "".join(self._waiting)
        self._waiting.clear()
        if text and at_end:
            self._output.write_raw(text)
            self._output.flush()
        elif text:
            self._write_above(text)

    def _completes_while_typing(self) -> bool:
        line = self.buffer.document.text_before_cursor
        return line.startswith("/") and "\n" not in line and " " not in line

    def _lost(self) -> None:
        if self._listener is not None:
            self._listener.terminal_lost()


_DEFAULT_ROWS, _DEFAULT_COLUMNS = 24, 80


def own_terminal() -> Terminal:
    """Return the terminal of the standard streams."""
    return Terminal(create_input(), sys.stdout, _terminal_size)


def new_live_prompt(
    terminal: Terminal,
    painter: Painter,
    controller: ChatController,
    history_path: Path | None,
    editor: str,
) -> LivePrompt:
    """Return the prompt, with the history and the completions of this chat."""
    lines = TypedLines(history_path) if history_path is not None else None
    history = PrivateHistory(lines, lambda: _open_session(controller))
    completer = LineCompleter(
        build_registry(),
        {
            Argument.SESSION: lambda: _sessions(controller),
            Argument.TURN: lambda: _turns(controller),
            Argument.PIN: lambda: _pins(controller),
            Argument.PRESET: lambda: controller.surroundings.presets.lines().items(),
            Argument.MODEL: lambda: ((name, "") for name in controller.surroundings.model_names()),
        },
    )
    return LivePrompt(terminal, painter, completer, history, editor)


def _open_session(controller: ChatController) -> str | None:
    return controller.session.session_id if controller.session is not None else None


def _terminal_size() -> Size:
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return Size(_DEFAULT_ROWS, _DEFAULT_COLUMNS)
    return Size(size.lines or _DEFAULT_ROWS, size.columns or _DEFAULT_COLUMNS)


def _sessions(controller: ChatController) -> Iterable[tuple[str, str]]:
    store = controller.host.store
    if store is not None:
        for summary in store.summaries()[:50]:
            yield summary.session_id, summary.title


def _pins(controller: ChatController) -> Iterable[tuple[str, str]]:
    for label, paths in controller.pins.paths().items():
        if one_line(label, len(label) + 1) == label:
            yield label, f"pinned, {plural(len(paths), 'file')}"


def _turns(controller: ChatController) -> Iterable[tuple[str, str]]:
    conversation = controller.conversation
    if conversation is not None:
        numbers = MessageNumbers(conversation)
        for turn in controller.place.user_turns:
            yield str(numbers.of(turn)), turn_summary(turn, 60)
