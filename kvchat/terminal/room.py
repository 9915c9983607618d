"""RoomMaker: makes room in a full context before an answer, and says in one line what it did.

For the screen and for scripts alike; `chat/making_room.py` decides.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvchat.chat import making_room
from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.events import AnswerEnded
from kvchat.chat.making_room import Change, Need
from kvchat.chat.tools import ToolResult
from kvchat.core.errors import ContextTooLong, KvchatError, UsageError
from kvchat.core.types import FinishReason
from kvchat.terminal import warmth
from kvchat.terminal.status import about, plural

# What stays has KV that was computed behind the messages which are left out.
_LOSS = ", and may be less exact until what stays is read again in a pause"


class RoomMaker:
    """Makes room for the answers of one controller.

    `summarise` lets the model write the summary of a plan, and raises what prevented it. `say`
    tells the user a sentence.
    """

    def __init__(
        self,
        controller: ChatController,
        summarise: Callable[[CompactionPlan], Awaitable[AnswerEnded]],
        say: Callable[[str], None],
    ) -> None:
        self._controller = controller
        self._summarise = summarise
        self._say = say
        # The conversation and the first turn of the context that got none.
        self._without_summary: tuple[str, int] | None = None

    async def make(self, text: str | None, results: tuple[ToolResult, ...] = ()) -> bool:
        """Make room for the answer to a message, if it is needed; arguments as `need` takes them.

        Returns false if the user stopped the summary: then nothing is changed, and nothing is to be
        sent. Where no room can be made, nothing is changed either, and the message may be refused.
        """
        needed = making_room.need(self._controller, text, results)
        if needed is None:
            return True
        if self._controller.options.context_policy is ContextPolicy.COMPACT:
            return await self._compact(needed)
        await self._drop(needed)
        return True

    async def _drop(self, needed: Need) -> None:
        before = self._controller.context_ids
        change = making_room.drop(self._controller, needed)
        if change is not None:
            loss = _LOSS if await self._move(before) else ""
            self._tell(change, _left_out(change), f"{await self._price()}{loss}")

    async def _move(self, before: list[int]) -> bool:
        """Move the KV of what stays; false where that is read again."""
        try:
            moving = self._controller.require_session().move_kv(before)
            num_tokens = await asyncio.wrap_future(moving)
        except KvchatError:  # the next answer tells it
            return False
        return num_tokens > 0

    async def _drop_if_full(self, needed: Need) -> None:
        """Go on without a summary, which small models often fail to write, where it must be."""
        if needed.is_full:
            await self._drop(needed)

    async def make_early(self) -> None:
        """Leave out messages as soon as no next one fits, and move or begin to read what stays.

        So the next message does not wait for it. A summary is not made before it is needed.
        """
        if self._controller.options.context_policy is not ContextPolicy.DROP:
            return
        needed, before = making_room.need(self._controller, None), self._controller.context_ids
        change = making_room.drop(self._controller, needed) if needed is not None else None
        if change is None:
            return
        if await self._move(before):
            self._tell(change, _left_out(change), f"{await self._price()}{_LOSS}")
            return
        self._controller.host.read_ahead(self._controller.context_ids)
        self._tell(change, _left_out(change), "what stays is read again while you type")

    async def _compact(self, needed: Need) -> bool:
        conversation = self._controller.require_conversation()
        first = conversation.session_id, conversation.path()[0].turn_id
        is_asked = first != self._without_summary
        plan = making_room.plan_summary(self._controller, needed) if is_asked else None
        if plan is None:
            await self._drop_if_full(needed)
            return True
        try:
            ended = await self._summarise(plan)
            if ended.reason is FinishReason.CANCELLED:
                self._say("Stopped: nothing is compacted.")
                return False
            change = making_room.take_summary(self._controller, plan, ended)
        except (UsageError, ContextTooLong) as error:
            self._say(error.message)
            self._without_summary = first
            await self._drop_if_full(needed)
            return True
        usage, count = ended.usage, plural(change.num_messages, "message")
        cached = f"{usage.cached.total:,} of {usage.prompt_tokens:,} tokens cached"
        done = f"a summary takes the place of {count} ({cached})"
        self._tell(change, done, await self._price())
        return True

    async def _price(self) -> str:
        """Return what the next answer reads of the context, as part of a sentence."""
        cost = await self._controller.engine.cost(self._controller.context_ids)
        return warmth.price(cost, "the next answer", "reads") if cost is not None else ""

    def _tell(self, change: Change, done: str, price: str) -> None:
        some = about(self._controller.host.model)
        self._say(
            f"The context is full: {done}, {some}{change.num_before:,} tokens became "
            f"{change.num_after:,}{f'; {price}' if price else ''}. All messages are kept: "
            f"/switch {change.old_branch} goes back."
        )


def _left_out(change: Change) -> str:
    return f"left out {oldest_in_words(change.num_messages)}"


def oldest_in_words(count: int) -> str:
    """Return how many of the oldest messages there are, as part of a sentence."""
    return "the oldest message" if count == 1 else f"the oldest {count:,} messages"
