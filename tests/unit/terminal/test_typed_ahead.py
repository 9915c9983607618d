"""What is typed before the chat reads the terminal."""

import os
import pty
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
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


@pytest.mark.parametrize(
    ("typed", "lines", "rest"),
    [
        # An Esc made a message of the command behind it: the model got "␛/continue".
        (
            b"one\r\x1b/continue\r\n\x1b[A\x1bOP\x1b[1;5Ctwo\x1b[3~ three\x07",
            ["one", "/continue"],
            "two three",
        ),
        # Replies of the terminal are no text.
        (b"a\x1b]11;rgb:1e1e/1e1e/1e1e\x07\x1b[I\x1bP>|XTerm(3)\x1b\\b\x1b[?62c", [], "ab"),
        # Each line of a paste was sent, before the rest of it had come.
        (b"first\r\x1b[200~one\rtwo\x1b[201~ three", ["first"], "one\ntwo three"),
    ],
)
def test_keys_and_replies_are_no_text_and_a_paste_is_one_message(typed, lines, rest):
    with _terminal() as (terminal, source):
        os.write(terminal, typed)
        assert typed_ahead(source) == (lines, rest)


def test_the_rest_of_a_paste_comes_to_the_prompt() -> None:
    with _terminal() as (terminal, source):
        os.write(terminal, b"\x1b[200~one\ntw")
        assert typed_ahead(source) == ([], "")
        os.write(terminal, b"o\x1b[201~")
        assert [(k.key, k.data) for k in source.read_keys()] == [(Keys.BracketedPaste, "one\ntwo")]
