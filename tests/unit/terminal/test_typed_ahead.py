"""What is typed before the chat reads the terminal."""

import os
import pty
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.keys import Keys

from kvchat.terminal.key_parser import parse_keys
from kvchat.terminal.terminal_io import typed_ahead


@contextmanager
def _terminal() -> Iterator[tuple[int, Vt100Input]]:
    terminal, lines = pty.openpty()
    tty.setraw(lines)
    with os.fdopen(lines) as stdin:
        source = Vt100Input(stdin)
        parse_keys(source)
        yield terminal, source
    os.close(terminal)


def test_keys_that_are_no_text_are_no_text() -> None:
    """An Esc made a message of the command behind it: the model got "␛/continue"."""
    with _terminal() as (terminal, source):
        os.write(terminal, b"one\r\x1b/continue\r\n\x1b[A\x1bOP\x1b[1;5Ctwo\x1b[3~ three\x07")
        assert typed_ahead(source) == (["one", "/continue"], "two three")


def test_replies_of_the_terminal_are_no_text() -> None:
    with _terminal() as (terminal, source):
        os.write(terminal, b"a\x1b]11;rgb:1e1e/1e1e/1e1e\x07\x1b[I\x1bP>|XTerm(3)\x1b\\b\x1b[?62c")
        assert typed_ahead(source) == ([], "ab")


def test_a_paste_is_one_message() -> None:
    """Each of its lines was sent, before the rest of it had come."""
    with _terminal() as (terminal, source):
        os.write(terminal, b"first\r\x1b[200~one\rtwo\x1b[201~ three")
        assert typed_ahead(source) == (["first"], "one\ntwo three")


def test_the_rest_of_a_paste_comes_to_the_prompt() -> None:
    with _terminal() as (terminal, source):
        os.write(terminal, b"\x1b[200~one\ntw")
        assert typed_ahead(source) == ([], "")
        os.write(terminal, b"o\x1b[201~")
        assert [(k.key, k.data) for k in source.read_keys()] == [(Keys.BracketedPaste, "one\ntwo")]
