"""LineView: plain lines, for screen readers and for terminals that cannot move the cursor.

The terminal's own line editing handles input. Output is whole lines, which are only appended and
have no escape sequences. Pickers are numbered lists.
"""

import asyncio
import codecs
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TextIO

from kvchat.core.errors import ExitCode, UsageError
from kvchat.terminal.key_parser import text_of_line
from kvchat.terminal.keys import DoublePress
from kvchat.terminal.multiline import InputBlocks, edit_text
from kvchat.terminal.paint import Painter, Row
from kvchat.terminal.pickers import pick_by_number
from kvchat.terminal.view import Choice, Listener, LiveState, PickerActions, PlainPage

_TWICE_S = 2.0
_READ_BYTES = 65536


class LineView(PlainPage):
    """Implements `View`. `columns` is the maximum width of lines."""

    def __init__(
        self, stdin: TextIO, stdout: TextIO, painter: Painter, columns: int, editor: str
    ) -> None:
        super().__init__(painter, columns)
        self._stdin = stdin
        self._stdout = stdout
        self._editor = editor
        self._blocks = InputBlocks()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unread = ""
        self._leaving = DoublePress(_TWICE_S)
        self._picked: asyncio.Future[str] | None = None
        self._kept_lines: list[str] = []  # lines read together with a picker's answer, for later
        self._left: asyncio.Event = asyncio.Event()
        self._listener: Listener | None = None
        self._num_queued = 0
        self._told_queued: list[str] = []
        self._is_prompted = False
        self._ignores_interrupts = False
        self._is_open = False
        self._held: list[Row] = []  # rows that wait for the end of an answer

    @property
    def max_tail_rows(self) -> int:
        return 0

    def write(self, rows: Sequence[Row], state: LiveState | None = None) -> None:
        """Show rows permanently; they replace a waiting prompt."""
        if state is not None:
            self._is_open = state.is_open
        elif self._is_open:
            if not self._held:
                self._write_now([self.painter.text("Shown after the answer.")])
            self._held += rows
            return
        self._write_now(rows)

    def _write_now(self, rows: Sequence[Row]) -> None:
        text = self.painter.ansi(rows)
        if self._is_prompted and text:
            text = f"\n{text}"
            self._is_prompted = False
        self._put(text)
        self._ask_soon()

    def write_turn(self, text: str, is_said_now: bool = True) -> None:
        """Show an earlier message; the terminal itself has already shown typed text."""
        if not is_said_now:
            self.write(self.painter.wrapped(f"You: {text}\n", self._columns))
        elif text in self._told_queued:
            self._told_queued.remove(text)
            self.write(self.painter.wrapped(f"Now: {text}", self._columns))

    def show(self, state: LiveState) -> None:
        """Print the new parts of the state that fit in a line, and what waited for an answer."""
        self._is_open = state.is_open
        if not self._is_open:
            self._write_held()
        if len(state.queue) > self._num_queued and self._is_answering:
            self._told_queued.append(state.queue[-1])
            self._write_now([self.painter.text("Queued.")])
        self._num_queued = len(state.queue)
        if state.notice:
            self._write_now([self.painter.text(state.notice)])
            assert self._listener is not None
            self._listener.key_pressed()
        self._ask_soon()

    def _write_held(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._write_now(held)

    def put_text(self, text: str) -> None:
        """Print the text for the user to type again: the terminal's input cannot be set."""
        if text:  # during an answer too: why it is refused comes at once
            self._write_now(self.painter.wrapped(f"The text was: {text}", self._columns))

    def put_back(self, text: str, gives_way: bool = False) -> None:
        self.put_text(text)

    async def choose(
        self,
        title: str,
        choices: Sequence[Choice],
        current: int = 0,
        actions: PickerActions | None = None,
    ) -> int | None:
        """Show a numbered list and read a number; an empty line cancels.

        Hidden choices come last. There are no actions: commands do the same.
        """
        order = sorted(range(len(choices)), key=lambda index: choices[index].is_hidden)
        lines = [title if title.endswith("?") else f"{title}:"]
        for number, index in enumerate(order, start=1):
            detail = f" ({choices[index].detail})" if choices[index].detail else ""
            line = f"{number}. {choices[index].label}{detail}"
            lines.append(line.replace(" · ", ", ") if self.painter.look.is_spoken else line)
        lines.append("Type a number, or Enter for none.")
        self.write(self.painter.wrapped("\n".join(lines), self._columns))
        while True:
            text = await self._picked_line()
            if not text.strip():
                return None
            picked = pick_by_number(text, len(choices))
            if picked is not None:
                return order[picked]
            self.write([self.painter.text(f"A number from 1 to {len(choices)}, please.")])

    async def _picked_line(self) -> str:
        """Return the next typed line; further lines are handled after it."""
        loop = asyncio.get_running_loop()
        self._picked = loop.create_future()
        try:
            return await self._picked
        finally:
            self._picked = None
            loop.call_soon(self._take_kept_lines)

    @asynccontextmanager
    async def lent(self, takes_interrupts: bool = True) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._stdin.fileno())
        self._ignores_interrupts = takes_interrupts
        try:
            yield
        finally:
            self._ignores_interrupts = False
            if not self._left.is_set():
                loop.add_reader(self._stdin.fileno(), self._read)

    async def edit(self, text: str) -> str:
        async with self.lent():
            edited = await edit_text(self._editor, text)
        if edited.strip():
            assert self._listener is not None
            self._listener.accept(edited)
        return ""

    def copy(self, text: str) -> None:
        raise UsageError("This terminal cannot be asked to copy.", "/export writes a file.")

    async def run(self, listener: Listener) -> None:
        self._listener = listener
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_reader(self._stdin.fileno(), self._read)
        self._ask_soon()
        try:
            await self._left.wait()
        finally:
            loop.remove_reader(self._stdin.fileno())
            loop.remove_signal_handler(signal.SIGINT)
            self._write_held()  # of an answer that has not ended in time
            if self._is_prompted:
                self._put("\n")

    @property
    def keeps_history(self) -> bool:
        return False

    def leave(self) -> None:
        self._left.set()

    # Inside

    @property
    def _is_answering(self) -> bool:
        return self._listener is not None and self._listener.is_answering

    def _put(self, text: str) -> None:
        try:
            self._write(text)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._stdout.closed:
                raise
            if self._listener is not None and not self._left.is_set():
                self._left.set()
                self._listener.terminal_lost()

    def _write(self, text: str) -> None:
        """Write text, with question marks for characters that the terminal's encoding lacks."""
        try:
            self._stdout.write(text)
        except UnicodeEncodeError:
            encoding = self._stdout.encoding
            self._stdout.write(text.encode(encoding, "replace").decode(encoding))
        self._stdout.flush()

    def _ask_soon(self) -> None:
        """Show the prompt when no more output is coming."""
        if self._listener is not None:
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        assert self._listener is not None
        is_picking = self._picked is not None
        if self._is_prompted or self._left.is_set():
            return
        if self._listener.is_at_work and not is_picking:
            return
        self._is_prompted = True
        label = "You: " if self.painter.look.is_spoken else "> "
        if is_picking:
            label = "Number: "
        self._put("... " if self._blocks.is_open else label)

    def _interrupt(self) -> None:
        assert self._listener is not None
        if self._ignores_interrupts:
            return
        if self._picked is not None:
            if not self._picked.done():
                self._picked.set_result("")
        elif self._is_answering:
            self._leaving.forget()
            self._put("\n")  # the terminal echoes the key itself
            self._listener.stop()
        elif self._leaving.press():
            self._listener.leave(ExitCode.INTERRUPT)
        else:
            self._blocks.clear()
            self._unread = ""
            self._listener.stop_editing()
            self._listener.notice("Ctrl-C again leaves.")

    def _read(self) -> None:
        try:
            data = os.read(self._stdin.fileno(), _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        *lines, self._unread = (self._unread + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._take(text_of_line(line))

    def _end(self) -> None:
        """Leave at Ctrl-D, but not during an answer."""
        assert self._listener is not None
        if self._is_answering and os.isatty(self._stdin.fileno()):
            words = f"Ctrl-C stops {self._listener.stoppable_name}."
            self._write_now([self.painter.text(words)])
            return
        asyncio.get_running_loop().remove_reader(self._stdin.fileno())
        self._listener.quit(ExitCode.OK)

    def _take(self, line: str) -> None:
        assert self._listener is not None
        self._is_prompted = False
        self._leaving.forget()
        if self._picked is not None:
            if self._picked.done():
                self._kept_lines.append(line)
            else:
                self._picked.set_result(line)
            return
        text = self._blocks.take(line)
        if text is not None:
            self._listener.accept(text)
        self._ask_soon()

    def _take_kept_lines(self) -> None:
        lines, self._kept_lines = self._kept_lines, []
        for line in lines:
            self._take(line)
