"""A conversation as a document of one's own: which kinds there are, and how one is written.

Every kind shows nothing that acts on a terminal; json and jsonl read back the same all the same.
Knows no command line; `chat.importing` reads them again.
"""

from pathlib import Path

from kvchat.chat.conversation import Conversation
from kvchat.chat.store import SessionStore
from kvchat.chat.transcript import to_json, to_markdown
from kvchat.core.errors import StoreError, UsageError
from kvchat.terminal.sanitize import sanitize, sanitize_json

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
    path = store.directory / f"{session_id}.jsonl"
    try:
        return sanitize_json(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def write_new(path: Path, content: str) -> None:
    """Write a file that must not exist yet. Raises UsageError if it does, StoreError if it cannot.

    A file that could not be written whole is taken away again.
    """
    try:
        file = path.open("x", encoding="utf-8")
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
