"""TerminalGuard: whatever happens, the terminal is left as it was found.

Restores the line settings, the cursor and bracketed paste on the way out of a block, also where an
exception is the way. Knows terminal attributes; knows no prompt.
"""

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

# Attributes reset, cursor shown, wrapping on, bracketed paste and synchronised output off.
_RESET = b"\x1b[0m\x1b[?25h\x1b[?7h\x1b[?2004l\x1b[?2026l"


@contextmanager
def terminal_guard(writes_sequences: bool) -> Iterator[None]:
    """Leave the terminal of the standard streams as it is now.

    `writes_sequences` false never writes an escape sequence, not even to undo others.
    """
    descriptor = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error:
        yield
        return
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _forget_if_lost(stream)
        if writes_sequences:
            with suppress(OSError, ValueError):
                os.write(sys.stdout.fileno(), _RESET)
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _forget_if_lost(stream: TextIO) -> None:
    """Point a stream whose terminal is gone nowhere: Python would complain about it at its end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
