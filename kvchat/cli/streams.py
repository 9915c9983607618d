"""Standard streams and signals of a script: open, patient with a slow reader, and ended in order.

An unwritable stderr never costs an answer, and a stalled reader never keeps a signal from ending
the program. The first signal ends the answer and keeps what there is of it.
"""

import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TextIO

from kvchat.core.errors import ExitCode

# A write of this size returns, however slowly the reader reads, before anyone calls it stalled.
_PIECE_BYTES = 1 << 16


class Stalled(BrokenPipeError):
    """The reader of a stream has stopped reading, and the program is to end."""


class _Output(io.FileIO):
    """The raw file of stdout or stderr. It knows how long its reader has kept a write waiting."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._began_s: float | None = None

    @property
    def waits_s(self) -> float:
        """Seconds that the write in progress has taken; 0 where there is none."""
        return time.monotonic() - self._began_s if self._began_s is not None else 0.0

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # a Buffer
        self._began_s = time.monotonic()
        try:
            while (num_written := super().write(memoryview(data)[:_PIECE_BYTES])) is None:
                # Another program has made this open file non-blocking, and it is full.
                poll = select.poll()
                poll.register(self, select.POLLOUT)
                poll.poll()
            return num_written
        finally:
            self._began_s = None


class _ForgivingOutput(_Output):
    """What cannot be written is dropped: there is no place left to say so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._is_lost = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        try:
            if not self._is_lost:
                return super().write(data)
        except Stalled:
            self._is_lost = True
        except OSError:
            pass
        return memoryview(data).nbytes


def prepare_streams() -> None:
    """Open what is closed, and put our own files below stdout and stderr."""
    _ensure_open()
    sys.stdout = _over(_Output(1), sys.stdout)
    sys.stderr = _over(_ForgivingOutput(2), sys.stderr)
    # What the encoding of stdout lacks becomes a question mark; stderr has its own way.
    if sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _over(raw: _Output, before: TextIO) -> io.TextIOWrapper:
    """Return a text stream over a raw file, with the manners of the one it replaces."""
    assert isinstance(before, io.TextIOWrapper)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        newline="\n",
        # Python's stderr, and its stdout where that is asked for, keep nothing back.
        line_buffering=before.line_buffering or before.write_through,
    )


def _ensure_open() -> None:
    """Put the null device where a standard stream is closed, as it is under many a daemon.

    Otherwise the next file opened would get its number, and what is printed would go there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def raise_if_stalled(seconds: float) -> None:
    """Raise Stalled out of a write that the reader of a stream has kept waiting for so long.

    To be called from a signal handler: what calls it is what waits.
    """
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, _Output) and raw.waits_s >= seconds:
            raise Stalled


def can_write_at_once(stream: TextIO) -> bool:
    """Whether a line can be written to a stream without waiting for its reader."""
    _, writable, _ = select.select([], [stream], [], 0)
    return bool(writable)


def forget_stdout() -> None:
    """Point stdout nowhere, so that flushing it at exit does not complain about it once more."""
    _forget(1)


def forget_streams() -> None:
    """Point stdout and stderr nowhere: flushing them at exit waits for no reader."""
    _forget(1)
    _forget(2)


def _forget(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


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
