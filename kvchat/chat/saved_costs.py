"""What the next message of saved conversations costs, as far as the disk tells it."""

from collections.abc import Iterable

from kvchat.chat.kept_kv import KeptKv
from kvchat.chat.store import SessionStore
from kvchat.core.cost import Cost
from kvchat.core.errors import KvchatError


def kept_costs(store: SessionStore, kept: KeptKv, session_ids: Iterable[str]) -> dict[str, Cost]:
    """Return the cost of each conversation's next message with the model that it began with.

    Conversations that are empty or cannot be read have none. Needs no loaded model.
    """
    contexts: dict[str, tuple[str, list[int]]] = {}
    for session_id in session_ids:
        try:
            read = store.read(session_id)
        except KvchatError:  # the list shows that it cannot be read
            continue
        if ids := read.conversation.context_ids():
            contexts[session_id] = read.model, ids
    places = kept.locate(list(contexts.values()))
    return {name: each.cost() for name, each in zip(contexts, places, strict=True)}
