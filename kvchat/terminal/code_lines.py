"""Highlights code line by line as it arrives, and keeps the lexer's state between lines.

Pygments lexes whole texts; here every finished line is coloured once.
A line inside an open comment or string is lexed together with the lines since it was opened. A
lexer that fails or does not end leaves its block plain.
"""

from dataclasses import dataclass
from functools import cache

from pygments.lexer import Lexer  # type: ignore[import-untyped]
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, Token  # type: ignore[import-untyped]
from rich.style import Style
from rich.text import Text

from kvchat.chat.lexing import COMMENTS, TokenType, find_lexer, is_too_long, tokens_of
from kvchat.terminal.theme import Look

# An open comment or string longer than this is lexed from a fresh start: a bound on the work.
_MAX_OPEN_LINES = 60

_COLOURS: tuple[tuple[TokenType, str], ...] = (
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


@dataclass(slots=True)
class _Trust:
    """Whether the lexer of a block has failed; shared with copies, so that they do not retry."""

    is_lost: bool = False


class CodeLines:
    """Colours the lines of one code block. `copy` gives an independent one, for a look ahead."""

    def __init__(self, language: str, look: Look) -> None:
        self._lexer = find_lexer(language) if look.has_colour else None
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
        if self._lexer is None or self._trust.is_lost or is_too_long(line):
            return Text(line, end="")
        lines = [*self._open_lines, line]
        states = list(self._states)
        tokens = tokens_of(self._lexer, "\n".join(lines) + "\n", states)
        if tokens is None:
            self._trust.is_lost = True
            return Text(line, end="")
        if self._comment_marks:
            tokens = _with_open_comment(tokens, self._comment_marks)
        self._keep(lines, states, tokens)
        return _last_line(tokens)

    def _keep(
        self, lines: list[str], states: list[str], tokens: list[tuple[TokenType, str]]
    ) -> None:
        """Remember the state after the line, or the line where a comment or string is open."""
        if _ends_open(tokens) and len(lines) < _MAX_OPEN_LINES:
            self._open_lines = lines
        else:
            self._open_lines = []
            self._states = states


@cache
def _comment_marks(lexer: Lexer | None) -> tuple[str, ...]:
    """Return what opens comments of several lines in a language."""
    if lexer is None:
        return ()
    found = []
    for mark, example in COMMENTS:
        tokens = tokens_of(lexer, example, ["root"])
        if tokens and tokens[0][0] in Comment:
            found.append(mark)
    return tuple(found)


def _with_open_comment(
    tokens: list[tuple[TokenType, str]], marks: tuple[str, ...]
) -> list[tuple[TokenType, str]]:
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


def _ends_open(tokens: list[tuple[TokenType, str]]) -> bool:
    """Tell whether the text may have ended inside a comment or string of several lines."""
    kind = next((kind for kind, value in reversed(tokens) if value.strip()), Token.Text)
    return kind in String or kind in Comment.Multiline


def _last_line(tokens: list[tuple[TokenType, str]]) -> Text:
    """Return the last line of a text that ends in a line feed."""
    lines = [Text(end="")]
    for kind, value in tokens:
        first, *others = value.split("\n")
        lines[-1].append(first, _style(kind))
        lines.extend(Text(end="").append(part, _style(kind)) for part in others)
    return lines[-2]


@cache
def _style(kind: TokenType) -> Style:
    for known, style in _COLOURS:
        if kind in known:
            return Style.parse(style)
    return Style.null()
