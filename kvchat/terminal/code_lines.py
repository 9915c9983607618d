"""Highlights code line by line as it comes, with the lexer's state kept from line to line.

Pygments lexes whole texts; here every finished line is coloured once and never looked at again.
A line inside an open comment or string is lexed together with the lines since it was opened. Knows
token types; knows no Markdown.
"""

from collections.abc import Iterator
from functools import cache
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


class CodeLines:
    """Colours the lines of one code block. `copy` gives an independent one, for a look ahead."""

    def __init__(self, language: str, look: Look) -> None:
        self._lexer = _find_lexer(language) if look.has_colour else None
        self._comment_marks = _comment_marks(self._lexer)
        self._states = ["root"]
        self._open_lines: list[str] = []

    def copy(self) -> "CodeLines":
        """Return a highlighter in the same state."""
        other = CodeLines.__new__(CodeLines)
        other._lexer = self._lexer
        other._comment_marks = self._comment_marks
        other._states = list(self._states)
        other._open_lines = list(self._open_lines)
        return other

    def add(self, line: str) -> Text:
        """Return the next line, coloured."""
        if self._lexer is None or len(line) > _MAX_LINE_CHARS:
            return Text(line, end="")
        lines = [*self._open_lines, line]
        states = list(self._states)
        tokens = list(_lex(self._lexer, "\n".join(lines) + "\n", states))
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
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


@cache
def _comment_marks(lexer: Lexer | None) -> tuple[str, ...]:
    """Return what opens comments of several lines in a language."""
    if lexer is None:
        return ()
    found = []
    for mark, example in (("/*", "/* x */\n"), ("<!--", "<!-- x -->\n")):
        kind, _ = next(iter(_lex(lexer, example, ["root"])))
        if kind in Comment:
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


def _lex(lexer: Lexer, text: str, states: list[str]) -> Iterator[tuple[_TokenType, str]]:
    """Yield token types and texts; leaves the state after the text in `states`.

    Lexers that are no state machines start afresh each time.
    """
    if type(lexer).get_tokens_unprocessed is not RegexLexer.get_tokens_unprocessed:
        for _, kind, value in lexer.get_tokens_unprocessed(text):
            yield kind, value
        return
    rules = lexer._tokens  # the compiled rules: pygments offers no way to learn the end state
    position = 0
    while position < len(text):
        for match_at, action, change in rules[states[-1]]:
            match = match_at(text, position)
            if match is not None:
                yield from _act(lexer, action, match)
                position = match.end()
                _change_states(states, change)
                break
        else:
            if text[position] == "\n":
                del states[1:]
                yield Token.Text, "\n"
            else:
                yield Error, text[position]
            position += 1


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
