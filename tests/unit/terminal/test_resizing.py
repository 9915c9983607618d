"""A window that changes its width again and again while an answer streams, without a terminal.

tmux wraps its lines for a new width at once, and tells the program of a second change up to 250 ms
later. Rows drawn in between were drawn at the wrong place, and one of them stayed above: in 6 of 10
runs of test_reflow.py on a busy machine a row of a list was there twice.
"""

import asyncio
import io
import time
from collections.abc import Callable
from typing import cast

from prompt_toolkit.completion import DummyCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from rich.text import Text

from kvchat.terminal import layout
from kvchat.terminal.paint import Painter
from kvchat.terminal.prompt import LivePrompt, Terminal
from kvchat.terminal.theme import Look
from kvchat.terminal.view import Listener

_DEADLINE_S = 30.0


class _Stdout(io.StringIO):
    encoding = "utf-8"

    def fileno(self) -> int:
        raise io.UnsupportedOperation


class _Window:
    """A prompt in a window whose width the test changes."""

    def __init__(self) -> None:
        self.columns = 80
        self.stdout = _Stdout()

    def run(self, act: Callable[["_Window"], None], wait_for: str) -> str:
        """Act once the prompt is drawn, wait for an output, leave; return the whole output."""

        async def main() -> None:
            with create_pipe_input() as stdin:
                terminal = Terminal(stdin, self.stdout, lambda: Size(24, self.columns), "xterm")
                self.view = LivePrompt(
                    terminal, Painter(Look()), DummyCompleter(), InMemoryHistory(), "vi"
                )
                running = asyncio.ensure_future(self.view.run(cast(Listener, None)))
                await _until(lambda: self.view._app.renderer.last_rendered_screen is not None)
                act(self)
                await _until(lambda: wait_for in self.stdout.getvalue())
                self.view.leave()
                async with asyncio.timeout(_DEADLINE_S):
                    await running

        asyncio.run(main())
        return self.stdout.getvalue()

    def becomes(self, columns: int) -> None:
        """Change the width, and tell the program as its signal does."""
        self.columns = columns
        self.view._app._on_resize()

    def write(self, text: str) -> str:
        """Write a row; return what came out at once."""
        before = len(self.stdout.getvalue())
        self.view.write([Text(text, end="")])
        return self.stdout.getvalue()[before:]


async def _until(is_there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _DEADLINE_S
    while not is_there():
        assert time.monotonic() < end_s
        await asyncio.sleep(0)


def test_a_row_is_written_at_once() -> None:
    def act(window: _Window) -> None:
        assert "row one" in window.write("row one")

    assert _Window().run(act, "row one").count("row one") == 1


def test_rows_wait_until_the_width_has_settled_and_come_in_order() -> None:
    def act(window: _Window) -> None:
        for columns in (60, 200, 60):
            window.becomes(columns)
            assert window.write(f"row for {columns}") == ""

    output = _Window().run(act, "row for 60")

    written = [output.index(f"row for {columns}") for columns in (60, 200)]
    assert written == sorted(written)
    assert output.count("row for 60") == 2
    assert output.count("row for 200") == 1


def test_a_width_seen_before_its_signal_is_waited_for_as_well() -> None:
    def act(window: _Window) -> None:
        window.columns = 60
        window.view._app.redraw_now()
        assert window.write("row one") == ""

    assert _Window().run(act, "row one").count("row one") == 1


def test_rows_that_wait_are_written_when_the_prompt_is_left() -> None:
    def act(window: _Window) -> None:
        window.becomes(60)
        assert window.write("row one") == ""
        window.view.leave()

    assert _Window().run(act, "row one").count("row one") == 1


# Rows that wait below an answer that streams


_HELP = [
    "every day",
    "  /help    this list; of all commands, of one, or of the keys",
    "  /exit    leave",
    "───────────────────────────────────────────────",
    "word " * 10 + "word",
]


def test_rows_for_another_width_are_broken_below_their_last_column() -> None:
    """What /help had said during an answer kept its width, and was cut by a narrower window."""
    painter = Painter(Look())
    rows = [Text(row, end="") for row in _HELP]

    assert [row.plain for row in painter.refit(rows, 62)] == _HELP
    assert [row.plain for row in painter.refit(rows, 40)] == [
        "every day",
        "  /help    this list; of all commands,",
        "           of one, or of the keys",
        "  /exit    leave",
        "─" * 40,
        "word word word word word word word word",
        "word word word",
    ]
    assert all(row.cell_len <= 12 for row in painter.refit(rows, 12))


def _shown_below_an_answer(columns: int, num_rows: int) -> list[str]:
    with create_pipe_input() as stdin:
        size = Size(num_rows, columns)
        terminal = Terminal(stdin, _Stdout(), lambda: size, "xterm")
        view = LivePrompt(terminal, Painter(Look()), DummyCompleter(), InMemoryHistory(), "vi")
        view.region.held = [Text(row, end="") for row in [*_HELP, *(f"{n}" for n in range(9)), ""]]
        return "".join(text for _, text in layout._held(view)).split("\n")


def test_what_waits_leaves_room_for_a_narrower_window() -> None:
    """At 100 columns it took the whole screen; at 60 its first rows were in the scrollback for
    good, and came a second time at the end of the answer.
    """
    assert _shown_below_an_answer(100, 30) == [*_HELP, *"012345678"]
    assert _shown_below_an_answer(70, 18)[-2:] == ["1", "… 7 more rows, after the answer"]
    assert len(_shown_below_an_answer(40, 9)) == 3
