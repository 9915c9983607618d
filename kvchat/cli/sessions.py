"""`kvchat sessions`: lists, shows, exports, imports, renames and deletes saved conversations."""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from kvchat.chat import documents
from kvchat.chat.deletion import SavedPlaces
from kvchat.chat.documents import to_markdown
from kvchat.chat.saved_chats import kept_costs
from kvchat.chat.store import SessionStore, SessionSummary
from kvchat.cli.build import session_store, store_admin
from kvchat.cli.lines import say
from kvchat.cli.settings import Settings
from kvchat.core.errors import UsageError
from kvchat.core.stats import Cost
from kvchat.core.text import model_label, one_line, sanitize, shown
from kvchat.terminal import warmth
from kvchat.terminal.wrap import columns_of, has_room, one_row

_HANGING = 4


def list_sessions(settings: Settings, as_json: bool) -> None:
    """Print one line per conversation, the most recent first, and what its next message costs."""
    store = session_store(settings)
    summaries = store.summaries()
    costs = kept_costs(store, store_admin(settings), [summary.session_id for summary in summaries])
    if as_json:
        for summary in summaries:
            line = {
                "session": summary.session_id,
                "title": summary.title,
                "turns": summary.num_turns,
                "modified": summary.modified_s,
                "model": summary.model,
                "next_message": _object(costs.get(summary.session_id)),
            }
            _print(json.dumps(line))
        return
    entries = [_entry(summary, costs.get(summary.session_id)) for summary in summaries]
    for text in session_lines(entries, columns_of(sys.stdout)):
        _print(text)
    if not entries:
        say("No conversation is saved yet.")


def _entry(summary: SessionSummary, cost: Cost | None) -> tuple[str, str, str]:
    """Return a conversation's id, time and size; its title; its model and next message's cost."""
    when = f"{datetime.fromtimestamp(summary.modified_s):%Y-%m-%d %H:%M}"
    unit = "turn " if summary.num_turns == 1 else "turns"
    is_empty = not summary.title and not summary.num_turns
    title = "(no message)" if is_empty else one_line(summary.title)
    notes = [model_label(summary.model)] if summary.model else []
    notes += [warmth.for_list(cost)] if cost is not None else []
    warm = f"({', '.join(notes)})" if notes else ""
    return f"{summary.session_id}  {when}  {summary.num_turns:>3} {unit}", title, warm


def session_lines(entries: Sequence[tuple[str, str, str]], columns: int | None) -> list[str]:
    """Return one row for each entry, or two where `columns` have no room for the widest."""
    lines = [f"{lead}  {title} {warm}".rstrip() for lead, title, warm in entries]
    if columns is None or all(has_room(line, columns) for line in lines):
        return lines
    room = columns - _HANGING
    return [
        row
        for lead, title, warm in entries
        for row in (one_row(f"{lead} {warm}", columns), " " * _HANGING + one_row(title, room))
    ]


def _object(cost: Cost | None) -> dict[str, object] | None:
    """Return what the next message costs as `--json` prints it."""
    if cost is None:
        return None
    return {"tokens": cost.num_tokens, "cached": cost.num_cached, "seconds": cost.seconds}


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
        format_name = documents.kind_of(path) if path is not None else "md"
    if format_name not in documents.KINDS:
        raise UsageError(f"--format is {shown(format_name)}, but must be md, html, json or jsonl.")
    if format_name == "jsonl":
        content = documents.saved_document(store, session_id)
    else:
        read = store.read(session_id)
        content = documents.document(read.conversation, format_name, model_label(read.model))
    if path is None:
        _print(content.rstrip("\n"))
    else:
        documents.write_new(path, content)


def import_file(store: SessionStore, path: Path) -> None:
    """Add the conversation in a file to the store; print its new id."""
    _print(documents.import_file(store, path))


def rename(store: SessionStore, text: str, title: str) -> None:
    """Give a conversation a title; raises UsageError for an empty one."""
    if not title.strip():
        raise UsageError("A conversation needs a title.")
    store.rename(store.find(text), title)


def remove(places: SavedPlaces, texts: list[str]) -> None:
    """Delete conversations permanently, everywhere, also in the server that runs here."""
    store = places.store
    assert store is not None, "the command saves"
    session_ids = list(dict.fromkeys(store.find(text) for text in texts))
    gone = places.delete(session_ids)
    for session_id in session_ids:
        _print(f"deleted {session_id}")
    gone.require_all("Deleted", "`kvchat cache clear` deletes all KV, once it can be reached.")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
