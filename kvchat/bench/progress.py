"""Says on stderr what is measured and for how long, so that a benchmark is never silent."""

import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TextIO

QUICK_S, _SLOW_S = 1.0, 30.0
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Context manager: a thread that tells the phase again and again until it is left.

    On a terminal it is one line, which is redrawn. Elsewhere it is a line each time: as often in a
    quick run, for its user waits, and each half minute in one that takes hours.
    """

    def __init__(
        self, is_quick: bool, stderr: TextIO | None = None, interval_s: float | None = None
    ) -> None:
        self._stderr = stderr if stderr is not None else sys.stderr
        self._is_redrawn = self._stderr.isatty()
        often = is_quick or self._is_redrawn
        self._interval_s = interval_s or (QUICK_S if often else _SLOW_S)
        self._phase, self._part = "starting", ""
        self._began_s = time.monotonic()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._tell()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        self.erase()

    def begin(self, phase: str) -> None:
        """Begin another phase, and tell it."""
        self._phase, self._part, self._began_s = phase, "", time.monotonic()
        self._tell()

    def begin_part(self, part: str) -> None:
        """Begin another part of the phase, whose time goes on."""
        self._part = f": {part}"
        self._tell()

    def erase(self) -> None:
        """Take the line off the terminal, before something else is printed."""
        if self._is_redrawn:
            self._write(_ERASE_LINE)

    def _run(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            self._tell()

    def _tell(self) -> None:
        seconds = time.monotonic() - self._began_s
        line = f"kvchat bench: {self._phase}{self._part}, {seconds:.0f} s"
        self._write(f"{_ERASE_LINE}{line}" if self._is_redrawn else f"{line}\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a closed stderr spoils no measurement
            self._stderr.write(text)
            self._stderr.flush()
