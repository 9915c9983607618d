"""HeldOutput: prompt_toolkit's terminal output, with strokes that reach the terminal whole.

Rows for good are shown by erasing the prompt, writing them and drawing the prompt again; a stroke
makes that one write, which terminals that know synchronised output (mode 2026) show at once. Also
the last guard: nothing that could act passes `write`. Knows escape sequences; knows no layout.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from prompt_toolkit.data_structures import Size
from prompt_toolkit.output.vt100 import Vt100_Output

from kvchat.terminal.sanitize import sanitize_characters

_BEGIN_SYNCHRONISED = "\x1b[?2026h"
_END_SYNCHRONISED = "\x1b[?2026l"

_log = logging.getLogger(__name__)


class HeldOutput(Vt100_Output):
    """Never asks where the cursor is: the answer could end up in the prompt.

    Once the terminal is gone writing does nothing; `on_lost` is called the first time.
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
        """While entered nothing is flushed; on leaving everything is, in one write."""
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

        From the top left corner tmux takes that for clearing the screen, and keeps what was there
        in its scrollback: the first row is erased by itself, the rest from beside the corner.
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

    # Erasing resets the renderer, and that would switch bracketed paste off and on again: a paste
    # that comes in between would be taken for typing, each of its lines for a message.

    def enable_bracketed_paste(self) -> None:
        if not self._num_held:
            super().enable_bracketed_paste()

    def disable_bracketed_paste(self) -> None:
        if not self._num_held:
            super().disable_bracketed_paste()
