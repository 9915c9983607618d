"""`kvchat sessions`: list, show, export, import, rename and delete saved conversations.

Knows what is printed; reading and writing sessions is the chat floor's.
"""

import json
import os
import sys
from datetime import datetime
from pathlib import Path

from kvchat.chat import importing
from kvchat.chat.session_file import title_line
from kvchat.chat.store import SessionStore
from kvchat.chat.transcript import to_json, to_markdown
from kvchat.cli.build import session_store, user_paths
from kvchat.cli.settings import resolve
from kvchat.core.errors import StoreError, UsageError
from kvchat.terminal.sanitize import one_line, sanitize


def open_store(sessions_dir: str | None) -> SessionStore:
    """Return the store the settings name."""
    flags = {"sessions_dir": sessions_dir}
    return session_store(resolve(flags, os.environ, user_paths().config))


def list_sessions(store: SessionStore, as_json: bool) -> None:
    """Print one line per conversation, the most recent first."""
    for summary in store.summaries():
        if as_json:
            line = {
                "session": summary.session_id,
                "title": summary.title,
                "turns": summary.num_turns,
                "modified": summary.modified_s,
            }
            _print(json.dumps(line))
        else:
            when = f"{datetime.fromtimestamp(summary.modified_s):%Y-%m-%d %H:%M}"
            title = one_line(summary.title)
            unit = "turn " if summary.num_turns == 1 else "turns"
            _print(f"{summary.session_id}  {when}  {summary.num_turns:>3} {unit}  {title}")


def show(store: SessionStore, text: str) -> None:
    """Print a conversation as text."""
    read = store.read(store.find(text))
    for note in read.notes:
        print(f"kvchat: {note}", file=sys.stderr)  # noqa: T201
    _print(sanitize(to_markdown(read.conversation)).rstrip("\n"))


def export(store: SessionStore, text: str, path: Path | None, format_name: str | None) -> None:
    """Write a conversation to a file or to standard output."""
    session_id = store.find(text)
    if format_name is None:
        suffix = path.suffix.removeprefix(".") if path is not None else ""
        format_name = suffix if suffix in ("json", "jsonl") else "md"
    if format_name == "jsonl":
        content = (store.directory / f"{session_id}.jsonl").read_text()
    elif format_name == "json":
        content = to_json(store.read(session_id).conversation)
    elif format_name == "md":
        content = to_markdown(store.read(session_id).conversation)
    else:
        raise UsageError(f"--format is {format_name!r}, but must be md, json or jsonl.")
    if path is None:
        _print(sanitize(content).rstrip("\n"))
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already.", "Choose another name.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error


def import_file(store: SessionStore, path: Path) -> None:
    """Add the conversation in a file to the store; print its new id."""
    _print(importing.import_file(store, path))


def rename(store: SessionStore, text: str, title: str) -> None:
    """Give a conversation a title."""
    _, log = store.open(store.find(text))
    log.write(title_line(title), durable=True)
    log.close()


def remove(store: SessionStore, texts: list[str]) -> None:
    """Delete conversations for good."""
    for session_id in [store.find(text) for text in texts]:
        store.remove(session_id)
        _print(f"deleted {session_id}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
