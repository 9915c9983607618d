"""Verbatim: lines of an answer that are shown as they are, although no fence marks them.

Models write code without a fence, and formulas in TeX. As running text they lose the indentation,
and underscores and asterisks, which Markdown reads as emphasis.
"""

import re
from dataclasses import dataclass, replace

from rich.text import Text

from kvchat.terminal.paint import RenderContext, Row
from kvchat.terminal.theme import Role

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
class Verbatim:
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

    def settle(self, ctx: RenderContext) -> list[Row]:
        return []

    def close(self, ctx: RenderContext) -> list[Row]:
        return []

    def copy(self) -> "Verbatim":
        return replace(self)


def verbatim(line: str) -> Verbatim | None:
    """Return the block that a line begins, None for running text."""
    text = line.lstrip()
    if (closer := _FORMULAS.get(text.rstrip())) is not None:
        return Verbatim(closer=closer)
    if begins_code(text):
        return Verbatim(has_head=True)
    is_code = indent_of(line) >= CODE_INDENT and not _ITEM.match(text)
    return Verbatim() if is_code else None
