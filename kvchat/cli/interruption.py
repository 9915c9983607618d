"""Signals in scripts: the first one ends the answer and keeps what there is of it.

Knows POSIX signals and exit codes; knows no output.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType

from kvchat.cli.streams import raise_if_stalled
from kvchat.core.errors import ExitCode

_CODES = {
    signal.SIGINT: ExitCode.INTERRUPT,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}
# After a signal, a write that has waited for its reader this long is given up.
_PATIENCE_S = 0.4
_LOOK_AGAIN_S = 0.1


class Interrupted(BaseException):
    """A signal came while nothing was there to be ended in order."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


class Interruption:
    """Catches SIGINT, SIGTERM and SIGHUP while it is entered.

    With something to cancel, the first signal cancels it and `code` says what to exit with; a
    second one leaves at once. With nothing to cancel, Interrupted is raised. A write that waits for
    its reader all the while ends with Stalled.
    """

    def __init__(self) -> None:
        self.code: ExitCode | None = None
        self._cancel: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        for number in _CODES:
            self._before[number] = signal.signal(number, self._on_signal)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
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
        # A write in progress goes on after this handler: another signal has to end it.
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S, _LOOK_AGAIN_S)
        if self._cancel is None:
            raise Interrupted(code)
        self._cancel()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise_if_stalled(_PATIENCE_S)
