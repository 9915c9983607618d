"""Markdown inside a line: emphasis, code, links. And how much of a text can no longer change.

A text that is still growing can be shown for good as far as nothing after it can give it another
meaning: `settled` says how far that is. Every character shown remembers where in the source it came
from. HTML is text. Follows CommonMark 0.31's delimiter rules but for the rule of three.
"""

import html
import re
from dataclasses import dataclass, field

from rich.style import Style
from rich.text import Text

from kvchat.core.text import sanitize
from kvchat.terminal.paint import Painter
from kvchat.terminal.theme import Role
from kvchat.terminal.wrap import is_between_ideographs, last_between_ideographs

_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_TOKEN = re.compile(
    r"""
      (?P<math>\$(?=[^\s$])[^$\n`]{0,120}(?<=[^\s$])\$(?!\d))
    | (?P<tex>\\[()\[\]]|\$\$|\$)
    | (?P<escape>\\[!-'*-/:-@\\^-`{-~\n])
    | (?P<ticks>`+)
    | (?P<run>\*+|_+|~~+)
    | (?P<autolink><[A-Za-z][A-Za-z0-9+.-]{1,31}:[^\s<>]*>)
    | (?P<entity>&(?:\#[0-9]{1,7}|\#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});)
    | (?P<open>!?\[)
    | (?P<close>\])
    """,
    re.VERBOSE,
)
# A formula between single dollars is short. Two prices in a line are no formula.
_MATH_SO_FAR = re.compile(r"\$(?:[^\s$`][^$\n`]{0,120})?")
# Other formulas in TeX, by the mark that opens them. Alone, a mark is text, and no escaped bracket:
# models write formulas far more often.
_MAX_FORMULA_CHARS = 2000
_TEX_CLOSERS = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}
_URL = r"[^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*"
_TARGET = re.compile(rf"\(\s*<?({_URL})>?(?:\s+[\"'(][^\n]*?[\"')])?\s*\)")
_TARGET_SO_FAR = re.compile(rf"\(\s*(?:<?{_URL}(?:\([^\s()]*)?>?(?:\s+(?:[\"'(][^\n]*)?)?)?")


@dataclass(slots=True)
class _Piece:
    """A run of shown text. `start` is its place in the source; `is_literal` where each character
    shown is one of the source."""

    text: str
    start: int
    end: int
    is_literal: bool = True
    roles: list[Role] = field(default_factory=list)


@dataclass(slots=True)
class _Opener:
    """A delimiter run or bracket that may still find its partner."""

    kind: str
    piece: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Inline:
    """A parsed text. `settled` counts the source characters whose look is final."""

    pieces: tuple[_Piece, ...]
    settled: int

    def text(self, painter: Painter, end: int | None = None) -> Text:
        """Return what is shown of the source up to `end`."""
        shown = Text(end="")
        for piece in self.pieces:
            part = piece.text
            if end is not None and piece.end > end:
                part = part[: max(0, end - piece.start)] if piece.is_literal else ""
            if part:
                shown.append(part, _combined(painter, piece.roles))
        return shown

    def source_after(self, shown_chars: int) -> int | None:
        """Return where the source can be cut so that the first `shown_chars` characters stay.

        None where a cut there would tear a construct or a word: both sides must read the same
        alone as together.
        """
        for piece in self.pieces:
            if shown_chars <= len(piece.text):
                is_plain = piece.is_literal and not piece.roles
                is_gap = piece.text[shown_chars - 1 : shown_chars].isspace()
                is_gap = is_gap or is_between_ideographs(piece.text, shown_chars)
                return piece.start + shown_chars if is_plain and is_gap else None
            shown_chars -= len(piece.text)
        return None


def _combined(painter: Painter, roles: list[Role]) -> Style:
    return Style.combine([painter.style(role) for role in roles]) if roles else Style.null()


def parse_inline(source: str, keeps_ticks: bool = False) -> Inline:
    """Parse the inline Markdown of a paragraph; line feeds in it are kept.

    `keeps_ticks` shows code with its backticks, for looks that have no other way to mark it.
    """
    return _Scanner(source, keeps_ticks).scan()


class _Scanner:
    """One pass over a source, with a stack of what is open."""

    def __init__(self, source: str, keeps_ticks: bool) -> None:
        self._source = source
        self._keeps_ticks = keeps_ticks
        self._pieces: list[_Piece] = []
        self._openers: list[_Opener] = []
        # From here on the source may come to mean something else: its last word may grow.
        self._unsettled = _last_gap(source, len(source))

    def scan(self) -> Inline:
        position = 0
        while (match := _TOKEN.search(self._source, position)) is not None:
            self._add(self._source[position : match.start()], position)
            position = self._take(match)
        self._add(self._source[position:], position)
        settled = min([self._unsettled, *(opener.start for opener in self._openers)])
        pieces = tuple(piece for piece in self._pieces if piece.text)
        return Inline(pieces, _last_gap(self._source, settled))

    def _add(self, text: str, start: int, end: int | None = None, *roles: Role) -> None:
        if text or end is not None:
            is_literal = end is None
            stop = start + len(text) if end is None else end
            self._pieces.append(_Piece(text, start, stop, is_literal, list(roles)))

    def _take(self, match: re.Match[str]) -> int:
        kind, text, start = match.lastgroup, match.group(), match.start()
        if kind == "ticks":
            return self._take_code(text, start)
        if kind == "math":
            self._add(text, start, match.end())
            return match.end()
        if kind == "tex":
            return self._take_tex(text, start)
        if kind == "close":
            return self._take_close(start)
        if kind == "run":
            self._take_run(text, start)
        elif kind == "open":
            self._openers.append(_Opener(text, len(self._pieces), start, 1))
            self._add(text, start)
        elif kind == "escape":
            self._add(text[1], start, match.end())
        elif kind == "entity":
            # It may stand for a character that a terminal obeys, or that is no one column wide.
            self._add(sanitize(html.unescape(text)).replace("\t", " "), start, match.end())
        else:
            self._add(text[1:-1], start, match.end(), Role.LINK)
        return match.end()

    def _take_code(self, ticks: str, start: int) -> int:
        """A code span ends at the next run of as many backticks; without one they are text."""
        begin = start + len(ticks)
        closing = re.compile(rf"(?<!`){ticks}(?!`)").search(self._source, begin)
        if closing is None:
            self._unsettle(start)
            self._add(ticks, start)
            return begin
        code = self._source[begin : closing.start()].replace("\n", " ")
        if len(code) > 2 and code[0] == code[-1] == " " and code.strip():
            code = code[1:-1]
        if self._keeps_ticks:
            code = f"`{code}`"
        self._add(code, start, closing.end(), Role.CODE)
        return closing.end()

    def _take_tex(self, mark: str, start: int) -> int:
        """A formula is shown as it is written, up to the mark that ends it."""
        begin = start + len(mark)
        end = begin
        if (closer := _TEX_CLOSERS.get(mark)) is not None:
            place = self._source.find(closer, begin, begin + _MAX_FORMULA_CHARS)
            if place >= 0:
                end = place + len(closer)
            elif len(self._source) < begin + _MAX_FORMULA_CHARS:
                self._unsettle(start)
        elif _MATH_SO_FAR.fullmatch(self._source, start):
            self._unsettle(start)
        self._add(self._source[start:end], start, end)  # not to be cut inside
        return end

    def _unsettle(self, start: int) -> None:
        self._unsettled = min(self._unsettled, start)

    def _settle_pair(self, opener: _Opener, closer_start: int) -> None:
        """A partner that may yet turn out to be none leaves its opener open as well."""
        if closer_start >= self._unsettled:
            self._unsettle(opener.start)

    def _take_close(self, start: int) -> int:
        """A bracket closes a link where a target follows; else both brackets are text."""
        opener = next((o for o in reversed(self._openers) if o.kind in ("[", "![")), None)
        if opener is None:
            self._add("]", start)
            return start + 1
        target = _TARGET.match(self._source, start + 1)
        index = self._openers.index(opener)
        if target is None:
            rest_is_open = _TARGET_SO_FAR.fullmatch(self._source, start + 1)
            if rest_is_open or start + 1 == len(self._source):
                self._unsettle(opener.start)
            del self._openers[index]
            self._add("]", start)
            return start + 1
        del self._openers[index:]
        self._settle_pair(opener, start)
        self._add_link(opener, target.group(1), start, target.end())
        return target.end()

    def _add_link(self, opener: _Opener, url: str, start: int, end: int) -> None:
        bracket = self._pieces[opener.piece]
        bracket.text, bracket.is_literal = "", False
        label = self._pieces[opener.piece + 1 :]
        for piece in label:
            piece.roles.append(Role.LINK)
        # The label is settled together with its target, never without it.
        shown = "".join(piece.text for piece in label)
        if opener.kind == "![":
            bracket.text = "image: " if shown else "image"
        self._add(f" ({url})" if url and url != shown else "", start, end, Role.DIM)

    # Emphasis

    def _take_run(self, text: str, start: int) -> None:
        can_open, can_close = _flanking(self._source, start, start + len(text))
        count = len(text)
        if can_close:
            count = self._close_run(text[0], count, start)
        position = start + len(text) - count
        if count == 0:
            self._add("", start, start + len(text))
            return
        if can_open:
            self._openers.append(_Opener(text[0], len(self._pieces), position, count))
        self._pieces.append(_Piece(text[:count], position, start + len(text)))

    def _close_run(self, char: str, count: int, start: int) -> int:
        """Match a closing run with openers before it; return how many characters are left."""
        while count:
            index = self._find_opener(char)
            if index is None:
                break
            opener = self._openers[index]
            used = min(2, opener.count, count)
            if char == "~" and used < 2:
                break
            self._settle_pair(opener, start)
            self._style_from(opener, _emphasis(char, used))
            opener.count -= used
            piece = self._pieces[opener.piece]
            piece.text = piece.text[used:]
            piece.is_literal = False
            count -= used
            del self._openers[index + 1 :]
            if opener.count == 0:
                del self._openers[index]
        return count

    def _find_opener(self, char: str) -> int | None:
        for index in range(len(self._openers) - 1, -1, -1):
            if self._openers[index].kind == char:
                return index
            if self._openers[index].kind in ("[", "!["):
                return None  # emphasis does not reach out of a bracket
        return None

    def _style_from(self, opener: _Opener, role: Role) -> None:
        for piece in self._pieces[opener.piece + 1 :]:
            piece.roles.append(role)


def _emphasis(char: str, count: int) -> Role:
    if char == "~":
        return Role.STRIKE
    return Role.STRONG if count == 2 else Role.EMPHASIS


def _flanking(source: str, start: int, end: int) -> tuple[bool, bool]:
    """Return whether a delimiter run can open and can close, by what stands around it."""
    before = source[start - 1] if start else " "
    after = source[end] if end < len(source) else " "
    left = not after.isspace() and (
        after not in _PUNCTUATION or before.isspace() or before in _PUNCTUATION
    )
    right = not before.isspace() and (
        before not in _PUNCTUATION or after.isspace() or after in _PUNCTUATION
    )
    if source[start] != "_":
        return left, right
    return left and (not right or before in _PUNCTUATION), right and (
        not left or after in _PUNCTUATION
    )


def _last_gap(source: str, limit: int) -> int:
    """Return the last place up to `limit` between two words: a word may still grow.

    It is after white space, or between two ideographs, which are words of their own. Inside what
    may become `<http://...>` there is none.
    """
    word = limit
    while word and not source[word - 1].isspace():
        word -= 1
    angle = source.rfind("<", word, limit)
    if angle >= 0 and ">" not in source[angle:limit]:
        limit = angle
    return last_between_ideographs(source, word, limit)
