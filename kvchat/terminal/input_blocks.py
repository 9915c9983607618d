"""Messages of several lines, typed a line at a time: a backslash or three quotation marks.

Knows lines; knows no keys and no screen.
"""

BLOCK_MARK = '"""'


def is_block_open(text: str) -> bool:
    """Tell whether a block begun with three quotation marks waits for its end."""
    stripped = text.strip()
    if not stripped.startswith(BLOCK_MARK):
        return False
    return len(stripped) < 2 * len(BLOCK_MARK) or not stripped.endswith(BLOCK_MARK)


def continues(line: str) -> bool:
    """Tell whether a line ends in a backslash that asks for another line."""
    return line.endswith("\\") and not line.endswith("\\\\")


def without_block_marks(text: str) -> str:
    """Return the inside of a block, anything else as it is."""
    stripped = text.strip()
    if is_block_open(text) or not stripped.startswith(BLOCK_MARK):
        return text
    return stripped[len(BLOCK_MARK) : -len(BLOCK_MARK)].strip("\n")


class InputBlocks:
    """Collects lines until they make a message."""

    def __init__(self) -> None:
        self._text = ""

    @property
    def is_open(self) -> bool:
        """Whether the message goes on."""
        return bool(self._text)

    def take(self, line: str) -> str | None:
        """Take a line; return the message it completes."""
        if continues(line):
            self._text += f"{line[:-1]}\n"
            return None
        if is_block_open(self._text + line):
            self._text += f"{line}\n"
            return None
        text, self._text = self._text + line, ""
        return without_block_marks(text)

    def clear(self) -> None:
        """Forget what was collected."""
        self._text = ""
