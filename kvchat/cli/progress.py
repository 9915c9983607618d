"""What a script shows while a model loads: one line on a terminal's stderr.

Knows carriage returns. Called on the engine's thread, which never waits for the terminal.
"""

from collections.abc import Callable
from typing import TextIO

from kvchat.cli.streams import can_write_at_once
from kvchat.core.events import LoadEvent, LoadProgress

_ERASE_LINE = "\r\x1b[K"


class LoadingLine:
    """Shows the stage of loading, and erases itself when loading ends."""

    def __init__(
        self,
        stderr: TextIO,
        is_quiet: bool,
        can_write: Callable[[TextIO], bool] = can_write_at_once,
    ) -> None:
        self._stderr = stderr
        self._can_write = can_write
        self._is_shown = not is_quiet and stderr.isatty()

    def show(self, event: LoadEvent) -> None:
        """Take a loading event."""
        if self._is_shown and self._can_write(self._stderr):
            self._draw(event)

    def _draw(self, event: LoadEvent) -> None:
        line = _ERASE_LINE
        if isinstance(event, LoadProgress):
            share = f" {event.fraction:.0%}" if event.fraction is not None else ""
            line += f"{event.stage}{share} ..."
        self._stderr.write(line)
        self._stderr.flush()
