"""Messages of several lines: a backslash, a block in three quotation marks, or the user's
editor.
"""

import asyncio
import os
import shlex
import tempfile
from pathlib import Path

from kvchat.core.errors import UsageError

BLOCK_MARK = '"""'


def is_block_open(text: str) -> bool:
    """Return whether a block that began with three quotation marks is not yet closed.

    It ends with three at the end of the text. What is pasted may begin with three of its own, a
    Python module for example: they open nothing where a line ends in three and all have partners.
    """
    stripped = text.strip()
    if not stripped.startswith(BLOCK_MARK):
        return False
    lines = stripped[len(BLOCK_MARK) :].split("\n")
    if lines[-1].endswith(BLOCK_MARK):
        return False
    return _is_uneven(stripped) or not any(line.rstrip().endswith(BLOCK_MARK) for line in lines)


def _is_uneven(text: str) -> bool:
    return text.count(BLOCK_MARK) % 2 == 1


def with_line_feeds(pasted: str) -> str:
    """Return pasted text with the line ends of a message; terminals send carriage returns."""
    return pasted.replace("\r\n", "\n").replace("\r", "\n")


def continues(line: str) -> bool:
    """Return whether a line ends in a backslash that continues the message."""
    return line.endswith("\\") and not line.endswith("\\\\")


def without_block_marks(text: str) -> str:
    """Return the text inside a block's marks, and any other text unchanged.

    Where there are pairs of marks inside, only marks alone in their lines are taken for a block's:
    the first and the last may belong to two strings of a program.
    """
    stripped = text.strip()
    if not _is_block(stripped):
        return text
    return stripped[len(BLOCK_MARK) : -len(BLOCK_MARK)].strip("\n")


def _is_block(text: str) -> bool:
    if not text.startswith(BLOCK_MARK) or not text.endswith(BLOCK_MARK, len(BLOCK_MARK)):
        return False
    if text.count(BLOCK_MARK) == 2 or _is_uneven(text):
        return True
    lines = text.splitlines()
    return lines[0].rstrip() == lines[-1].lstrip() == BLOCK_MARK


class InputBlocks:
    """Collects lines until the message is complete."""

    def __init__(self) -> None:
        self._text = ""

    @property
    def is_open(self) -> bool:
        """Whether the message needs more lines."""
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
        """Drop the collected lines."""
        self._text = ""


async def edit_text(editor: str, text: str) -> str:
    """Open a text in the user's editor and return the result; UsageError if it does not run.

    `editor` is a command line. If the editor ends with an error, the text is returned unchanged.
    """
    try:
        arguments = shlex.split(editor)
    except ValueError as error:
        raise UsageError(f"The editor cannot be run: {error}.", "Set EDITOR.") from error
    if not arguments:
        raise UsageError("No editor is set.", "Set EDITOR.")
    with tempfile.TemporaryDirectory(prefix="kvchat-") as directory:  # private by its mode
        path = Path(directory) / "message.md"
        path.write_text(text, encoding="utf-8", errors="replace")
        path.chmod(0o600)
        try:
            # Without what is set for this process's libraries alone.
            process = await asyncio.create_subprocess_exec(
                *arguments, os.fspath(path), env=os.environ
            )
        except OSError as error:
            raise UsageError(f"{arguments[0]} cannot be run: {error.strerror}.") from error
        if await process.wait() != 0:
            return text
        edited = path.read_text(encoding="utf-8", errors="replace")
    return edited.removesuffix("\n")
