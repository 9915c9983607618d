"""SavedChat: what a list tells of a saved conversation, so that it is known among others."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from kvchat.chat.attachment import split_attached
from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.store import SessionStore, SessionSummary
from kvchat.chat.thinking import split_thinking
from kvchat.core.errors import KvchatError, StoreError
from kvchat.core.stats import Cost
from kvchat.core.text import one_line

if TYPE_CHECKING:
    from kvchat.cache.disk.admin import StoreAdmin

_LABEL_CHARS = 56
_PREVIEW_CHARS = 400
_SEARCHED_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A saved conversation in a list of them; `label` differs from those of the others.

    model         the name of the model that answered last
    context_ids   the token ids of its next message's context
    preview       its last message and the answer, each in one line
    text          all that was said, in lower case, for searching
    is_one_shot   a script began it, and nothing has gone on with it
    """

    summary: SessionSummary
    label: str
    model: str = ""
    context_ids: tuple[int, ...] = ()
    preview: tuple[str, ...] = ()
    text: str = ""
    is_one_shot: bool = False


def read_chats(store: SessionStore, summaries: Iterable[SessionSummary]) -> list[SavedChat]:
    """Read conversations for a list; those that cannot be read have nothing but a label."""
    return told_apart([_read(store, summary) for summary in summaries])


def titles(store: SessionStore | None) -> dict[str, str]:
    """Return the titles of the saved conversations by their ids; none where they cannot be read."""
    with suppress(StoreError):
        return {each.session_id: each.title for each in store.summaries()} if store else {}
    return {}


def named_contexts(store: SessionStore | None) -> list[tuple[str, list[int]]]:
    """Return the context of every branch of the saved conversations, with a name that tells the
    conversation from the others.
    """
    if store is None:
        return []
    chats: list[SavedChat] = []
    with suppress(StoreError):  # the packs are listed all the same, without names
        chats = read_chats(store, store.summaries())
    named: list[tuple[str, list[int]]] = []
    for chat in chats:
        with suppress(KvchatError):
            conversation = store.read(chat.summary.session_id).conversation
            named += [(chat.label, ids) for ids in conversation.contexts()]
    return named


def saved_contexts(
    store: SessionStore, session_ids: Iterable[str]
) -> dict[str, tuple[str, list[int]]]:
    """Return the model and the context of each conversation that is not empty and can be read."""
    contexts: dict[str, tuple[str, list[int]]] = {}
    for session_id in session_ids:
        try:
            read = store.read(session_id)
        except KvchatError:  # lists of conversations show that it cannot be read
            continue
        if ids := read.conversation.context_ids():
            contexts[session_id] = read.model, ids
    return contexts


def kept_costs(
    store: SessionStore, kept: "StoreAdmin", session_ids: Iterable[str]
) -> dict[str, Cost]:
    """Return the cost of each conversation's next message with the model that it began with.

    Conversations that are empty or cannot be read have none. Needs no loaded model.
    """
    contexts = saved_contexts(store, session_ids)
    places = kept.locate(list(contexts.values()))
    return {name: each.cost() for name, each in zip(contexts, places, strict=True)}


def _read(store: SessionStore, summary: SessionSummary) -> SavedChat:
    label = one_line(summary.title, _LABEL_CHARS) or summary.session_id
    try:
        read = store.read(summary.session_id)
    except KvchatError:
        return SavedChat(summary, label)
    conversation = read.conversation
    said = " ".join(_words(turn) for turn in conversation.turns())
    return SavedChat(
        summary,
        label,
        read.model,
        tuple(conversation.context_ids()),
        _preview(conversation),
        said[:_SEARCHED_CHARS].lower(),
        read.is_one_shot,
    )


def _preview(conversation: Conversation) -> tuple[str, ...]:
    return tuple(one_line(_words(turn), _PREVIEW_CHARS) for turn in conversation.path()[-2:])


def _words(turn: Turn) -> str:
    """Return a turn's text without files and thinking."""
    if turn.role is Role.ASSISTANT:
        return split_thinking(turn.text)[1]
    names, words = split_attached(turn.text)
    return words if words.strip() else ", ".join(names)


def told_apart(chats: Sequence[SavedChat]) -> list[SavedChat]:
    """Return the chats with labels that differ: equal ones get the last words, or else the time."""
    chats = _extended(chats, lambda chat: chat.preview[0] if chat.preview else "")
    chats = _extended(chats, _time)
    return _extended(chats, lambda chat: chat.summary.session_id[-4:])


def _extended(chats: Sequence[SavedChat], told: Callable[[SavedChat], str]) -> list[SavedChat]:
    """Return the chats, with more in the labels that several have."""
    counts = Counter(chat.label for chat in chats)
    return [
        replace(chat, label=f"{chat.label} · {one_line(more, _LABEL_CHARS)}")
        if counts[chat.label] > 1 and (more := told(chat)) and more != chat.label
        else chat
        for chat in chats
    ]


def _time(chat: SavedChat) -> str:
    return f"{datetime.fromtimestamp(chat.summary.modified_s):%d %b %H:%M}"
