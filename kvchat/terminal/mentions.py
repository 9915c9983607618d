"""@path in a message: which files it mentions.

Only what names a file that is there counts; an address or a handle is text. Knows paths; reads no
file.
"""

import re
from pathlib import Path

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
