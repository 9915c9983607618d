"""Lexes code with pygments, within limits of steps and of time."""

import math
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

from pygments.lexer import Lexer, RegexLexer  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.token import Error, Token  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]

TokenType = Any  # pygments has no stubs

# Some of pygments' lexers match nothing for ever, and some patterns take exponential time: the
# steps are counted, and the time is limited for what happens inside a step.
_STEPS_PER_CHAR = 20
_SPARE_STEPS = 1000
_MAX_LEXING_S = 1.0
_MAX_LINE_CHARS = 2000

# What opens a comment of several lines, where a language has such, and one that is closed.
COMMENTS = (("/*", "/* x */\n"), ("<!--", "<!-- x -->\n"))


class _EndlessError(BaseException):
    """A lexer does not come to an end. No Exception: lexers may catch those."""


def is_too_long(line: str) -> bool:
    """Return whether a line of code has more characters than a lexer is given."""
    return len(line) > _MAX_LINE_CHARS


@cache
def find_lexer(language: str) -> Lexer | None:
    """Return the lexer of a language by its name; None for one that is unknown or fails."""
    if not language:
        return None
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return None
    can_read = all(tokens_of(lexer, example, ["root"]) for _, example in COMMENTS)
    return lexer if can_read else None


def tokens_of(
    lexer: Lexer, text: str, states: list[str], limit_s: float = math.inf
) -> list[tuple[TokenType, str]] | None:
    """Return token types and texts; None if the lexer fails, or takes over a second or `limit_s`.

    Leaves the state after the text in `states`.
    """
    try:
        with _time_limit(min(limit_s, _MAX_LEXING_S)):
            return list(_lex(lexer, text, states))
    except (Exception, _EndlessError):  # a bug in one of hundreds of lexers must not end an answer
        return None


def has_time_limit() -> bool:
    """Return whether a lexer that does not end is stopped here: on the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _EndlessError in the block once it has taken too long, even inside a pattern's match.

    An alarm works in the main thread only, and only while no other code uses it.
    """
    if not has_time_limit():
        yield
        return
    is_armed = True

    def give_up(*_: object) -> None:
        if is_armed:
            raise _EndlessError

    signal.signal(signal.SIGALRM, give_up)
    try:
        # Again and again: where the first is swallowed, the next is not.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        try:
            yield
        finally:
            is_armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _lex(lexer: Lexer, text: str, states: list[str]) -> Iterator[tuple[TokenType, str]]:
    """Yield token types and texts; leaves the state after the text in `states`.

    Lexers that are no state machines start afresh each time. Raises _EndlessError after more
    steps than any text needs.
    """
    most_steps = _STEPS_PER_CHAR * len(text) + _SPARE_STEPS
    if type(lexer).get_tokens_unprocessed is not RegexLexer.get_tokens_unprocessed:
        tokens = iter(lexer.get_tokens_unprocessed(text))
        for _, kind, value in islice(tokens, most_steps):
            yield kind, value
        if next(tokens, None) is not None:
            raise _EndlessError
        return
    position = 0
    for _ in range(most_steps):
        if position >= len(text):
            return
        position = yield from _step(lexer, text, position, states)
    raise _EndlessError


def _step(
    lexer: Lexer, text: str, position: int, states: list[str]
) -> Generator[tuple[TokenType, str], None, int]:
    """Apply the first rule that matches; return where the next one is to match."""
    rules = lexer._tokens  # the compiled rules: pygments offers no way to learn the end state
    for match_at, action, change in rules[states[-1]]:
        match = match_at(text, position)
        if match is not None:
            yield from _act(lexer, action, match)
            _change_states(states, change)
            return int(match.end())
    if text[position] == "\n":
        del states[1:]
        yield Token.Text, "\n"
    else:
        yield Error, text[position]
    return position + 1


def _act(lexer: Lexer, action: Any, match: Any) -> Iterator[tuple[TokenType, str]]:
    if action is None:
        return
    if isinstance(action, type(Token)):
        if match.group():
            yield action, match.group()
    else:
        for _, kind, value in action(lexer, match):
            if value:
                yield kind, value


def _change_states(states: list[str], change: Any) -> None:
    """Apply a rule's transition: a number pops, names are pushed, the bottom always stays."""
    if change is None:
        return
    if isinstance(change, int):
        del states[max(1, len(states) + change) :]
        return
    for state in change if isinstance(change, tuple) else (change,):
        if state == "#pop":
            del states[max(1, len(states) - 1) :]
        else:
            states.append(states[-1] if state == "#push" else state)
