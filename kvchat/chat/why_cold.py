"""Why a conversation that begins like an earlier one begins cold: its template writes another time,
or is another one by now.

Nothing in a conversation changes by the clock, which a template sees frozen; between two it does.
Knows turns, and how a model writes them; knows no screen.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import ROOT, Conversation, Turn
from kvchat.chat.store import SessionStore
from kvchat.chat.why import NOT_WORTH_MENTIONING, Change, Reuse, common_len
from kvchat.core.errors import KvchatError, StoreError

# Of how many conversations, the ones changed last, the beginnings are compared.
_MOST_COMPARED = 10


def earlier(store: SessionStore | None, session_id: str) -> Iterator[Conversation]:
    """Yield the other saved conversations that changed last."""
    if store is None:
        return
    with suppress(StoreError):  # what cannot be listed has nothing to say
        for other in store.ids()[:_MOST_COMPARED]:
            if other != session_id:
                with suppress(KvchatError):  # nor has a damaged one
                    yield store.read(other).conversation


def beside_earlier(
    reuse: Reuse, begun: Turn, model: ChatModel, conversations: Iterable[Conversation]
) -> Reuse:
    """Return what is known of a conversation's first answer, with the earlier one that it would
    share most with if the template wrote what it did then; as it is where there is none, and where
    as much was there all the same.

    `begun` is the message that was answered.
    """
    best, most = reuse, NOT_WORTH_MENTIONING - 1
    for conversation in conversations:
        as_then = _written(model, begun, conversation)
        for turn in conversation.children(ROOT):
            if turn.tokenizer != begun.tokenizer:
                continue
            # What was there is no loss: another chat of today may have had it read.
            shared = max(common_len(reuse.ids, turn.token_ids), reuse.cached.total)
            now = _written(model, turn, conversation)
            for change, would_share in (
                (Change.CLOCK, common_len(as_then, turn.token_ids)),
                (Change.TEMPLATE, common_len(as_then, now)),
            ):
                if would_share - shared > most:
                    best = replace(reuse, before=turn.token_ids, change=change)
                    most = would_share - shared
    return best


def _written(model: ChatModel, turn: Turn, conversation: Conversation) -> tuple[int, ...]:
    """Return a first message's ids as of a conversation's time, by the template as it is now."""
    empty = Conversation("", conversation.created_s)
    try:
        return model.user_ids(empty, ROOT, turn.text, turn.system)
    except KvchatError:  # a template may refuse what an earlier one took
        return ()
