"""What a person would see of a program: the screen of an emulated terminal, and its scrollback.

Tests wait for what the screen shows, with a deadline, and never for a time. The raw bytes are kept:
the emulator forgives what a terminal would obey.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Self

import pyte
from pyte.screens import Char

DEADLINE_S = 60.0


def _text_of(row: Mapping[int, Char], columns: int) -> str:
    """Return what a row of the screen shows; it holds the cells that something was written to."""
    # pyte's own `display` fails at half a wide character that another has overwritten.
    if not row:
        return ""
    text = "".join([row[column].data for column in range(min(columns, max(row) + 1))])
    return text.rstrip().replace("\N{NO-BREAK SPACE}", " ")


class _Emulated(pyte.Screen):
    """An emulated screen, with the rows that have left it at its top."""

    def __init__(self, columns: int, rows: int) -> None:
        self.above: deque[Mapping[int, Char]] = deque(maxlen=5000)
        super().__init__(columns, rows)

    def index(self) -> None:
        top, bottom = self.margins or (0, self.lines - 1)
        if self.cursor.y == bottom:
            self.above.append(self.buffer[top])
        super().index()

    def erase_in_display(self, how: int = 0, *arguments: Any, **settings: Any) -> None:
        super().erase_in_display(how, *arguments, **settings)
        if how == 3:
            self.above.clear()


class Screen(ABC):
    """The screen of a program that reads keys."""

    def __init__(self, columns: int, rows: int) -> None:
        self.raw = b""
        self.screen = _Emulated(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._above: list[str] = []  # of the scrollback, whose rows change no more
        self._shown: dict[int, str] = {}  # of the screen's rows, as they were when last read

    @abstractmethod
    def _read(self, within_s: float = 0.05) -> bool:
        """Take what comes within a moment; false at the end."""

    @abstractmethod
    def type(self, text: str) -> Self:
        """Send keys as they are."""

    @abstractmethod
    def exit_code(self) -> int:
        """Wait for the end without reading; return the exit code, or minus the signal."""

    def _feed(self, data: bytes) -> None:
        self.raw += data
        self._stream.feed(data)

    # What is shown

    @property
    def lines(self) -> list[str]:
        """Everything from the top of the scrollback to the bottom of the screen."""
        screen = self.screen
        above = screen.above
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

    def wait_for(self, what: str | Callable[[str], bool], deadline_s: float = DEADLINE_S) -> Self:
        """Read until the whole text has `what` in it, or satisfies it; fails at the deadline."""
        is_there = (lambda text: what in text) if isinstance(what, str) else what
        end_s = time.monotonic() + deadline_s
        while not is_there(self.text):
            assert time.monotonic() < end_s, f"waited for {what!r}; the screen was:\n{self.text}"
            assert self._read(), f"ended while waiting for {what!r}; the screen was:\n{self.text}"
        return self

    def wait_for_shown(self, what: str) -> Self:
        """As `wait_for`, but on the visible screen alone; say the prompt, drawn after all else."""
        return self.wait_for(lambda _: what in self.shown)

    def wait_until_quiet(self, silence_s: float) -> None:
        """Read until nothing has come for so long; fails at the deadline."""
        end_s = time.monotonic() + DEADLINE_S
        last_s, size = time.monotonic(), len(self.raw)
        while time.monotonic() - last_s < silence_s:
            assert time.monotonic() < end_s, "it never fell silent"
            assert self._read(), "it ended"
            if len(self.raw) != size:
                last_s, size = time.monotonic(), len(self.raw)

    # What is done

    def enter(self, text: str) -> Self:
        """Type a line and Enter."""
        return self.type(f"{text}\r")

    def paste(self, text: str) -> Self:
        """Send text as a terminal sends a paste."""
        return self.type(f"\x1b[200~{text}\x1b[201~")

    def finish(self) -> int:
        """Wait for the end; return the exit code, or minus the signal that ended it."""
        end_s = time.monotonic() + DEADLINE_S
        while self._read():
            assert time.monotonic() < end_s, f"still running; the screen was:\n{self.text}"
        return self.exit_code()

    def _becomes(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.screen.dirty.update(range(rows))
