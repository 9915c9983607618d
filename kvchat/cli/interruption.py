"""Signals in scripts: the first one ends the answer and keeps what there is of it.

Knows POSIX signals and exit codes; knows no output.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType

from kvchat.core.errors import ExitCode

_CODES = {
    signal.SIGINT: ExitCode.INTERRUPT,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}


class Interrupted(BaseException):
    """A signal came while nothing was there to be ended in order."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


class Interruption:
    """Catches SIGINT, SIGTERM and SIGHUP while it is entered.

    With something to cancel, the first signal cancels it and `code` says what to exit with; a
    second one leaves at once. With nothing to cancel, Interrupted is raised.
    """

    def __init__(self) -> None:
        self.code: ExitCode | None = None
        self._cancel: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        for number in _CODES:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def watch(self, cancel: Callable[[], None] | None) -> None:
        """Say what the first signal is to cancel; None for nothing."""
        self._cancel = cancel

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = _CODES[signal.Signals(number)]
        if self.code is not None:
            os._exit(code)
        self.code = code
        if self._cancel is None:
            raise Interrupted(code)
        self._cancel()
