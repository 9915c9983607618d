"""PtyScreen: a program in a real pseudo-terminal, and the screen a person would see.

Tests wait for what the screen shows, with a deadline, and never for a time. The raw bytes are kept:
the emulator forgives what a terminal would obey.
"""

import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import pyte
from pyte.screens import Char

from support.fork_server import ForkServer

_DEADLINE_S = 60.0
_BYTES_A_READ = 16  # a test that looks before what it looks for has come fails always, not at times
_REPOSITORY = Path(__file__).resolve().parents[2]


def _text_of(row: Mapping[int, Char], columns: int) -> str:
    """Return what a row of the screen shows; it holds the cells that something was written to."""
    # pyte's own `display` fails at half a wide character that another has overwritten.
    if not row:
        return ""
    text = "".join([row[column].data for column in range(min(columns, max(row) + 1))])
    return text.rstrip().replace("\N{NO-BREAK SPACE}", " ")


class PtyScreen:
    """Starts what `python -m MODULE ARGUMENTS` does in a terminal of its own, as a fork.

    `typed` is in the terminal before the program begins.
    """

    def __init__(
        self,
        server: ForkServer,
        module: str,
        arguments: Sequence[str],
        columns: int = 80,
        rows: int = 24,
        environment: dict[str, str] | None = None,
        typed: str = "",
    ) -> None:
        paths = (_REPOSITORY, _REPOSITORY / "kernels", _REPOSITORY / "tests")
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
            **(environment or {}),
        }
        self._terminal: int | None
        self._terminal, theirs = os.openpty()
        self._set_size(columns, rows)
        self.type(typed)
        self.life = server.start_in_terminal(module, arguments, variables, theirs)
        os.close(theirs)
        self.raw = b""
        self.screen = pyte.HistoryScreen(columns, rows, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._above: list[str] = []  # of the scrollback, whose rows change no more
        self._shown: dict[int, str] = {}  # of the screen's rows, as they were when last read

    # What is shown

    @property
    def lines(self) -> list[str]:
        """Everything from the top of the scrollback to the bottom of the screen."""
        screen = self.screen
        above = screen.history.top
        if len(above) < len(self._above) or len(above) == above.maxlen:
            self._above.clear()  # the oldest rows are gone
        self._above += [
            _text_of(row, screen.columns) for row in islice(above, len(self._above), None)
        ]
        for number in screen.dirty:
            if number < screen.lines:
                self._shown[number] = _text_of(screen.buffer[number], screen.columns)
        screen.dirty.clear()
        return [*self._above, *(self._shown.get(number, "") for number in range(screen.lines))]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def shown(self) -> str:
        """The visible screen alone."""
        return "\n".join(self.lines[-self.screen.lines :])

    def wait_for(
        self, what: str | Callable[[str], bool], deadline_s: float = _DEADLINE_S
    ) -> "PtyScreen":
        """Read until the whole text has `what` in it, or satisfies it; fails at the deadline."""
        is_there = (lambda text: what in text) if isinstance(what, str) else what
        end_s = time.monotonic() + deadline_s
        while not is_there(self.text):
            assert time.monotonic() < end_s, f"waited for {what!r}; the screen was:\n{self.text}"
            assert self._read(), f"ended while waiting for {what!r}; the screen was:\n{self.text}"
        return self

    def wait_for_shown(self, what: str) -> "PtyScreen":
        """As `wait_for`, but on the visible screen alone; say the prompt, drawn after all else."""
        return self.wait_for(lambda _: what in self.shown)

    def wait_for_raw(self, what: bytes) -> None:
        """Read until bytes have come that the screen does not show."""
        end_s = time.monotonic() + _DEADLINE_S
        while what not in self.raw:
            assert time.monotonic() < end_s, f"waited for {what!r}"
            assert self._read(), f"ended while waiting for {what!r}"

    def wait_until_quiet(self, silence_s: float) -> None:
        """Read until nothing has come for so long; fails at the deadline."""
        end_s = time.monotonic() + _DEADLINE_S
        last_s, size = time.monotonic(), len(self.raw)
        while time.monotonic() - last_s < silence_s:
            assert time.monotonic() < end_s, "it never fell silent"
            assert self._read(), "it ended"
            if len(self.raw) != size:
                last_s, size = time.monotonic(), len(self.raw)

    def _read(self, within_s: float = 0.05) -> bool:
        """Take what comes within a moment; false at the end."""
        assert self._terminal is not None
        if not select.select([self._terminal], [], [], within_s)[0]:
            return True
        try:
            data = os.read(self._terminal, _BYTES_A_READ)
        except OSError:  # all who had it open as theirs are gone
            return False
        if not data:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    # What is done

    def type(self, text: str) -> "PtyScreen":
        """Send keys as they are."""
        assert self._terminal is not None
        keys = text.encode()
        while keys:
            keys = keys[os.write(self._terminal, keys) :]
        return self

    def enter(self, text: str) -> "PtyScreen":
        """Type a line and Enter."""
        return self.type(f"{text}\r")

    def paste(self, text: str) -> "PtyScreen":
        """Send text as a terminal sends a paste."""
        return self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns: int, rows: int) -> None:
        """Change the size behind what has been written for the old one."""
        size = -1
        while size != len(self.raw):
            size = len(self.raw)
            self._read(within_s=0.0)
        self.screen.resize(rows, columns)
        self.screen.dirty.update(range(rows))
        self._set_size(columns, rows)

    def _set_size(self, columns: int, rows: int) -> None:
        assert self._terminal is not None
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def kill(self, number: signal.Signals) -> None:
        self.life.send_signal(number)

    def settings(self) -> list[object]:
        """The terminal's line settings, as `stty -a` shows them."""
        assert self._terminal is not None
        return list(termios.tcgetattr(self._terminal))

    def finish(self) -> int:
        """Wait for the end; return the exit code, or minus the signal that ended it."""
        end_s = time.monotonic() + _DEADLINE_S
        while self._read():
            assert time.monotonic() < end_s, f"still running; the screen was:\n{self.text}"
        return self.exit_code()

    def hang_up(self) -> None:
        """Take the terminal away, as closing its window does."""
        if self._terminal is not None:
            os.close(self._terminal)
        self._terminal = None

    def exit_code(self) -> int:
        """Wait for the end without reading; return the exit code, or minus the signal."""
        return self.life.wait(_DEADLINE_S)

    def close(self) -> None:
        """End the program, whatever it does."""
        self.life.kill()
        self.life.wait(_DEADLINE_S)
        self.hang_up()
