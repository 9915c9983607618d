"""Export of conversations as Markdown, HTML, JSON messages and session files; import of the last
two.

Markdown and JSON hold the current path, with what was left out of its context; HTML and the session
file hold all branches. Exported documents contain no terminal control characters. json and jsonl
are imported without a change.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from kvchat.chat.compaction import whole_path
from kvchat.chat.conversation import NO_TOKENIZER, Conversation, Role, Turn
from kvchat.chat.json_requests import read_document, to_json
from kvchat.chat.session_file import (
    conversation_lines,
    read_session,
    title_line,
    without_waiting,
)
from kvchat.chat.store import MAX_SESSION_BYTES, SessionStore, new_session_id
from kvchat.chat.thinking import split_thinking
from kvchat.core.errors import SessionNotFound, StoreError, UnreadableFile, UsageError
from kvchat.core.paths import read_bounded
from kvchat.core.text import fence_of, sanitize, sanitize_json, text_of
from kvchat.core.types import FinishReason

# The beginning of a Markdown block, which has to stand at the beginning of a line.
_BLOCK = re.compile(r"\s*(```|~~~|#{1,6} |[-*+] |\d+[.)] |>|\|)")
_SUMMARY_NAMES = {Role.USER: "Summary of earlier messages", Role.ASSISTANT: "Assistant"}
_NAMES = {Role.USER: "You", Role.ASSISTANT: "Assistant"}


def to_markdown(conversation: Conversation) -> str:
    """Return the path to the tip as Markdown, without thinking, and with what was left out."""
    parts = [f"# {conversation.label or conversation.session_id}\n"]
    if conversation.system:
        parts.append(f"> {conversation.system}\n")
    for turn in whole_path(conversation):
        parts += [f"**Result of {res.name}:**\n\n{_fenced(res.text)}" for res in turn.results]
        if turn.results and not turn.text:
            continue
        calls = (f"Calls {each.name}:\n\n{_fenced(each.arguments_text)}" for each in turn.calls)
        said = split_thinking(turn.text)[1] if turn.role is Role.ASSISTANT else turn.text
        text = "\n\n".join((*([said] if said else []), *calls))
        cut = "\n\n*(cut off)*" if turn.is_partial else ""
        name = _NAMES[turn.role] if turn.summary_of is None else _SUMMARY_NAMES[turn.role]
        gap = "\n\n" if _BLOCK.match(text) else " "
        parts.append(f"**{name}:**{gap}{text}{cut}\n")
    return "\n".join(parts)


def _fenced(text: str) -> str:
    """Return a text as a Markdown code block, behind a fence that does not occur in it."""
    fence = fence_of(text)
    return f"{fence}\n{text.rstrip()}\n{fence}\n"


_PRIVATE = 0o600
KINDS = ("md", "html", "json", "jsonl")


def kind_of(path: Path) -> str:
    """Return the kind for a file's suffix, "md" for an unknown suffix."""
    suffix = path.suffix.removeprefix(".")
    return suffix if suffix in KINDS else "md"


def document(conversation: Conversation, kind: str, model: str = "") -> str:
    """Return the messages on the path to the tip as Markdown, or as JSON for the kind "json"; all
    branches as a page for the kind "html". `model` is the name of what answered last.
    """
    if kind == "html":
        from kvchat.chat.html_document import to_html  # its libraries take time to load

        return to_html(conversation, model)
    if kind == "json":
        return sanitize_json(to_json(conversation))
    return sanitize(to_markdown(conversation))


def saved_document(store: SessionStore, session_id: str) -> str:
    """Return the text of a session's jsonl file, with all branches, without what was typed ahead:
    it may hold what the user took back before it was sent.

    A damaged file is returned as it is, with invalid UTF-8 replaced.
    """
    data = without_waiting(store.read_bytes(session_id))
    return sanitize_json(data.decode(errors="replace"))


def write_new(path: Path, content: str) -> None:
    """Write a new file with mode 0600.

    Raises UsageError if the file exists, StoreError if it cannot be written. A partly written file
    is deleted.
    """
    try:
        file = open(path, "x", encoding="utf-8", opener=_open_private)  # noqa: SIM115
    except FileExistsError as error:
        raise UsageError(f"{path} exists already.", "Choose another name.") from error
    except FileNotFoundError as error:
        raise UsageError(
            f"There is no directory {path.parent}.", "Make it, or give another path."
        ) from error
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


def import_file(store: SessionStore, path: Path) -> str:
    """Add the conversation in a file to the store and return its new id.

    The file is not changed. Raises `UnreadableFile`, `UsageError` if it holds no messages, and
    `StoreError` if it is a session that cannot be read, or if the copy cannot be saved.
    """
    try:
        data = read_bounded(path, MAX_SESSION_BYTES)
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from error
    conversation = _from_session(data, path.name)
    if conversation is None:
        conversation = _from_messages(data)
    if not len(conversation):
        raise UsageError(f"{path} holds no messages.")
    log = store.create(conversation, "")
    lines = conversation_lines(conversation) + title_line(conversation.title)
    log.write(lines, durable=True)
    if (problem := log.close()) is not None:
        with suppress(StoreError, SessionNotFound):
            store.remove(conversation.session_id)
        raise StoreError(f"{path} is not imported: {problem}")
    return conversation.session_id


def _from_session(data: bytes, name: str) -> Conversation | None:
    if not data.startswith(b'{"kvchat"'):
        return None
    original = read_session(data, name).conversation
    copy = original.copied(new_session_id())
    copy.title = original.label
    return copy


def _from_messages(data: bytes) -> Conversation:
    given = read_document(text_of(data)[0])
    now_s = time.time()
    conversation = Conversation(new_session_id(), now_s, given.system, given.tools)
    for message in given.turns:
        is_answer = message.role is Role.ASSISTANT
        conversation.add(
            Turn(
                turn_id=conversation.next_turn_id,
                parent_id=conversation.tip_id,
                role=message.role,
                text=message.text,
                token_ids=(),
                tokenizer=NO_TOKENIZER,
                created_s=now_s,
                system=given.system if not conversation.tip_id else None,
                finish=FinishReason.STOP if is_answer else None,
                calls=message.calls,
                results=message.results,
            )
        )
    return conversation
