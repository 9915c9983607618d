"""Highlights code line by line as it arrives, and keeps the lexer's state between lines.

Pygments lexes whole texts; here every finished line is coloured once.
A line inside an open comment or string is lexed together with the lines since it was opened. A
lexer that fails or does not end leaves its block plain.
"""

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from pygments.lexer import Lexer, RegexLexer  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.token import Comment, Error, Generic, Keyword, Name, Number, Operator, String, Token  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]
from rich.style import Style
from rich.text import Text

from kvchat.terminal.theme import Look

_TokenType = Any  # pygments has no stubs

# An open comment or string longer than this is lexed from a fresh start: a bound on the work.
_MAX_OPEN_LINES = 60
_MAX_LINE_CHARS = 2000

# Some of pygments' lexers match nothing for ever, and some patterns take exponential time: the
# steps are counted, and the time is limited for what happens inside a step.
_STEPS_PER_CHAR = 20
_SPARE_STEPS = 1000
_MAX_LEXING_S = 1.0

# What opens a comment of several lines, where a language has such, and one that is closed.
_COMMENTS = (("/*", "/* x */\n"), ("<!--", "<!-- x -->\n"))

_COLOURS: tuple[tuple[_TokenType, str], ...] = (
    (Comment, "dim italic"),
    (Keyword.Constant, "magenta"),
    (Keyword, "blue"),
    (Name.Function, "green"),
    (Name.Class, "green"),
    (Name.Decorator, "cyan"),
    (Name.Builtin, "cyan"),
    (Name.Tag, "blue"),
    (Name.Attribute, "cyan"),
    (Name.Exception, "cyan"),
    (String, "yellow"),
    (Number, "magenta"),
    (Operator.Word, "blue"),
    (Generic.Deleted, "red"),
    (Generic.Inserted, "green"),
    (Generic.Heading, "bold"),
    (Generic.Subheading, "bold"),
    (Generic.Prompt, "dim"),
)


class _EndlessError(BaseException):
    """A lexer does not come to an end. No Exception: lexers may catch those."""


@dataclass(slots=True)
class _Trust:
    """Whether the lexer of a block has failed; shared with copies, so that they do not retry."""

    is_lost: bool = False


class CodeLines:
    """Colours the lines of one code block. `copy` gives an independent one, for a look ahead."""

    def __init__(self, language: str, look: Look) -> None:
        self._lexer = _find_lexer(language) if look.has_colour else None
        self._trust = _Trust()
        self._comment_marks = _comment_marks(self._lexer)
        self._states = ["root"]
        self._open_lines: list[str] = []

    def copy(self) -> "CodeLines":
        """Return a highlighter in the same state."""
        other = CodeLines.__new__(CodeLines)
        other._lexer = self._lexer
        other._trust = self._trust
        other._comment_marks = self._comment_marks
        other._states = list(self._states)
        other._open_lines = list(self._open_lines)
        return other

    def add(self, line: str) -> Text:
        """Return the next line, coloured."""
        if self._lexer is None or self._trust.is_lost or len(line) > _MAX_LINE_CHARS:
            return Text(line, end="")
        lines = [*self._open_lines, line]
        states = list(self._states)
        tokens = _tokens(self._lexer, "\n".join(lines) + "\n", states)
        if tokens is None:
            self._trust.is_lost = True
            return Text(line, end="")
        if self._comment_marks:
            tokens = _with_open_comment(tokens, self._comment_marks)
        self._keep(lines, states, tokens)
        return _last_line(tokens)

    def _keep(
        self, lines: list[str], states: list[str], tokens: list[tuple[_TokenType, str]]
    ) -> None:
        """Remember the state after the line, or the line where a comment or string is open."""
        if _ends_open(tokens) and len(lines) < _MAX_OPEN_LINES:
            self._open_lines = lines
        else:
            self._open_lines = []
            self._states = states


@cache
def _find_lexer(language: str) -> Lexer | None:
    if not language:
        return None
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return None
    can_read = all(_tokens(lexer, example, ["root"]) for _, example in _COMMENTS)
    return lexer if can_read else None


@cache
def _comment_marks(lexer: Lexer | None) -> tuple[str, ...]:
    """Return what opens comments of several lines in a language."""
    if lexer is None:
        return ()
    found = []
    for mark, example in _COMMENTS:
        tokens = _tokens(lexer, example, ["root"])
        if tokens and tokens[0][0] in Comment:
            found.append(mark)
    return tuple(found)


def _with_open_comment(
    tokens: list[tuple[_TokenType, str]], marks: tuple[str, ...]
) -> list[tuple[_TokenType, str]]:
    """Make everything after an unclosed comment mark a comment.

    Most lexers know a comment only once they see its end.
    """
    text = "".join(value for _, value in tokens)
    begin = 0
    for index, (kind, value) in enumerate(tokens):
        if kind not in Comment and kind not in String:
            for at in range(begin, begin + len(value)):
                if text.startswith(marks, at):
                    before = (kind, value[: at - begin])
                    return [*tokens[:index], before, (Comment.Multiline, text[at:])]
        begin += len(value)
    return tokens


def _tokens(lexer: Lexer, text: str, states: list[str]) -> list[tuple[_TokenType, str]] | None:
    """Return token types and texts, None where the lexer fails or does not come to an end.

    Leaves the state after the text in `states`.
    """
    try:
        with _time_limit(_MAX_LEXING_S):
            return list(_lex(lexer, text, states))
    except (Exception, _EndlessError):  # a bug in one of hundreds of lexers must not end an answer
        return None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _EndlessError in the block once it has taken too long, even inside a pattern's match.

    An alarm works in the main thread only, and only while no other code uses it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
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


def _lex(lexer: Lexer, text: str, states: list[str]) -> Iterator[tuple[_TokenType, str]]:
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
) -> Generator[tuple[_TokenType, str], None, int]:
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


def _act(lexer: Lexer, action: Any, match: Any) -> Iterator[tuple[_TokenType, str]]:
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


def _ends_open(tokens: list[tuple[_TokenType, str]]) -> bool:
    """Tell whether the text may have ended inside a comment or string of several lines."""
    kind = next((kind for kind, value in reversed(tokens) if value.strip()), Token.Text)
    return kind in String or kind in Comment.Multiline


def _last_line(tokens: list[tuple[_TokenType, str]]) -> Text:
    """Return the last line of a text that ends in a line feed."""
    lines = [Text(end="")]
    for kind, value in tokens:
        first, *others = value.split("\n")
        lines[-1].append(first, _style(kind))
        lines.extend(Text(end="").append(part, _style(kind)) for part in others)
    return lines[-2]


@cache
def _style(kind: _TokenType) -> Style:
    for known, style in _COLOURS:
        if kind in known:
            return Style.parse(style)
    return Style.null()
