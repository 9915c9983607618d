"""Files that go with a message: found by @path, read as text, told from the words after them.

A file is wrapped in a fence under its name, so that a model sees where it begins and ends.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvchat.core.bounded_files import read_bounded
from kvchat.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Attached:
    """A file that goes before the next message, as the text the model gets."""

    name: str
    text: str


_MAX_BYTES = 16 * 2**20


def read_attachment(path: Path) -> str:
    """Return a file's text under its name, to be put in front of a message.

    Raises UsageError for what is not a readable text file of reasonable size.
    """
    try:
        data = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    if b"\0" in data:
        raise UsageError(f"{path} is not a text file.")
    text = data.decode("utf-8", errors="replace").rstrip("\n")
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text}\n{fence}\n"


_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_TRAILING = ".,;:!?)]}'\""


def mentioned_files(text: str) -> list[Path]:
    """Return the files a message mentions, each once, in order."""
    found: list[Path] = []
    for match in _MENTION.finditer(text):
        path = _existing(match[1] or match[2])
        if path is not None and path not in found:
            found.append(path)
    return found


def _existing(name: str) -> Path | None:
    """Return the file of a name; punctuation after it may belong to the sentence."""
    while name:
        try:
            path = Path(name).expanduser()
            if path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):
            return None
        if name[-1] not in _TRAILING:
            return None
        name = name[:-1]
    return None


_ATTACHED = re.compile(r"([^\n]*\.\w+):\n(`{3,})\n.*?\n\2\n\n", re.DOTALL)


def split_attached(text: str) -> tuple[list[str], str]:
    """Return the names of the files at the beginning of a message, and the words after them."""
    names: list[str] = []
    while (match := _ATTACHED.match(text)) is not None:
        names.append(match[1])
        text = text[match.end() :]
    return names, text
