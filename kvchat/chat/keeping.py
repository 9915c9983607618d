"""KV that is pinned, and conversations that are forgotten for good, text and KV.

What other saved conversations share with a forgotten one stays. Functions on a ChatController.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat.attachment import read_attachment
from kvchat.chat.conversation import ROOT, Conversation, Role
from kvchat.chat.why import common_len
from kvchat.core.errors import KvchatError, StoreError, StoreInUse, UsageError
from kvchat.core.text import one_line

if TYPE_CHECKING:
    from kvchat.chat.controller import Desk


# Opening the disk tier and writing what waits may take so long; then it is not worth waiting for.
_PATIENCE_S = 30.0
# Messages that begin differently: what they have in common behind a file belongs to the file.
_PROBES = ("a", "Z")


async def _pinned(desk: "Desk", token_ids: list[int], label: str) -> int:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            num_tokens = await asyncio.wrap_future(desk.host.pin(token_ids, label))
    except TimeoutError:
        raise UsageError("The disk cache does not answer.", "Try again in a moment.") from None
    if not num_tokens:
        raise UsageError(
            "Nothing of it is kept on disk, so there is nothing to pin.",
            "It may be shorter than a block, or --disk-cache has no room: /stats.",
        )
    return num_tokens


def _file_context(desk: "Desk", paths: Iterable[Path], created_s: float) -> list[int]:
    """Return how a conversation begins whose first message has these files attached.

    `created_s` is when it begins: a template may write the date.
    """
    text = "".join(f"{read_attachment(path)}\n" for path in paths)
    empty = Conversation("", created_s, desk.system)
    one, other = (desk.host.model.user_ids(empty, ROOT, text + end, desk.system) for end in _PROBES)
    return list(one[: common_len(one, other)])


@dataclass(frozen=True, slots=True)
class _GoneKv:
    """How many blocks went from disk. `trouble` says in a sentence why none could."""

    num_blocks: int = 0
    trouble: str = ""


async def _forget_conversation(desk: "Desk") -> _GoneKv:
    """KV goes first: whoever is interrupted still has the words to do it again."""
    session = desk.session
    assert session is not None
    store, session_id = desk.host.store, session.session_id
    contexts = session.conversation.contexts()
    if store is not None:
        contexts += store.read(session_id).conversation.contexts()  # as another model wrote them
    shared = await asyncio.to_thread(_others, desk, session_id)
    gone = await _forget_kv(desk, contexts, shared, session_id)
    desk.begin_new()
    if store is not None:
        store.remove(session_id)
    return gone


async def _forget_last(desk: "Desk") -> _GoneKv:
    session = desk.require_session()
    conversation = session.conversation
    asked = [turn for turn in conversation.path() if turn.role is Role.USER]
    if not asked:
        raise UsageError("There is nothing to forget.")
    last = asked[-1]
    below = conversation.contexts(last.turn_id)
    beside = [ids for ids in conversation.contexts() if ids not in below]
    before = conversation.context_ids(last.parent_id)
    others = await asyncio.to_thread(_others, desk, session.session_id)
    gone = await _forget_kv(desk, below, [*others, *beside, before], "")
    desk.forget(last.turn_id)
    return gone


async def _forget_kv(
    desk: "Desk", contexts: list[list[int]], shared: list[list[int]], label: str
) -> _GoneKv:
    """Remove the KV of contexts, as far as it is not shared. Raises StoreInUse where others are at
    the store: that passes, and the words stay to do it again by. What does not pass keeps no words.
    """
    kept_lengths = [
        max((common_len(ids, other) for other in shared), default=0) for ids in contexts
    ]
    if desk.host.ready is not None:
        asked = desk.host.forget(list(zip(contexts, kept_lengths, strict=True)))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.wrap_future(asked)
        except TimeoutError:
            raise UsageError("The disk cache does not answer.", "Try again.") from None
    if desk.kept is None:
        return _GoneKv()
    try:
        return _GoneKv(await asyncio.to_thread(desk.kept.forget, contexts, shared, label))
    except StoreInUse:
        raise
    except StoreError as error:
        return _GoneKv(trouble=one_line(error.message, 4096))


def _others(desk: "Desk", session_id: str) -> list[list[int]]:
    """Return the contexts of all other saved conversations."""
    store = desk.host.store
    contexts = []
    for other in store.ids() if store is not None else ():
        if other == session_id:
            continue
        try:
            contexts += store.read(other).conversation.contexts() if store is not None else []
        except KvchatError:  # a damaged one says nothing of what it shares
            continue
    return contexts
