"""Pins KV, and removes conversations with their text and KV. Functions on a ChatController.

KV that other saved conversations share with a removed one stays.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat.attachment import read_attachment
from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.deletion import Deleted, DropFromMemory, joined
from kvchat.chat.text_codec import Segment
from kvchat.core.errors import SessionNotFound, UsageError
from kvchat.core.types import KeptPositions, digest_of_ids

if TYPE_CHECKING:
    from kvchat.chat.controller import ChatController
    from kvchat.chat.host import ChatHost


# Timeout for opening the disk tier and writing pending KV.
_PATIENCE_S = 30.0
# The model is asked to repeat a pin in parts of so many tokens, each after some tokens before it.
REPEAT = "\n\nRepeat the previous context exactly.\n"
_PART_TOKENS, _LEAD_IN = 256, 8
_PROJECT_TTL_S = 30 * 86400.0
_FIRST_EXCHANGE = 2  # turns: a message and its answer
# The first tokens, to which all others attend.
_NUM_SINKS = 4


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


def keep_project(controller: "ChatController") -> None:
    """Pin what chats with the project's file begin with, for some days after the last such chat.

    Called behind a chat's answers: from the first one on there is KV to pin.
    """
    conversation, project = controller.conversation, controller.surroundings.project
    if conversation is None or not project.is_in(conversation.system):
        return
    if len(conversation.path()) == _FIRST_EXCHANGE:
        ids = controller.host.model.opening_ids(conversation)
        controller.host.pin(ids, f"project {digest_of_ids(ids)[:12]}", _PROJECT_TTL_S)


async def thin_pin(
    controller: "ChatController", token_ids: list[int], label: str, share: float
) -> KeptPositions:
    """Choose the positions of a pin whose KV stays, by KVzip, and note them.

    Its KV must be on the device. The model repeats the pin, part by part: as many rows as it has
    tokens are computed. Raises UsageError where that is not possible.
    """
    host = controller.host
    asking = host.model.tokenizer.encode([Segment(REPEAT, is_inert=True)])
    highest = [0.0] * len(token_ids)
    for start in range(0, len(token_ids), _PART_TOKENS):
        part = [*asking, *token_ids[max(0, start - _LEAD_IN) : start + _PART_TOKENS]]
        scores = await asyncio.wrap_future(host.repeat_scores(token_ids, part))
        if scores is None:
            raise UsageError("The memory for KV has no room for the pin.", "Raise --device-cache.")
        highest = list(map(max, highest, scores))
    status = await asyncio.wrap_future(host.status())
    opening = Conversation("", time.time(), controller.system, controller.tools)
    num_leading = min(len(host.model.opening_ids(opening)), len(token_ids))
    positions = kept_positions(highest, share, num_leading, status.block_size)
    kept = KeptPositions(digest_of_ids(token_ids), len(token_ids), positions, "KVzip")
    controller.pins.thinned.put(label, host.model.name, kept)
    thin_pins(controller)
    return kept


def thin_pins(controller: "ChatController") -> None:
    """Let chats that begin with a pin answer over the KV that `thin_pin` left of it."""
    name = controller.host.model.name
    controller.host.thin_beginnings(controller.pins.thinned.of_model(name))


def kept_positions(
    scores: Sequence[float], share: float, num_leading: int, block_size: int
) -> tuple[int, ...]:
    """Return the positions with the largest scores: a share of all, the first ones among them, as
    many as fill whole blocks.
    """
    wanted = max(math.ceil(share * len(scores)), num_leading)
    most = len(scores) // block_size
    num_kept = min(-(-wanted // block_size), most) * block_size
    order = sorted(
        range(len(scores)), key=lambda i: (i >= max(num_leading, _NUM_SINKS), -scores[i])
    )
    return tuple(sorted(order[:num_kept]))


async def share_context(controller: "ChatController", token_ids: list[int]) -> int:
    """Let other machines have the KV of a context; return how many of its tokens they find.

    Raises UsageError if there is no shared cache, or if it does not get any.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S):
            num_tokens = await asyncio.wrap_future(controller.host.share(token_ids))
    except TimeoutError:
        raise UsageError("The shared cache does not answer.", "/stats says why.") from None
    if not num_tokens:
        raise UsageError("The shared cache took nothing.", "/stats says why.")
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
    controller.close_session()
    controller.attached, controller.title = (), ""
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
