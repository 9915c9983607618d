"""What libraries write to standard error while the prompt is live, on a pseudo-terminal."""

import asyncio
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager

from kvchat.terminal.terminal_io import StrayOutput


@contextmanager
def _terminal_as_stderr() -> Iterator[None]:
    before = os.dup(2)
    ours, theirs = pty.openpty()
    os.dup2(theirs, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        for descriptor in (before, ours, theirs):
            os.close(descriptor)


def test_a_last_line_without_an_end_is_shown_too() -> None:
    """What stood behind the last line end was dropped, such as the only words of a library that
    gives up."""
    shown: list[str] = []

    async def write() -> None:
        with _terminal_as_stderr(), StrayOutput(shown.append).kept():
            os.write(2, b"a warning\nand the last words")

    asyncio.run(write())

    assert shown == ["a warning", "and the last words"]
