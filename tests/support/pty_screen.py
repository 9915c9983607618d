"""PtyScreen: a program in a real pseudo-terminal, and the screen a person would see."""

import fcntl
import os
import select
import signal
import struct
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from support.fork_server import ForkServer
from support.screen import DEADLINE_S, Screen

_BYTES_A_READ = 16  # a test that looks before what it looks for has come fails always, not at times
_REPOSITORY = Path(__file__).resolve().parents[2]


class PtyScreen(Screen):
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
        super().__init__(columns, rows)
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
        self._feed(data)
        return True

    # What is done

    def type(self, text: str) -> Self:
        """Send keys as they are."""
        assert self._terminal is not None
        keys = text.encode()
        while keys:
            keys = keys[os.write(self._terminal, keys) :]
        return self

    def resize(self, columns: int, rows: int) -> None:
        """Change the size behind what has been written for the old one."""
        size = -1
        while size != len(self.raw):
            size = len(self.raw)
            self._read(within_s=0.0)
        self._becomes(columns, rows)
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

    def hang_up(self) -> None:
        """Take the terminal away, as closing its window does."""
        if self._terminal is not None:
            os.close(self._terminal)
        self._terminal = None

    def exit_code(self) -> int:
        """Wait for the end without reading; return the exit code, or minus the signal."""
        return self.life.wait(DEADLINE_S)

    def close(self) -> None:
        """End the program, whatever it does."""
        self.life.kill()
        self.life.wait(DEADLINE_S)
        self.hang_up()
