"""The session file: JSON lines, append-only, one event a line.

Knows how a conversation is written and read back, whatever of the last line survived. Knows the
format and its versions; knows no directory and no engine. `sessions/README.md` describes it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.core.errors import StoreError
from kvchat.core.types import FinishReason

FORMAT_VERSION = 1
MAGIC = "session"


@dataclass(frozen=True, slots=True)
class ReadSession:
    """A conversation read back, and what was lost on the way, in words for the user."""

    conversation: Conversation
    model: str
    notes: tuple[str, ...]


def header_line(conversation: Conversation, model: str) -> str:
    """Return the first line of a session file."""
    return _line(
        {
            "kvchat": MAGIC,
            "version": FORMAT_VERSION,
            "id": conversation.session_id,
            "created": conversation.created_s,
            "system": conversation.system,
            "model": model,
        }
    )


def turn_line(turn: Turn) -> str:
    """Return the line that adds a turn; an answer's is written when it begins, without its end."""
    event: dict[str, Any] = {
        "type": "turn",
        "id": turn.turn_id,
        "parent": turn.parent_id,
        "role": turn.role.value,
        "text": turn.text,
        "ids": list(turn.token_ids),
        "tokenizer": turn.tokenizer,
        "at": turn.created_s,
    }
    if turn.system is not None:
        event["system"] = turn.system
    return _line(event)


def more_line(turn_id: int, text: str, token_ids: Iterable[int]) -> str:
    """Return the line that makes an answer grow."""
    return _line({"type": "more", "id": turn_id, "text": text, "ids": list(token_ids)})


def end_line(turn_id: int, reason: FinishReason, facts: dict[str, object]) -> str:
    """Return the line that ends an answer; `facts` (usage, timing) are kept for people."""
    return _line({"type": "end", "id": turn_id, "finish": reason.value, **facts})


def tip_line(turn_id: int) -> str:
    """Return the line that moves the tip."""
    return _line({"type": "tip", "id": turn_id})


def title_line(title: str) -> str:
    """Return the line that names the conversation."""
    return _line({"type": "title", "title": title})


def system_line(system: str | None) -> str:
    """Return the line that sets the system prompt of turns to come."""
    return _line({"type": "system", "system": system})


def _line(event: dict[str, Any]) -> str:
    # Lone surrogates, from undecodable input, stay readable as escapes.
    return json.dumps(event, ensure_ascii=True, separators=(",", ":")) + "\n"


def read_session(data: bytes, name: str) -> ReadSession:
    """Rebuild a conversation from a file's bytes; `name` stands for it in messages.

    A torn last line is dropped and noted, and so is a damaged one, with the turns that hang on it.
    Raises StoreError where the file is not a session or is of a newer format.
    """
    *lines, torn = data.split(b"\n")
    conversation, model = _begin(_event(lines[0]) if lines else None, name)
    notes = []
    for number, line in enumerate(lines[1:], start=2):
        event = _event(line)
        try:
            assert event is not None
            _apply(conversation, event)
        except (KeyError, TypeError, ValueError, AssertionError):
            notes.append(f"Line {number} of {name} is damaged and was skipped.")
    if torn:
        notes.append(f"The last line of {name} was torn and was dropped.")
    conversation.check()
    return ReadSession(conversation, model, tuple(notes))


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _begin(header: dict[str, Any] | None, name: str) -> tuple[Conversation, str]:
    if header is None or header.get("kvchat") != MAGIC:
        raise StoreError(f"{name} is not a kvchat session.")
    if header.get("version") != FORMAT_VERSION:
        raise StoreError(
            f"{name} has the format {header.get('version')}, which this kvchat cannot read.",
            "Upgrade kvchat to open it.",
        )
    try:
        created_s = float(header["created"])
        conversation = Conversation(str(header["id"]), created_s, header.get("system"))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"The first line of {name} is damaged.") from error
    return conversation, str(header.get("model", ""))


def _apply(conversation: Conversation, event: dict[str, Any]) -> None:
    kind = event.get("type")
    if kind == "turn":
        conversation.add(_turn(event))
    elif kind == "more":
        turn = conversation.turn(event["id"])
        ids = (*turn.token_ids, *event["ids"])
        conversation.replace(replace(turn, text=turn.text + event["text"], token_ids=ids))
    elif kind == "end":
        turn = conversation.turn(event["id"])
        conversation.replace(replace(turn, finish=FinishReason(event["finish"])))
    elif kind == "tip":
        conversation.move_tip(event["id"])
    elif kind == "title":
        conversation.title = str(event["title"])
    elif kind == "system":
        conversation.system = event["system"]
    # Lines of a kind this version does not know are notes of later ones within the same format.


def _turn(event: dict[str, Any]) -> Turn:
    token_ids = tuple(int(token) for token in event["ids"])
    assert event["parent"] >= ROOT
    return Turn(
        turn_id=int(event["id"]),
        parent_id=int(event["parent"]),
        role=Role(event["role"]),
        text=str(event["text"]),
        token_ids=token_ids,
        tokenizer=str(event["tokenizer"]),
        created_s=float(event["at"]),
        system=event.get("system"),
    )
