"""The view of plain lines, on a pipe: lines that come together, and an output that refuses some."""

import asyncio
import io
import os
from collections.abc import Awaitable, Callable
from typing import TextIO

import pytest

from kvchat.terminal.line_view import LineView
from kvchat.terminal.paint import Painter
from kvchat.terminal.theme import Look
from kvchat.terminal.view import Choice, LiveState

_PAINTER = Painter(Look(has_colour=False, is_plain=True, is_spoken=True))
_CHOICES = [Choice("one"), Choice("two"), Choice("three")]


class _Listener:
    """Writes down what a view tells."""

    is_answering = is_at_work = has_queue = has_warned = False
    stoppable_name = "the answer"

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.has_heard = asyncio.Event()
        self.is_lost = False

    def accept(self, text: str) -> None:
        self.accepted.append(text)
        self.has_heard.set()

    def notice(self, text: str) -> None:
        pass

    def key_pressed(self) -> None:
        pass

    def stop_editing(self) -> None:
        pass

    def leave(self, code: int) -> None:
        self.quit(code)

    def quit(self, code: int) -> None:
        pass

    def terminal_lost(self) -> None:
        self.is_lost = True


def _run(
    use: Callable[[LineView, _Listener, TextIO], Awaitable[None]], stdout: TextIO
) -> _Listener:
    """Use a view that reads a pipe; what is typed goes into the other end."""

    async def main() -> _Listener:
        source, sink = os.pipe()
        with open(source) as stdin, open(sink, "w", buffering=1) as keyboard:
            listener = _Listener()
            view = LineView(stdin, stdout, _PAINTER, 60, "")
            running = asyncio.create_task(view.run(listener))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await use(view, listener, keyboard)
            view.leave()
            await running
            return listener

    return asyncio.run(main())


def test_lines_that_come_together_each_find_what_they_are_for() -> None:
    """The second line of a read while a picker was open raised InvalidStateError, and the rest of
    the read was lost."""
    picked: list[int | None] = []

    async def use(view: LineView, listener: _Listener, keyboard: TextIO) -> None:
        keyboard.write("7\n2\n3\nhello\\\nyou\n")
        picked.append(await view.choose("First", _CHOICES))
        picked.append(await view.choose("Second", _CHOICES))
        await listener.has_heard.wait()

    listener = _run(use, io.StringIO())

    assert picked == [1, 2]
    assert listener.accepted == ["hello\nyou"]


@pytest.mark.parametrize("is_spoken", [True, False])
def test_a_list_reads_well(is_spoken: bool) -> None:
    """ "1. My name is Ada., cold · 2 turns": dots of a drawing, and two marks in a row."""
    look = Look(has_colour=False, is_plain=True, is_spoken=is_spoken)
    stdout = io.StringIO()
    view = LineView(io.StringIO("\n"), stdout, Painter(look), 60, "")

    async def choose() -> None:
        choosing = asyncio.create_task(
            view.choose("Go on with", [Choice("My name is Ada.", "cold · 2 turns")])
        )
        await asyncio.sleep(0)
        choosing.cancel()

    asyncio.run(choose())
    detail = "cold, 2 turns" if is_spoken else "cold · 2 turns"
    assert f"1. My name is Ada. ({detail})\n" in stdout.getvalue()


def test_why_a_line_is_refused_during_an_answer_comes_with_the_line() -> None:
    """The line waited for the end of the answer, and the reason stood alone."""
    stdout = io.StringIO()

    async def use(view: LineView, listener: _Listener, keyboard: TextIO) -> None:
        view.write([_PAINTER.text("an answer")], LiveState(is_open=True))
        view.put_back("/compact")
        view.show(LiveState(is_open=True, notice="/compact waits."))
        view.write([_PAINTER.text("its end")], LiveState(is_open=True))

    _run(use, stdout)
    lines = [line for line in stdout.getvalue().splitlines() if line]
    assert lines == ["an answer", "The text was: /compact", "/compact waits.", "its end"]


def test_what_waits_for_an_answer_that_does_not_end_is_shown_at_the_end() -> None:
    stdout = io.StringIO()

    async def use(view: LineView, listener: _Listener, keyboard: TextIO) -> None:
        view.write([_PAINTER.text("an answer")], LiveState(is_open=True))
        view.write([_PAINTER.text("seed is 5.")])

    _run(use, stdout)
    assert stdout.getvalue() == "an answer\nShown after the answer.\nseed is 5.\n"


def test_an_interrupt_behind_an_answered_picker_is_harmless() -> None:
    """Ctrl-C twice in a row at a picker raised InvalidStateError."""
    picked: list[int | None] = []

    async def use(view: LineView, listener: _Listener, keyboard: TextIO) -> None:
        choosing = asyncio.create_task(view.choose("Which", _CHOICES))
        await asyncio.sleep(0)
        view._interrupt()
        view._interrupt()
        picked.append(await choosing)

    _run(use, io.StringIO())

    assert picked == [None]


def test_what_the_encoding_does_not_have_is_shown_as_question_marks() -> None:
    """A character that standard output could not encode counted as a terminal that is gone, and
    the program ended with exit code 129."""
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")

    async def use(view: LineView, listener: _Listener, keyboard: TextIO) -> None:
        view.write([_PAINTER.text("naïve 日本")])

    listener = _run(use, stdout)

    assert not listener.is_lost
    assert b"na?ve ??\n" in stdout.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_gone", [True, False])
def test_only_an_output_that_is_gone_ends_the_face(is_gone: bool) -> None:
    """Any ValueError of standard output counted as a terminal that is gone."""
    has_raised = False

    class Refusing(io.StringIO):
        def write(self, text: str) -> int:
            if is_gone:
                self.close()
            if "words" in text:
                raise ValueError("refused")
            return len(text)

    async def use(view: LineView, listener: _Listener, keyboard: TextIO) -> None:
        nonlocal has_raised
        try:
            view.write([_PAINTER.text("words")])
        except ValueError:
            has_raised = True

    assert (_run(use, Refusing()).is_lost, has_raised) == (is_gone, not is_gone)
