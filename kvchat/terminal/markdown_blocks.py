"""The blocks that hold text: paragraph, heading, rule, fenced code, table.

Each block takes source text and returns rows; every row is returned once and is final.
`markdown.py` finds where blocks begin and end.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal, Self

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvchat.terminal.code_lines import CodeLines
from kvchat.terminal.markdown_inline import Inline, parse_inline
from kvchat.terminal.paint import RenderContext, Row
from kvchat.terminal.theme import Role

# Models write code without a fence, and formulas in TeX. As running text they lose the indentation,
# and underscores and asterisks, which Markdown reads as emphasis.

# So many characters tell what a line is. Only these are looked at, as the rest may still come.
DECIDING_CHARS = 40

# An indentation that makes code of a line.
CODE_INDENT = 4
_BODY_INDENT = 2  # in a block whose first line is code

# The first line of a block of code. Each form is one that prose does not have.
_CODE_HEAD = re.compile(
    r"""
      (?:async[ ])?def[ ]\w+[ ]?\(
    | class[ ]\w+[ ]?(?:[({:<]|extends\b)
    | (?:export[ ])?(?:default[ ])?(?:async[ ])?function\*?[ ]\w*[ ]?\(
    | (?:export[ ])?(?:const|let|var)[ ]\w+(?::[ ]?\w+)?[ ]=
    | (?:pub[ ])?fn[ ]\w+[ ]?[(<]
    | func[ ](?:\([^)]*\)[ ])?\w+\(
    | (?:public|private|protected|static)[ ](?:[\w<>\[\]]+[ ]){1,3}\w*[ ]?[({=]
    | (?:int|void|char|double|float|bool|auto|string)[ ][*&]?\w+\(
    | (?:if|for|while|switch)[ ]\(.*\{?
    | if[ ]__name__\b
    | from[ ][\w.]+[ ]import[ ]
    | import[ ][\w.]+(?:[ ]as[ ]\w+)?;?$
    | \#include[ ]?[<"]
    | \#!/
    | \{[ ]?(?:"|$)
    """,
    re.VERBOSE,
)
# A line at the left edge that goes on with a block of code.
_CODE_LINE = re.compile(
    r"""
      (?:else|elif|except|finally|catch|return|yield|raise|print|console)\b
    | [\w.\[\]"']+[ ]?(?:[-+*/|&%]|//|\*\*|:)?=[ ]?\S
    | [\w.]+\([^ ]*
    | @\w
    | //|/\*|\#[ ]
    """,
    re.VERBOSE,
)
_OPENING_CHARS, _CLOSING_CHARS = ("{", "["), ("}", "]", ")")
_MARKER = re.compile(r"[-*+>|]|\d+[.)] ")
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ ]")  # models indent lists more often than such code
# The marks of a formula that has its lines for itself.
_FORMULAS = {"\\[": "\\]", "$$": "$$"}


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def begins_code(text: str) -> bool:
    """Tell whether a line, given without its indentation, can only be one of a program or JSON."""
    if _MARKER.match(text):
        return False
    if len(text) < DECIDING_CHARS and text.rstrip().endswith(_OPENING_CHARS):
        return not text.startswith("# ")
    return _CODE_HEAD.match(text[:DECIDING_CHARS]) is not None


@dataclass(slots=True)
class Block:
    """A block whose source is still arriving."""

    def settle(self, ctx: RenderContext) -> list[Row]:
        """Return the rows that later text cannot change, and drop them here."""
        return []

    def close(self, ctx: RenderContext) -> list[Row]:
        """Return the remaining rows, at the end of the block."""
        return []

    def copy(self) -> Self:
        """Return an independent block in the same state, for a look ahead."""
        return replace(self)


@dataclass(slots=True)
class Verbatim(Block):
    """A block of such lines. Each is given as soon as it is complete, and is not wrapped.

    has_head  a line of code began it; without one, every line is indented
    closer    what ends the formula that it is; "" for code
    """

    has_head: bool = False
    closer: str = ""
    num_blank: int = 0

    def takes(self, line: str) -> bool:
        """Tell whether a line that is not blank belongs to the block."""
        if self.closer:
            return True
        if indent_of(line) >= (_BODY_INDENT if self.has_head else CODE_INDENT):
            return True
        if not self.has_head:
            return False
        text = line.lstrip()
        if begins_code(text) or text.startswith(_CLOSING_CHARS):
            return True
        return not self.num_blank and _CODE_LINE.match(text[:DECIDING_CHARS]) is not None

    def ends_with(self, line: str) -> bool:
        """Tell whether a line of the block is surely its last."""
        return bool(self.closer) and line.rstrip().endswith(self.closer)

    def add(self, line: str, ctx: RenderContext) -> list[Row]:
        if not line.strip():
            self.num_blank += 1  # shown only if more code follows
            return []
        rows = [Text(end="") for _ in range(self.num_blank)]
        self.num_blank = 0
        return [*rows, ctx.painter.text(line, Role.PLAIN if self.closer else Role.CODE)]


def verbatim(line: str) -> Verbatim | None:
    """Return the block that a line begins, None for running text."""
    text = line.lstrip()
    if (closer := _FORMULAS.get(text.rstrip())) is not None:
        return Verbatim(closer=closer)
    if begins_code(text):
        return Verbatim(has_head=True)
    is_code = indent_of(line) >= CODE_INDENT and not _ITEM.match(text)
    return Verbatim() if is_code else None


_MAX_RULE_COLUMNS = 48


@dataclass(slots=True)
class Paragraph(Block):
    """Running text. `source` is what of it has not been given yet.

    `may_be_header` while its only line could turn out to be a table's first.
    """

    source: str = ""
    may_be_header: bool = False

    def settle(self, ctx: RenderContext) -> list[Row]:
        is_one_row = 2 * len(self.source) < ctx.width  # a character takes two cells at most
        if self.may_be_header or (is_one_row and "\n" not in self.source):
            return []
        inline = _parse(self.source, ctx)
        text = inline.text(ctx.painter, inline.settled)
        rows = ctx.painter.wrap(text, ctx.width)
        starts = _row_starts(text.plain, rows)
        for count in range(len(rows) - 1, 0, -1):
            cut = inline.source_after(starts[count])
            if cut is not None:
                self.source = self.source[cut:]
                return rows[:count]
        return []

    def close(self, ctx: RenderContext) -> list[Row]:
        source, self.source = self.source.rstrip(), ""
        if not source:
            return []
        text = _parse(source, ctx).text(ctx.painter)
        return ctx.painter.wrap(text, ctx.width)


def _parse(source: str, ctx: RenderContext) -> Inline:
    return parse_inline(source, keeps_ticks=not ctx.painter.look.has_colour)


def _row_starts(plain: str, rows: list[Row]) -> list[int]:
    """Return where in a text each of its rows begins, white space between rows left out."""
    starts = []
    position = 0
    for row in rows:
        position = plain.index(row.plain, position)
        starts.append(position)
        position += len(row.plain)
    return starts


def heading(level: int, source: str, ctx: RenderContext) -> list[Row]:
    """Return the rows of a heading. Where nothing else marks it, its number signs stay."""
    painter = ctx.painter
    text = _parse(source, ctx).text(painter)
    text.stylize_before(painter.style(Role.HEADING_1 if level == 1 else Role.HEADING))
    if painter.look.is_plain and not painter.look.is_spoken:
        text = Text("#" * level + " ", end="").append_text(text)
    return painter.wrap(text, ctx.width)


def rule(ctx: RenderContext, label: str = "") -> list[Row]:
    """Return a drawn line, with or without a label in it; nothing for spoken output."""
    painter, glyph = ctx.painter, ctx.painter.look.glyphs.rule
    if painter.look.is_spoken:
        return []
    columns = min(_MAX_RULE_COLUMNS, ctx.width)
    line = f"{glyph * 3} {label} " if label else ""
    return [painter.text((line + glyph * columns)[:columns], Role.DIM)]


@dataclass(slots=True)
class Fence(Block):
    """A code block. Every line is given as soon as it is complete, and is not wrapped.

    `mark` opened it; `indent` columns of white space belong to the block, not to the code.
    """

    mark: str
    indent: int
    language: str
    code: CodeLines | None = None

    def begin(self, ctx: RenderContext) -> list[Row]:
        self.code = CodeLines(self.language, ctx.painter.look)
        if ctx.painter.look.is_spoken:
            return [ctx.painter.text(f"Code, {self.language}:" if self.language else "Code:")]
        return rule(ctx, self.language)

    def is_closed_by(self, line: str) -> bool:
        """Tell whether a line ends the block."""
        closing = line.strip()
        return (
            len(closing) >= len(self.mark)
            and set(closing) == {self.mark[0]}
            and len(line) - len(line.lstrip()) < self.indent + 4
        )

    def add(self, line: str) -> list[Row]:
        assert self.code is not None, "the block has begun"
        indent = len(line) - len(line.lstrip(" "))
        line = line[min(indent, self.indent) :]
        return [self.code.add(line)]

    def close(self, ctx: RenderContext) -> list[Row]:
        if ctx.painter.look.is_spoken:
            return [ctx.painter.text("End of code.")]
        return rule(ctx)

    def copy(self) -> Self:
        return replace(self, code=self.code.copy() if self.code is not None else None)


_DELIMITER_ROW = re.compile(r"^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")
_CELL = re.compile(r"(?:\\.|`[^`]*`|[^|\\])+|(?<=\|)(?=\|)|\\$")


def is_delimiter_row(line: str) -> bool:
    """Tell whether a line is what stands between a table's header and its rows."""
    return "|" in line and "-" in line and _DELIMITER_ROW.match(line.strip()) is not None


@dataclass(slots=True)
class MarkdownTable(Block):
    """A table; its rows wait until it is complete, because a later row may widen a column."""

    lines: list[str]

    def close(self, ctx: RenderContext) -> list[Row]:
        header, delimiter, *body = [_cells(line) for line in self.lines]
        if ctx.painter.look.is_plain:
            return _spoken_table(header, body, ctx)
        painter = ctx.painter
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, border_style="dim")
        if not painter.look.has_unicode:
            table.box = None
        for column, name in enumerate(header):
            mark = delimiter[column] if column < len(delimiter) else ""
            table.add_column(_cell_text(name, ctx), justify=_justify(mark), overflow="fold")
        for cells in body:
            cells = (cells + [""] * len(header))[: len(header)]
            table.add_row(*(_cell_text(cell, ctx) for cell in cells))
        return painter.lay_out(table, ctx.width)

    def copy(self) -> Self:
        return replace(self, lines=list(self.lines))


def _cells(line: str) -> list[str]:
    line = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in _CELL.findall(line)]


def _justify(mark: str) -> Literal["left", "center", "right"]:
    if mark.startswith(":") and mark.endswith(":"):
        return "center"
    return "right" if mark.endswith(":") else "left"


def _cell_text(source: str, ctx: RenderContext) -> Text:
    return _parse(source.replace("<br>", "\n"), ctx).text(ctx.painter)


def _spoken_table(header: list[str], body: list[list[str]], ctx: RenderContext) -> list[Row]:
    """Return a table as one sentence a row: a column of figures says nothing when read aloud."""
    rows = []
    for cells in body:
        pairs = (f"{name}: {cell}" for name, cell in zip(header, cells, strict=False) if cell)
        rows += ctx.painter.wrap(_cell_text("; ".join(pairs), ctx), ctx.width)
    return rows
