"""What a script says while a model loads: one line on a terminal's stderr, and the model's notes.

Knows carriage returns. Called on the engine's thread.
"""

from collections.abc import Callable
from typing import TextIO

from kvchat.core.events import LoadEvent, LoadProgress, ModelReady
from kvchat.terminal.sanitize import sanitize

_ERASE_LINE = "\r\x1b[K"


class LoadingLine:
    """Shows the stage of loading and erases itself when loading ends; then `tell`s the notes."""

    def __init__(self, stderr: TextIO, is_quiet: bool, tell: Callable[[str], None]) -> None:
        self._stderr = stderr
        self._tell = tell
        self._is_shown = not is_quiet and stderr.isatty()

    def show(self, event: LoadEvent) -> None:
        """Take a loading event."""
        if self._is_shown:
            self._draw(event)
        if isinstance(event, ModelReady):
            for note in event.notes:
                self._tell(sanitize(note))

    def _draw(self, event: LoadEvent) -> None:
        line = _ERASE_LINE
        if isinstance(event, LoadProgress):
            share = f" {event.fraction:.0%}" if event.fraction is not None else ""
            line += f"{event.stage}{share} ..."
        self._stderr.write(line)
        self._stderr.flush()
