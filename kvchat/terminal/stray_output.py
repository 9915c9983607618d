"""StrayOutput: what libraries write to standard error while the prompt is live, as whole lines.

A warning written straight to the terminal would land in the middle of the prompt. Here it is read
back and given to whoever owns the screen, so that nothing is swallowed and nothing torn. Knows file
descriptors; knows no screen.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_STDERR = 2
_READ_BYTES = 65536
_MAX_LINE_BYTES = 4096


class StrayOutput:
    """While `kept`, standard error goes to `show`, line by line, on the event loop.

    Does nothing where standard error is not a terminal: then it is not in the way.
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
                self._show_line(self._unread)  # the last line may have no end
                self._unread = b""
            for descriptor in (self._terminal, self._source, self._sink):
                os.close(descriptor)
            self._terminal = None

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Give standard error back to the terminal for a while: somebody else has the screen."""
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
