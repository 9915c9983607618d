"""One line on stderr while a model loads; nothing where stderr is not a terminal.

Knows carriage returns. Called on the engine's thread.
"""

from typing import TextIO

from kvchat.core.events import LoadEvent, LoadProgress

_ERASE_LINE = "\r\x1b[K"


class LoadingLine:
    """Shows the stage of loading and erases itself when loading ends."""

    def __init__(self, stderr: TextIO, is_quiet: bool) -> None:
        self._stderr = stderr
        self._is_shown = not is_quiet and stderr.isatty()

    def show(self, event: LoadEvent) -> None:
        """Take a loading event."""
        if not self._is_shown:
            return
        line = _ERASE_LINE
        if isinstance(event, LoadProgress):
            share = f" {event.fraction:.0%}" if event.fraction is not None else ""
            line += f"{event.stage}{share} ..."
        self._stderr.write(line)
        self._stderr.flush()
