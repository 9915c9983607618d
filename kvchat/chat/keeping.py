"""Pins KV, and removes conversations with their text and KV. Functions on a ChatController.

KV that other saved conversations share with a removed one stays.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat.attachment import read_attachment
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import ROOT, Conversation, Role
from kvchat.chat.why import common_len
from kvchat.core.errors import KvchatError, StoreError, StoreInUse, UsageError
from kvchat.core.text import one_line

if TYPE_CHECKING:
    from kvchat.chat.controller import ChatController


# Timeout for opening the disk tier and writing pending KV.
_PATIENCE_S = 30.0
# Two messages that differ from their first character: the ids before them belong to the file.
_PROBES = ("a", "Z")


async def pin_context(controller: "ChatController", token_ids: list[int], label: str) -> int:
    """Pin the KV of a context on disk; return the number of tokens pinned, at least one.

    Raises UsageError if no KV of it is on disk, or if the disk tier does not answer in 30 s.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S):
            num_tokens = await asyncio.wrap_future(controller.host.pin(token_ids, label))
    except TimeoutError:
        raise UsageError("The disk cache does not answer.", "Try again in a moment.") from None
    if not num_tokens:
        raise UsageError(
            "Nothing of it is kept on disk, so there is nothing to pin.",
            "It may be shorter than a block, or --disk-cache has no room: /stats.",
        )
    return num_tokens


def file_context(
    controller: "ChatController", paths: Iterable[Path], created_s: float
) -> list[int]:
    """Return the leading token ids of a conversation whose first message has these files attached.

    It has the system prompt and the tools that new conversations have now. `created_s` is the start
    of the conversation, because a template may write the date.
    """
    text = "".join(f"{read_attachment(path).text}\n" for path in paths)
    empty = Conversation("", created_s, controller.system, controller.tools)
    return opening_ids(controller.host.model, empty, text)


def opening_ids(model: ChatModel, conversation: Conversation, text: str = "") -> list[int]:
    """Return the leading token ids of any conversation that has this one's time, system prompt and
    tools, and whose first message begins with a text.
    """
    system = conversation.system
    empty = Conversation("", conversation.created_s, system, conversation.tools)
    one, other = (model.user_ids(empty, ROOT, text + end, system) for end in _PROBES)
    return list(one[: common_len(one, other)])


@dataclass(frozen=True, slots=True)
class ForgottenKv:
    """The number of blocks removed from disk; `trouble` is a sentence on why none was."""

    num_blocks: int = 0
    trouble: str = ""


async def forget_conversation(controller: "ChatController") -> ForgottenKv:
    """Remove the open conversation's KV, then its text.

    In this order, an interruption leaves the text, and the removal can be repeated.
    """
    session = controller.session
    assert session is not None
    store, session_id = controller.host.store, session.session_id
    contexts = session.conversation.contexts()
    if store is not None:
        contexts += store.read(session_id).conversation.contexts()  # as another model wrote them
    shared = await asyncio.to_thread(_others, controller, session_id)
    gone = await _forget_kv(controller, contexts, shared, session_id)
    controller.close_deleted()
    if store is not None:
        store.remove(session_id)
    return gone


async def forget_last_turn(controller: "ChatController") -> ForgottenKv:
    """Remove the last message and its answers; raises UsageError if there is no message."""
    session = controller.require_session()
    conversation = session.conversation
    asked = [turn for turn in conversation.path() if turn.role is Role.USER]
    if not asked:
        raise UsageError("There is nothing to forget.")
    last = asked[-1]
    below = conversation.contexts(last.turn_id)
    beside = [ids for ids in conversation.contexts() if ids not in below]
    before = conversation.context_ids(last.parent_id)
    others = await asyncio.to_thread(_others, controller, session.session_id)
    gone = await _forget_kv(controller, below, [*others, *beside, before], "")
    controller.place.forget(last.turn_id)
    return gone


async def _forget_kv(
    controller: "ChatController", contexts: list[list[int]], shared: list[list[int]], label: str
) -> ForgottenKv:
    """Remove the KV of contexts that is not shared with other contexts.

    Raises StoreInUse while another process uses the store: the caller then keeps the text, so that
    the user can try again. Other store errors are permanent: they are returned as `trouble`, and
    the caller removes the text.
    """
    kept_lengths = [
        max((common_len(ids, other) for other in shared), default=0) for ids in contexts
    ]
    if controller.host.ready is not None:
        asked = controller.host.forget(list(zip(contexts, kept_lengths, strict=True)))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.wrap_future(asked)
        except TimeoutError:
            raise UsageError("The disk cache does not answer.", "Try again.") from None
    if controller.kept is None:
        return ForgottenKv()
    try:
        return ForgottenKv(await asyncio.to_thread(controller.kept.forget, contexts, shared, label))
    except StoreInUse:
        raise
    except StoreError as error:
        return ForgottenKv(trouble=one_line(error.message, 4096))


def _others(controller: "ChatController", session_id: str) -> list[list[int]]:
    """Return the contexts of all other saved conversations."""
    store = controller.host.store
    contexts = []
    for other in store.ids() if store is not None else ():
        if other == session_id:
            continue
        try:
            contexts += store.read(other).conversation.contexts() if store is not None else []
        except KvchatError:  # the contexts of a damaged file are not known
            continue
    return contexts
