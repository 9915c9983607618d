"""What an MCP server writes beside the protocol: on stderr, and on stdout by mistake."""

import logging
import os

from kvchat.core.text import one_line
from kvchat.tools.pipe_reader import PipeReader

_MOST_BYTES = 4096
_MOST_LINES = 3
_MOST_CHARS = 300
_LIBRARY = "mcp"
_log = logging.getLogger(__name__)


class ServerErrors:
    """The end of what a server writes on stderr, which `file` takes."""

    def __init__(self) -> None:
        descriptor, written = os.pipe()
        self.file = os.fdopen(written, "w")
        self._reader = PipeReader(descriptor, 0, _MOST_BYTES)

    def close(self) -> None:
        """Leave the file to the server. Idempotent."""
        self.file.close()

    def in_words(self, wait_s: float = 0.5) -> str:
        """Return the last lines as the end of a sentence, "" without any; waits for the end."""
        text = self._reader.text(wait_s).rpartition("bytes left out]\n")[2]
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        said = one_line(" / ".join(lines[-_MOST_LINES:])[-_MOST_CHARS:], _MOST_CHARS)
        return f"; its last words: {said}" if said else ""


class _Quiet(logging.Handler):
    """Logs what the library complains of, without what the server wrote: it may be conversation."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.warning("the MCP library: %s", one_line(str(record.msg)))


def keep_library_quiet() -> None:
    """Let the library's warnings go to kvchat's log only; Python would print them. Idempotent."""
    logger = logging.getLogger(_LIBRARY)
    if not any(isinstance(handler, _Quiet) for handler in logger.handlers):
        logger.addHandler(_Quiet(logging.WARNING))
    logger.propagate = False
