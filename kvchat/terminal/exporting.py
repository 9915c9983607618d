"""A conversation as a document of one's own: which kinds there are, and how one is written.

Every kind shows nothing that acts on a terminal; json and jsonl read back the same all the same.
Knows no command line; `chat.importing` reads them again.
"""

import os
from pathlib import Path

from kvchat.chat.conversation import Conversation
from kvchat.chat.store import SessionStore
from kvchat.chat.transcript import to_json, to_markdown
from kvchat.core.errors import StoreError, UsageError
from kvchat.terminal.sanitize import sanitize, sanitize_json

_PRIVATE = 0o600
KINDS = ("md", "json", "jsonl")


def kind_of(path: Path) -> str:
    """The kind that a file's ending names; Markdown unless it names one."""
    suffix = path.suffix.removeprefix(".")
    return suffix if suffix in KINDS else "md"


def document(conversation: Conversation, kind: str) -> str:
    """The messages as Markdown or JSON."""
    if kind == "json":
        return sanitize_json(to_json(conversation))
    return sanitize(to_markdown(conversation))


def saved_document(store: SessionStore, session_id: str) -> str:
    """The jsonl file that a conversation is saved in, branches and all.

    A damaged one is given out as it is, but for bytes that are no text.
    """
    return sanitize_json(store.read_bytes(session_id).decode(errors="replace"))


def write_new(path: Path, content: str) -> None:
    """Write a file that must not exist yet, and that only its user may read.

    Raises UsageError if there is one, StoreError if it cannot be written.
    A file that could not be written whole is taken away again.
    """
    try:
        file = open(path, "x", encoding="utf-8", opener=_open_private)  # noqa: SIM115
    except FileExistsError as error:
        raise UsageError(f"{path} exists already.", "Choose another name.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with file:
            file.write(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)
