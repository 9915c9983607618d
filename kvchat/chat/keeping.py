"""Pins KV, and removes conversations with their text and KV. Functions on a ChatController.

KV that other saved conversations share with a removed one stays.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat.attachment import read_attachment
from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.deletion import Deleted, DropFromMemory, joined
from kvchat.core.errors import SessionNotFound, UsageError

if TYPE_CHECKING:
    from kvchat.chat.controller import ChatController
    from kvchat.chat.host import ChatHost


# Timeout for opening the disk tier and writing pending KV.
_PATIENCE_S = 30.0


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
    return controller.host.model.opening_ids(empty, text)


async def delete_conversation(controller: "ChatController", session_id: str) -> Deleted:
    """Delete a conversation everywhere, the open one or another; raises as SavedPlaces does.

    An interruption leaves the text, and the removal can be repeated.
    """
    places, conversation = controller.places, controller.conversation
    if conversation is None or conversation.session_id != session_id:
        return await asyncio.to_thread(places.delete, [session_id], drop_from(controller.host))
    deleted = await asyncio.to_thread(
        places.delete_traces, [session_id], drop_from(controller.host), conversation
    )
    controller.close_deleted()
    if places.store is not None:
        with suppress(SessionNotFound):  # closing deletes a file without its first line
            places.store.remove(session_id)
    return deleted


async def delete_last_turn(controller: "ChatController") -> Deleted:
    """Remove the last message and its answers; raises UsageError if there is no message."""
    session, places = controller.require_session(), controller.places
    conversation = session.conversation
    asked = [turn for turn in conversation.path() if turn.role is Role.USER]
    if not asked:
        raise UsageError("There is nothing to forget.")
    last = asked[-1]
    below = conversation.contexts(last.turn_id)
    beside = [ids for ids in conversation.contexts() if ids not in below]
    beside.append(conversation.context_ids(last.parent_id))
    copies = conversation.copies(last.turn_id)
    removed = {turn_id for copy in copies for turn_id in conversation.below(copy)}
    drop = drop_from(controller.host)

    def delete() -> Deleted:
        """Read the files of all conversations: that takes long where there are many."""
        gone, shared = [*below], [*beside, *places.other_contexts([session.session_id])]
        for path in places.recorded_paths(session.session_id):  # of all models
            before = list(takewhile(lambda turn: turn[0] not in removed, path))
            shared.append(joined(before))
            if len(before) < len(path):
                gone.append(joined(path))
        deleted = places.delete_kv(gone, shared, drop)
        trouble = places.delete_typed({last.text})
        return replace(deleted, texts=frozenset((last.text,)), trouble=deleted.trouble or trouble)

    deleted = await asyncio.to_thread(delete)
    controller.place.forget(last.turn_id)
    return deleted


def drop_from(host: "ChatHost") -> DropFromMemory | None:
    """Return what has the engine let go of KV, and waits for that; None while the model loads."""
    if host.ready is None:
        return None

    def drop(contexts: list[tuple[list[int], int]]) -> None:
        try:
            host.forget(contexts).result(_PATIENCE_S)
        except TimeoutError:
            raise UsageError("The disk cache does not answer.", "Try again.") from None

    return drop
