"""What is typed before the chat reads the terminal."""

import os
import pty
import tty

from kvchat.terminal.terminal_io import typed_ahead


def test_keys_that_are_no_text_are_no_text() -> None:
    """An Esc made a message of the command behind it: the model got "␛/continue"."""
    terminal, lines = pty.openpty()
    tty.setraw(lines)
    os.write(terminal, b"one\r\x1b/continue\r\x1b[A\x1bOP\x1b[1;5Ctwo\x1b[3~ three\x07")
    assert typed_ahead(lines) == (["one", "/continue"], "two three")
    os.close(terminal)
    os.close(lines)
