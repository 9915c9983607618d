"""Files attached to a message: read as text, wrapped so that a model sees where they begin and end.

Knows encodings and sizes; knows no conversation.
"""

from pathlib import Path

from kvchat.core.bounded_files import read_bounded
from kvchat.core.errors import UsageError

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
