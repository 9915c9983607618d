"""Reads a checkpoint's text files: configuration, tokenizer, template, index.

Anyone may have written them: regular files only, up to a bound, and each fault is a ModelError of
one sentence. Everything on this floor that reads such a file reads it here.
"""

import json
from pathlib import Path
from typing import Any

from kvchat.core.bounded_files import read_bounded
from kvchat.core.errors import ModelError

# The largest known are a tenth of these: 12 MB of index, 40 MB of tokenizer.json.
MAX_CONFIG_BYTES = 8 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 256 << 20


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str | None:
    """Return a UTF-8 file's text, None where there is no file; raises ModelError."""
    try:
        return read_bounded(path, max_bytes).decode()
    except FileNotFoundError:
        if path.is_symlink():
            raise unreadable(path, "it is a link to nothing") from None
        return None
    except UnicodeDecodeError as error:
        raise unreadable(path, "it is not UTF-8 text") from error
    except OSError as error:
        raise unreadable(path, error.strerror) from error


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    """Return the object in a JSON file, None where there is no file; raises ModelError."""
    text = read_text(path, max_bytes)
    return None if text is None else parse_json(path, text)


def parse_json(path: Path, text: str) -> dict[str, Any]:
    """Return the object that `text`, the content of `path`, describes; raises ModelError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, "it is not JSON") from error
    if not isinstance(content, dict):
        raise unreadable(path, "it is not a JSON object")
    return content


def unreadable(path: Path, reason: str | None) -> ModelError:
    """Return the error that says why a file of a checkpoint cannot be used."""
    return ModelError(f"{path} cannot be read: {reason}.", "Is the download complete?")
