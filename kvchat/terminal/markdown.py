"""MarkdownStream: text in as it is generated, finished rows out, each exactly once.

What has been given is never taken back: it can go to the terminal's own scrollback. What is still
open is short, and `tail` shows it as it would look if the text ended now. However the text is cut
into pieces, the rows given in the end are the same.
"""

from kvchat.terminal.blocks import Flow
from kvchat.terminal.leaves import Sheet
from kvchat.terminal.paint import Row
from kvchat.terminal.sanitize import Sanitizer

# Always as wide, wherever it stands: a column is not known while a line is coming in.
_TAB = " " * 4


class MarkdownStream:
    """Renders one text. Sanitises what it is fed."""

    def __init__(self) -> None:
        self._sanitizer = Sanitizer()
        self._flow = Flow()
        self._line = ""  # the beginning of a line not yet given to the flow
        self._is_inside_line = False

    def feed(self, text: str, sheet: Sheet) -> list[Row]:
        """Take more text; return the rows it finishes."""
        rows: list[Row] = []
        safe = self._sanitizer.feed(text).replace("\t", _TAB)
        *lines, rest = safe.split("\n")
        for line in lines:
            rows += self._put(line, sheet)
            self._end_line()
        rows += self._put_beginning(rest, sheet)
        return rows + self._flow.settle(sheet)

    def finish(self, sheet: Sheet) -> list[Row]:
        """Return all that is left: the text is over."""
        rows = self._put("", sheet) if self._line else []
        self._is_inside_line = False
        return rows + self._flow.close(sheet)

    def tail(self, sheet: Sheet) -> list[Row]:
        """Return the rows still open, as they would look if the text ended here."""
        ahead = MarkdownStream()
        ahead._flow = self._flow.copy()
        ahead._line = self._line
        return ahead.finish(sheet)

    def _put(self, text: str, sheet: Sheet) -> list[Row]:
        """Take the rest of a line."""
        line, self._line = self._line + text, ""
        if self._is_inside_line:
            self._continue(line)
            return []
        return self._flow.put(line, sheet)

    def _put_beginning(self, text: str, sheet: Sheet) -> list[Row]:
        """Take text that no line end follows yet; give it on once it is sure to be running text."""
        self._line += text
        if self._is_inside_line:
            return self._put("", sheet)
        if not self._line or not self._flow.is_decided(self._line):
            return []
        line, self._line = self._line, ""
        rows = self._flow.put(line, sheet)
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
