"""Standard streams and signals of the script modes.

An unwritable stderr does not lose an answer. A stalled reader does not stop a signal from ending
the program. The first signal ends the answer and keeps its text so far.
"""

import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TextIO

from kvchat.core.errors import ExitCode

# Write size: small enough that a slow reader takes it before the write counts as stalled.
_PIECE_BYTES = 1 << 16


class Stalled(BrokenPipeError):
    """The reader of a stream has stopped reading, and the program must end."""


class _Output(io.FileIO):
    """The raw file of stdout or stderr; it measures how long a write of the main thread has waited
    for its reader.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._began_s: float | None = None

    @property
    def waits_s(self) -> float:
        """Seconds that the write in progress has taken; 0 if there is none."""
        return time.monotonic() - self._began_s if self._began_s is not None else 0.0

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # a Buffer
        if threading.current_thread() is not threading.main_thread():
            return self._write_piece(data)
        self._began_s = time.monotonic()
        try:
            return self._write_piece(data)
        finally:
            self._began_s = None

    def _write_piece(self, data) -> int:  # type: ignore[no-untyped-def]
        while (num_written := super().write(memoryview(data)[:_PIECE_BYTES])) is None:
            # Another program made this open file non-blocking, and its buffer is full.
            poll = select.poll()
            poll.register(self, select.POLLOUT)
            poll.poll()
        return num_written


class _ForgivingOutput(_Output):
    """Drops output that cannot be written, because the error could not be reported either.

    It needs no buffer, whose lock would be held by a thread that waits for the reader: the main
    thread would wait for that lock, where no signal reaches it. So it writes all it is given.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._is_lost = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        rest = memoryview(data)
        try:
            while rest.nbytes and not self._is_lost:
                rest = rest[super().write(rest) :]
        except Stalled:
            self._is_lost = True
        except OSError:
            pass
        return memoryview(data).nbytes


def prepare_streams() -> None:
    """Open closed standard streams, and use our raw files below stdout and stderr."""
    _ensure_open()
    sys.stdout = _over(io.BufferedWriter(_Output(1)), sys.stdout)
    sys.stderr = _over(_ForgivingOutput(2), sys.stderr)
    # Characters that stdout's encoding lacks become question marks; stderr keeps its own setting.
    if sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _over(file: io.BufferedWriter | _ForgivingOutput, before: TextIO) -> io.TextIOWrapper:
    """Return a text stream over a file, with the settings of the stream it replaces."""
    assert isinstance(before, io.TextIOWrapper)
    return io.TextIOWrapper(
        file,
        encoding=before.encoding,
        errors=before.errors,
        newline="\n",
        # Python's stderr is unbuffered, and so is stdout if Python was told so.
        line_buffering=before.line_buffering or before.write_through,
    )


def _ensure_open() -> None:
    """Open the null device for each closed standard stream, which many daemons have.

    Otherwise the next opened file would get the stream's number and receive the output. A closed
    stdout is opened for reading only: what is written there is lost, and the error says so.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def raise_if_stalled(seconds: float) -> None:
    """Raise Stalled if the write in progress has waited this long for the stream's reader.

    Call it from a signal handler, which interrupts the waiting write.
    """
    for stream in (sys.stdout, sys.stderr):
        file = getattr(stream, "buffer", None)
        raw = getattr(file, "raw", file)
        if isinstance(raw, _Output) and raw.waits_s >= seconds:
            raise Stalled


def can_write_at_once(stream: TextIO) -> bool:
    """Whether a line can be written to a stream without waiting for its reader."""
    _, writable, _ = select.select([], [stream], [], 0)
    return bool(writable)


def forget_stdout() -> None:
    """Redirect stdout to the null device, so that flushing at exit reports no second error."""
    _forget(1)


def forget_streams() -> None:
    """Redirect stdout and stderr to the null device, so that exit waits for no reader."""
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
# After a signal, a write that has waited this long for its reader is abandoned.
_PATIENCE_S = 0.4
_LOOK_AGAIN_S = 0.1


class Interrupted(BaseException):
    """A signal arrived while there was nothing to cancel."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


class Interruption:
    """Context manager that catches SIGINT, SIGTERM, and SIGHUP unless `nohup` has it ignored.

    If there is something to cancel, the first signal cancels it and sets `code`, the exit code; a
    second signal exits at once. Otherwise Interrupted is raised. A write that still waits for its
    reader then ends with Stalled.

    With `has_files` a second signal raises Interrupted too: what it leaves removes large files.
    """

    def __init__(self, has_files: bool = False) -> None:
        self._has_files = has_files
        self.code: ExitCode | None = None
        self._cancel: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        for number in _CODES:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def watch(self, cancel: Callable[[], None] | None) -> None:
        """Set the function that the first signal calls; None for nothing to cancel."""
        self._cancel = cancel

    def end_stalled_writes(self) -> None:
        """Have a write of the main thread end with Stalled, once it waits for its reader.

        Any thread may call it; `allow_stalled_writes` takes it back.
        """
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S, _LOOK_AGAIN_S)

    def allow_stalled_writes(self) -> None:
        """Let writes wait again, unless a signal ends the run."""
        if self.code is None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = _CODES[signal.Signals(number)]
        if self.code is not None and not self._has_files:
            os._exit(code)
        self.code = code
        # A write in progress continues after this handler: the alarm signal ends it.
        self.end_stalled_writes()
        if self._cancel is None:
            raise Interrupted(code)
        self._cancel()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise_if_stalled(_PATIENCE_S)
