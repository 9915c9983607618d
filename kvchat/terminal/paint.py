"""Rows: styled lines of text, converted to escape sequences or prompt_toolkit fragments.

A row is a Rich Text of one line. Rich renders to strings only; the view writes them.
"""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prompt_toolkit.formatted_text import StyleAndTextTuples
from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from kvchat.core.text import sanitize
from kvchat.terminal.theme import Look, Role
from kvchat.terminal.wrap import break_offsets

Row = Text
Fragments = StyleAndTextTuples

_TAB_COLUMNS = 4
_MIN_HUNG_CELLS = 16
# What stands before the text of a row: its indentation, and a first column if it has one.
_LEAD = re.compile(r" *(?:\S+(?: \S+)* {2,})?")

# prompt_toolkit's names of the terminal's sixteen colours, by number.
_ANSI_NAMES = (
    *("ansiblack", "ansired", "ansigreen", "ansiyellow"),
    *("ansiblue", "ansimagenta", "ansicyan", "ansigray"),
    *("ansibrightblack", "ansibrightred", "ansibrightgreen", "ansibrightyellow"),
    *("ansibrightblue", "ansibrightmagenta", "ansibrightcyan", "ansiwhite"),
)


class Painter:
    """Converts texts to rows, and rows to terminal output, for one look."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self._styles = {role: look.style(role) for role in Role}
        self._prompt_styles: dict[Style, str] = {}
        # Only its measuring and table layout are used; nothing is ever printed with it.
        self._console = Console(
            file=io.StringIO(), width=80, color_system=None, legacy_windows=False, emoji=False
        )

    def style(self, role: Role) -> Style:
        return self._styles[role]

    def text(self, content: str, role: Role = Role.PLAIN) -> Row:
        """Return one row of safe text. `content` is sanitised and its line ends become spaces."""
        line = sanitize(content).replace("\n", " ").expandtabs(_TAB_COLUMNS)
        return Text(line, self._styles[role], end="")

    def wrapped(
        self, content: str, width: int, role: Role = Role.PLAIN, hanging: int = 0
    ) -> list[Row]:
        """Return safe text as rows of at most `width` cells, its own line ends kept.

        All rows of a line but the first are indented by `hanging` cells, if there is room for that.
        """
        text = Text(sanitize(content).expandtabs(_TAB_COLUMNS), self._styles[role], end="")
        if not hanging or self.look.is_spoken or width - hanging < _MIN_HUNG_CELLS:
            return self.wrap(text, width)
        return [
            row for line in text.split(allow_blank=True) for row in self._hung(line, width, hanging)
        ]

    def _hung(self, line: Text, width: int, hanging: int) -> list[Row]:
        offsets = break_offsets(line.plain, width)
        if not offsets:
            return self.wrap(line, width)
        first, rest = line.divide(offsets[:1])
        below = Text(" " * hanging, end="")
        first.rstrip()
        return [first, *(prefixed(row, below) for row in self.wrap(rest, width - hanging))]

    def wrap(self, text: Text, width: int) -> list[Row]:
        """Break a text at its line ends and where it is wider than `width` cells."""
        rows = []
        for line in text.split(allow_blank=True):
            offsets = break_offsets(line.plain, max(1, width))
            rows += list(line.divide(offsets)) if offsets else [line]
        for row in rows:
            row.rstrip()
        return rows

    def refit(self, rows: Iterable[Row], width: int) -> list[Row]:
        """Return rows that were laid out for another width, none of them wider than `width` cells.

        The further parts of a row stand below the beginning of its last column; a rule is cut.
        """
        fitted: list[Row] = []
        for row in rows:
            if row.cell_len <= width:
                fitted.append(row)
            elif len(set(row.plain)) == 1:
                fitted += row.divide([width])[:1]
            else:
                lead = _LEAD.match(row.plain)
                hanging = lead.end() if lead and width - lead.end() >= _MIN_HUNG_CELLS else 0
                fitted += self._hung(row, width, hanging)
        return fitted

    def lay_out(self, renderable: RenderableType, width: int) -> list[Row]:
        """Return the rows of any Rich renderable, a table for example."""
        options = self._console.options.update(width=max(1, width), height=None)
        lines = self._console.render_lines(renderable, options, pad=False)
        rows = []
        for line in lines:
            row = Text(end="")
            for segment in line:
                row.append(segment.text, segment.style)
            row.rstrip()
            rows.append(row)
        return rows

    # Rows to what a terminal takes

    def ansi(self, rows: Iterable[Row]) -> str:
        """Return rows as text with escape sequences, each ending in a line feed."""
        return "".join(f"{self._ansi_row(row)}\n" for row in rows)

    def _ansi_row(self, row: Row) -> str:
        if self.look.is_plain:
            return row.plain
        return "".join(
            style.render(text, color_system=ColorSystem.STANDARD) for text, style in self._runs(row)
        )

    def fragments(self, rows: Sequence[Row]) -> Fragments:
        """Return rows as prompt_toolkit's formatted text, line feeds between them."""
        fragments: Fragments = []
        for number, row in enumerate(rows):
            if number:
                fragments.append(("", "\n"))
            fragments.extend((self._prompt_style(style), text) for text, style in self._runs(row))
        return fragments

    def _runs(self, row: Row) -> Iterable[tuple[str, Style]]:
        """Yield the pieces of a row that have one style each."""
        if not row.spans:
            style = row.style if isinstance(row.style, Style) else Style.null()
            return [(row.plain, style)] if row.plain else []
        segments = row.render(self._console)
        return [(s.text, s.style or Style.null()) for s in segments if s.text]

    def _prompt_style(self, style: Style) -> str:
        """Return a Rich style in prompt_toolkit's words."""
        known = self._prompt_styles.get(style)
        if known is None:
            names = ("bold", "dim", "italic", "underline", "strike", "reverse")
            words = [name for name in names if getattr(style, name)]
            if style.color is not None and style.color.number is not None:
                words.append(f"fg:{_ANSI_NAMES[style.color.number]}")
            known = self._prompt_styles[style] = " ".join(words)
        return known


def prefixed(row: Row, prefix: Text) -> Row:
    """Return a row behind a prefix; an empty row takes the prefix without its trailing space."""
    joined = prefix.copy()
    joined.append_text(row)
    if not row.plain:
        joined.rstrip()
    return joined


@dataclass(frozen=True, slots=True)
class RenderContext:
    """The painter and the width in cells that rows are laid out for."""

    painter: Painter
    width: int

    def narrower(self, cells: int) -> "RenderContext":
        return RenderContext(self.painter, max(8, self.width - cells))
