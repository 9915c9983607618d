"""Streaming Markdown: text in as it is generated, finished rows out, each exactly once.

A returned row never changes, so it can go to the terminal's own scrollback. The open part is short;
`tail` renders it as if the text ended now. The final rows do not depend on how the text is cut into
pieces.

Flow finds the beginning and end of blocks, line by line; lists and quotes hold their own flows. It
accepts more than CommonMark, for the Markdown that models write: two columns of indentation
continue a list item, a rule below a paragraph is a rule, a line break is a line break.
`markdown_blocks.py` renders the blocks.
"""

import re
from dataclasses import dataclass, field, replace

from rich.text import Text

from kvchat.core.text import Sanitizer
from kvchat.terminal.markdown_blocks import (
    CODE_INDENT,
    DECIDING_CHARS,
    Block,
    Fence,
    MarkdownTable,
    Paragraph,
    Verbatim,
    begins_code,
    heading,
    indent_of,
    is_delimiter_row,
    rule,
    verbatim,
)
from kvchat.terminal.paint import RenderContext, Row, prefixed
from kvchat.terminal.theme import Role

# Markers deeper than this are text: every level costs Python frames, and rows their columns.
_MAX_DEPTH = 16

_FENCE = re.compile(r"(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")
_HEADING = re.compile(r"(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_RULE = re.compile(r"([-*_])(?:[ \t]*\1){2,}[ \t]*$")
_RULE_SO_FAR = re.compile(r"([-*_])(?:[ \t]*\1)*[ \t]*$")
_BULLET = re.compile(r"([-*+])(?:[ \t]+|$)")
_ORDERED = re.compile(r"(\d{1,9})([.)])(?:[ \t]+|$)")
_QUOTE = re.compile(r">[ \t]?")
_SET_APART = (Fence, MarkdownTable)
_MIN_INDENT = 2  # one column before a text is none: many models begin an answer with a space


@dataclass(slots=True)
class _Container:
    """A list item or a quote: the marker of its lines, and the flow inside."""

    marker: Text
    continuation: Text
    offset: int  # columns of a line that belong to the container; 0 for a quote
    inside: "Flow"
    indent: int = 0
    is_quote: bool = False
    has_rows: bool = False

    def inner(self, line: str) -> str | None:
        """Return the part of a line that is inside, None where the line is outside."""
        if self.is_quote:
            match = _QUOTE.match(line.lstrip(" "))
            if match is not None:
                return line.lstrip(" ")[match.end() :]
            return line if self.inside.continues_with(line) else None
        if not line.strip():
            return ""
        if indent_of(line) >= self.indent + 2 or self.inside.has_open_fence:
            return line[min(indent_of(line), self.offset) :]
        return line if self.inside.continues_with(line) else None

    def mark(self, rows: list[Row]) -> list[Row]:
        """Put the marker before the first row ever, and its width before the others."""
        marked = []
        for row in rows:
            marked.append(prefixed(row, self.continuation if self.has_rows else self.marker))
            self.has_rows = True
        return marked

    def render_context(self, ctx: RenderContext) -> RenderContext:
        return ctx.narrower(self.marker.cell_len)

    def close(self, ctx: RenderContext) -> list[Row]:
        rows = self.mark(self.inside.close(self.render_context(ctx)))
        return rows if self.has_rows else self.mark([Text(end="")])

    def copy(self) -> "_Container":
        return replace(self, inside=self.inside.copy())


@dataclass(slots=True)
class _Numbering:
    """The list the last item belonged to: its kind of marker and its last number."""

    kind: str = ""
    number: int = 0


@dataclass(slots=True)
class Flow:
    """A run of blocks. Lines go in, final rows come out, in order and once.

    `_depth` counts the containers it is inside of.
    """

    _depth: int = 0
    _block: Block | None = None
    _child: _Container | None = None
    _list: _Numbering = field(default_factory=_Numbering)
    _has_rows: bool = False
    _had_blank: bool = False
    _needs_gap: bool = False
    _was_set_apart: bool = False

    # What is open

    @property
    def has_open_fence(self) -> bool:
        if self._child is not None:
            return self._child.inside.has_open_fence
        return isinstance(self._block, Fence)

    @property
    def open_paragraph(self) -> Paragraph | None:
        """The paragraph that text goes to, whatever it is nested in."""
        if self._child is not None:
            return self._child.inside.open_paragraph
        return self._block if isinstance(self._block, Paragraph) else None

    def continues_with(self, line: str) -> bool:
        """Tell whether a line without its container's marker still continues a paragraph in it."""
        return self.open_paragraph is not None and bool(line.strip()) and not _starts_block(line)

    def is_decided(self, line: str) -> bool:
        """Tell whether the beginning of a line is surely running text, whatever follows."""
        if self.has_open_fence:
            return False
        if self._child is not None and (inner := self._child.inner(line)) is not None:
            return self._child.inside.is_decided(inner)
        if isinstance(self._block, Verbatim) and self._block.takes(line):
            return False
        if isinstance(self._block, MarkdownTable):
            return False
        return _is_running_text(line, _MAX_DEPTH - self._depth)

    def copy(self) -> "Flow":
        """Return an independent flow in the same state, for a look ahead."""
        return replace(
            self,
            _block=self._block.copy() if self._block is not None else None,
            _child=self._child.copy() if self._child is not None else None,
            _list=replace(self._list),
        )

    # Lines in, rows out

    def put(self, line: str, ctx: RenderContext) -> list[Row]:
        """Take a line, or the decided beginning of one."""
        rows: list[Row] = []
        if self._child is not None:
            inner = self._child.inner(line)
            if inner is not None:
                return self._put_inside(self._child, inner, ctx)
            rows += self._close_child(ctx)
        return rows + self._put_here(line, ctx)

    def settle(self, ctx: RenderContext) -> list[Row]:
        """Return the rows of open blocks that later text cannot change."""
        if self._child is not None:
            child = self._child
            return self._out(child.mark(child.inside.settle(child.render_context(ctx))))
        return self._out(self._block.settle(ctx)) if self._block is not None else []

    def close(self, ctx: RenderContext) -> list[Row]:
        """End all open blocks; return their rows."""
        return self._close_child(ctx) + self._close_block(ctx)

    def _put_inside(self, child: _Container, line: str, ctx: RenderContext) -> list[Row]:
        if not line.strip() and not child.inside.has_open_fence:
            self._had_blank = True
        return self._out(child.mark(child.inside.put(line, child.render_context(ctx))))

    def _put_here(self, line: str, ctx: RenderContext) -> list[Row]:
        block = self._block
        if isinstance(block, Fence):
            if block.is_closed_by(line):
                return self._close_block(ctx)
            return self._out(block.add(line))
        if not line.strip():
            return self._put_blank(block, ctx)
        if isinstance(block, Verbatim) and _is_for(block, line):
            return self._put_verbatim(block, line, ctx)
        if isinstance(block, MarkdownTable) and "|" in line:
            block.lines.append(line)
            return []
        if isinstance(block, Paragraph) and block.may_be_header:
            if is_delimiter_row(line):
                self._block = MarkdownTable([block.source.strip(), line])
                self._was_set_apart = True
                return []
            block.may_be_header = False
        if (begun := verbatim(line)) is not None:
            rows = self._close_block(ctx)
            self._begin(begun)
            return rows + self._out(begun.add(line, ctx))
        return self._put_text(line.lstrip(), indent_of(line), ctx)

    def _put_blank(self, block: Block | None, ctx: RenderContext) -> list[Row]:
        self._had_blank = True
        if isinstance(block, Verbatim) and not block.closer:
            return self._out(block.add("", ctx))
        return self._close_block(ctx)

    def _put_verbatim(self, block: Verbatim, line: str, ctx: RenderContext) -> list[Row]:
        self._had_blank = False
        rows = self._out(block.add(line, ctx))
        return rows + self._close_block(ctx) if block.ends_with(line) else rows

    def _put_text(self, text: str, indent: int, ctx: RenderContext) -> list[Row]:
        """Take a line that is neither blank nor code: it may begin a block, or continue one."""
        if (match := _FENCE.match(text)) is not None:
            language = match["info"].split()[0] if match["info"].split() else ""
            fence = Fence(match["mark"], indent, language.strip("{}.").lower()[:32])
            rows = self._close_block(ctx)
            self._begin(fence)
            return rows + self._out(fence.begin(ctx))
        if (match := _HEADING.match(text)) is not None:
            rows = self._close_block(ctx)
            self._begin(None, is_set_apart=True)
            return rows + self._out(heading(len(match[1]), match[2] or "", ctx))
        if _RULE.match(text) is not None:
            rows = self._close_block(ctx)
            self._begin(None, is_set_apart=True)
            return rows + self._out(rule(ctx))
        container = self._container(text, indent, ctx)
        if container is not None:
            return self._put_container(*container, ctx)
        is_indented = indent >= _MIN_INDENT and not self._depth
        return self._put_paragraph(" " * indent + text if is_indented else text, ctx)

    def _put_container(self, child: _Container, rest: str, ctx: RenderContext) -> list[Row]:
        rows = self._close_block(ctx)
        self._begin(None)
        self._child = child
        return rows + self._put_inside(child, rest, ctx) if rest else rows

    def _put_paragraph(self, text: str, ctx: RenderContext) -> list[Row]:
        rows: list[Row] = []
        block = self._block
        if not isinstance(block, Paragraph):
            rows = self._close_block(ctx)
            block = Paragraph(may_be_header="|" in text[:DECIDING_CHARS])
            self._begin(block)
        elif block.source and not block.source.endswith("\n"):
            block.source += "\n"
        block.source += text
        return rows

    def _container(
        self, text: str, indent: int, ctx: RenderContext
    ) -> tuple[_Container, str] | None:
        """Return the list item or quote a line begins, and what of the line is inside it."""
        if self._depth >= _MAX_DEPTH:
            return None
        if (match := _QUOTE.match(text)) is not None:
            self._list.kind = ""
            return self._quote(ctx), text[match.end() :]
        if (match := _BULLET.match(text)) is not None:
            label = ctx.painter.look.glyphs.bullet
            kind = match[1]
        elif (match := _ORDERED.match(text)) is not None:
            if self._block is not None and self._list.kind != match[2] and match[1] != "1":
                return None  # a number at the beginning of a paragraph's line
            self._count(match[2], int(match[1]))
            label, kind = f"{self._list.number}{match[2]}", match[2]
        else:
            return None
        self._list.kind = kind
        marker = Text(end="").append(f"{label} ", ctx.painter.style(Role.DIM))
        offset = indent + min(match.end(), len(match.group().rstrip()) + 4)
        continuation = Text(" " * marker.cell_len, end="")
        inside = Flow(self._depth + 1)
        return _Container(marker, continuation, offset, inside, indent), text[match.end() :]

    def _count(self, kind: str, number: int) -> None:
        is_next = self._list.kind == kind
        self._list.number = self._list.number + 1 if is_next else number

    def _quote(self, ctx: RenderContext) -> _Container:
        glyph = ctx.painter.look.glyphs.quote
        bar = Text(end="").append(f"{glyph} ", ctx.painter.style(Role.DIM))
        return _Container(bar, bar, 0, Flow(self._depth + 1), is_quote=True)

    # Blocks one after another

    def _begin(self, block: Block | None, is_set_apart: bool = False) -> None:
        """Start a block: decide whether an empty row goes before it."""
        is_set_apart = is_set_apart or isinstance(block, _SET_APART)
        wants_gap = self._had_blank or is_set_apart or self._was_set_apart
        self._needs_gap = self._has_rows and wants_gap
        self._had_blank = False
        self._was_set_apart = is_set_apart
        self._block = block
        if block is not None or is_set_apart:
            self._list.kind = ""  # what comes between two items ends their list

    def _close_child(self, ctx: RenderContext) -> list[Row]:
        child, self._child = self._child, None
        return self._out(child.close(ctx)) if child is not None else []

    def _close_block(self, ctx: RenderContext) -> list[Row]:
        block, self._block = self._block, None
        return self._out(block.close(ctx)) if block is not None else []

    def _out(self, rows: list[Row]) -> list[Row]:
        if not rows:
            return []
        gap = [Text(end="")] if self._needs_gap else []
        self._needs_gap = False
        self._has_rows = True
        return gap + rows


def _starts_block(line: str) -> bool:
    text = line.strip()
    patterns = (_FENCE, _HEADING, _RULE, _BULLET, _ORDERED, _QUOTE)
    return any(pattern.match(text) for pattern in patterns) or verbatim(text) is not None


def _is_for(block: Verbatim, line: str) -> bool:
    return block.takes(line) and (bool(block.closer) or not _FENCE.match(line.lstrip()))


def _is_running_text(line: str, max_markers: int) -> bool:
    """Tell whether a line's beginning can only be a paragraph's, after at most so many markers."""
    if indent_of(line) >= CODE_INDENT:
        return False
    text = line.lstrip(" ")
    for _ in range(max_markers):
        match = _BULLET.match(text) or _ORDERED.match(text) or _QUOTE.match(text)
        if match is None:
            break
        if _RULE_SO_FAR.match(text):
            return False
        text = text[match.end() :]
        if indent_of(text) >= CODE_INDENT:
            return False
        text = text.lstrip(" ")
    if begins_code(text):
        return False
    if len(text) < DECIDING_CHARS or "|" in text[:DECIDING_CHARS]:
        return False
    is_special = text.startswith(("#", "```", "~~~")) or _RULE_SO_FAR.match(text)
    return not is_special


# Always as wide, wherever it stands: a column is not known while a line is coming in.
_TAB = " " * 4


class MarkdownStream:
    """Renders one text as it arrives. It sanitises its input."""

    def __init__(self) -> None:
        self._sanitizer = Sanitizer()
        self._flow = Flow()
        self._line = ""  # the beginning of a line not yet given to the flow
        self._is_inside_line = False

    def feed(self, text: str, ctx: RenderContext) -> list[Row]:
        """Take more text; return the rows that it completes."""
        rows: list[Row] = []
        safe = self._sanitizer.feed(text).replace("\t", _TAB)
        *lines, rest = safe.split("\n")
        for line in lines:
            rows += self._put(line, ctx)
            self._end_line()
        rows += self._put_beginning(rest, ctx)
        return rows + self._flow.settle(ctx)

    def finish(self, ctx: RenderContext) -> list[Row]:
        """Return the remaining rows, at the end of the text."""
        rows = self._put("", ctx) if self._line else []
        self._is_inside_line = False
        return rows + self._flow.close(ctx)

    def tail(self, ctx: RenderContext) -> list[Row]:
        """Return the rows that may still change, rendered as if the text ended here."""
        ahead = MarkdownStream()
        ahead._flow = self._flow.copy()
        ahead._line = self._line
        return ahead.finish(ctx)

    def _put(self, text: str, ctx: RenderContext) -> list[Row]:
        """Take the rest of a line."""
        line, self._line = self._line + text, ""
        if self._is_inside_line:
            self._continue(line)
            return []
        return self._flow.put(line, ctx)

    def _put_beginning(self, text: str, ctx: RenderContext) -> list[Row]:
        """Take text that no line end follows yet; give it on once it is sure to be running text."""
        self._line += text
        if self._is_inside_line:
            return self._put("", ctx)
        if not self._line or not self._flow.is_decided(self._line):
            return []
        line, self._line = self._line, ""
        rows = self._flow.put(line, ctx)
        self._is_inside_line = True
        return rows

    def _continue(self, text: str) -> None:
        paragraph = self._flow.open_paragraph
        assert paragraph is not None, "only running text is entered before its line ends"
        paragraph.source += text

    def _end_line(self) -> None:
        self._is_inside_line = False
        paragraph = self._flow.open_paragraph
        if paragraph is not None and paragraph.source and not paragraph.source.endswith("\n"):
            paragraph.source += "\n"
