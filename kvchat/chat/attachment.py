"""Files attached to a message: finds them by @path, reads them, and splits them off again.

A file's text is put in a code fence below its name, so that a model sees its beginning and end.
"""

import re
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from kvchat.core.bounded_files import read_bounded
from kvchat.core.errors import UsageError
from kvchat.core.paths import user_path


@dataclass(frozen=True, slots=True)
class Attached:
    """A file for the next message; `text` is its fenced text, as the model receives it."""

    name: str
    text: str


_MAX_BYTES = 16 * 2**20


def read_attachment(path: Path) -> str:
    """Return a file's text, fenced below its name, to put before a message.

    Raises UsageError for a file that is unreadable, not text, or larger than 16 MiB.
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
    """Return the existing files that a message mentions as @path, each once, in order."""
    found: list[Path] = []
    for match in _MENTION.finditer(text):
        path = _existing(match[1] or match[2])
        if path is not None and path not in found:
            found.append(path)
    return found


_LOOKS_LIKE_PATH = re.compile(r"/|\.[A-Za-z0-9]{1,5}$")


def missing_files(text: str) -> list[str]:
    """Return the @paths of a message that look like files, but name none."""
    names = (match[1] or match[2].rstrip(_TRAILING) for match in _MENTION.finditer(text))
    return [name for name in names if _LOOKS_LIKE_PATH.search(name) and _existing(name) is None]


def matching_paths(word: str) -> list[Path]:
    """Return the files that a path or a pattern such as `docs/*.md` names, else the path alone."""
    path = user_path(word)
    found = [] if path.exists() else sorted(glob(str(path)))
    return [Path(name) for name in found] or [path]


def _existing(name: str) -> Path | None:
    """Return the file of a name; punctuation at its end may belong to the sentence."""
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
