"""Terminal input and output around the live prompt.

HeldOutput writes each change of the screen in one write. StrayOutput collects what libraries write
to standard error, as whole lines. `typed_ahead` returns text typed before the prompt started: the
terminal turned its Enter into a line feed, which is another key to the prompt.
"""

import asyncio
import logging
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output

from kvchat.core.text import sanitize_characters
from kvchat.terminal.multiline import with_line_feeds

_BEGIN_SYNCHRONISED = "\x1b[?2026h"
_END_SYNCHRONISED = "\x1b[?2026l"

_log = logging.getLogger(__name__)


class HeldOutput(Vt100_Output):
    """The prompt's output. It never queries the cursor, as the reply could end up in the prompt.

    After the terminal is gone, writing does nothing; the first failure calls `on_lost`.
    """

    def __init__(
        self,
        stdout: TextIO,
        get_size: Callable[[], Size],
        term: str | None,
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(stdout, get_size, term=term, enable_bell=False, enable_cpr=False)
        self._num_held = 0
        self._is_lost = False
        self._on_lost = on_lost

    @contextmanager
    def stroke(self) -> Iterator[None]:
        """Context manager: hold all output in the block, and write it at once at the end."""
        if not self._num_held:
            self.write_raw(_BEGIN_SYNCHRONISED)
        self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1
            if not self._num_held:
                self.write_raw(_END_SYNCHRONISED)
                self.flush()

    def write(self, data: str) -> None:
        super().write(sanitize_characters(data))

    def erase_down(self) -> None:
        """Erase from the cursor, which is at the beginning of a row, to the end of the screen.

        At the top left corner tmux treats this as clearing the screen, and copies the screen to its
        scrollback. So the first row is erased separately, and the rest from beside the corner.
        """
        self.write_raw("\x1b[K\x1b[C\x1b[J\x1b[D")

    def flush(self) -> None:
        if self._num_held:
            return
        if self._is_lost:
            self._buffer.clear()
            return
        try:
            super().flush()
        except OSError as error:
            _log.info("the terminal is gone: %s", error)
            self._is_lost = True
            self._buffer.clear()
            self._on_lost()

    # Erasing resets the renderer, which would switch bracketed paste off and on again. A paste in
    # between would count as typing, and each of its lines as a message.

    def enable_bracketed_paste(self) -> None:
        if not self._num_held:
            super().enable_bracketed_paste()

    def disable_bracketed_paste(self) -> None:
        if not self._num_held:
            super().disable_bracketed_paste()


_STDERR = 2
_READ_BYTES = 65536
_MAX_LINE_BYTES = 4096


class StrayOutput:
    """While `kept`, passes standard error to `show`, line by line, on the event loop.

    Does nothing if standard error is not a terminal: it then does not disturb the screen.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._terminal: int | None = None
        self._source = self._sink = -1
        self._unread = b""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep standard error off the terminal until the end of the block."""
        if not os.isatty(_STDERR):
            yield
            return
        loop = asyncio.get_running_loop()
        self._terminal = os.dup(_STDERR)
        self._source, self._sink = os.pipe()
        os.set_blocking(self._source, False)
        loop.add_reader(self._source, self._read)
        os.dup2(self._sink, _STDERR)
        try:
            yield
        finally:
            os.dup2(self._terminal, _STDERR)
            loop.remove_reader(self._source)
            self._read()
            if self._unread:
                self._show_line(self._unread)  # the last line may have no line feed
                self._unread = b""
            for descriptor in (self._terminal, self._source, self._sink):
                os.close(descriptor)
            self._terminal = None

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Restore standard error in the block, while another program uses the terminal."""
        if self._terminal is None:
            yield
            return
        os.dup2(self._terminal, _STDERR)
        try:
            yield
        finally:
            os.dup2(self._sink, _STDERR)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._source, _READ_BYTES):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._show_line(line)
                self._unread = self._unread[-_MAX_LINE_BYTES:]

    def _show_line(self, line: bytes) -> None:
        self._show(line[-_MAX_LINE_BYTES:].decode(errors="replace"))


def typed_ahead(source: Input) -> tuple[list[str], str]:
    """Return the complete lines waiting in a terminal, and the incomplete text after them.

    A paste is part of its line, whatever line ends it has. Of keys only text counts: others, such
    as the arrows, mean nothing yet. The beginning of a paste or of a key stays with the input.
    """
    if not os.isatty(source.fileno()):
        return [], ""
    keys: list[KeyPress] = []
    while not source.closed and select.select([source.fileno()], [], [], 0)[0]:
        keys += source.read_keys()
    keys += source.flush_keys()
    lines, rest, last = [], "", None
    for press in keys:
        if press.key is Keys.BracketedPaste:
            rest += with_line_feeds(press.data)
        elif press.key is Keys.ControlM or (
            press.key is Keys.ControlJ and last is not Keys.ControlM
        ):
            lines.append(rest)
            rest = ""
        elif not isinstance(press.key, Keys) and press.data.isprintable():
            rest += press.data
        last = press.key
    return lines, rest
