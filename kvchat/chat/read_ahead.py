"""ReadAhead: prefills the beginning of the next message while the user still types it.

Attached files, finished lines and most of a long paste will hardly change. Their tokens are found
by two endings that differ at once: what both encodings share does not depend on what is typed next.
Nothing of it enters the conversation or the disk, and any request ends it.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.attachment import mentioned_files, read_attachment
from kvchat.chat.conversation import ROOT, Conversation
from kvchat.chat.why import common_len
from kvchat.core.errors import ContextTooLong, KvchatError

if TYPE_CHECKING:
    from kvchat.chat.controller import ChatController

# Of an unfinished line only what is longer than this is read, up to its last word.
_MAX_UNREAD_CHARS = 80
# Fewer new tokens are read with the message itself.
_MIN_NEW_TOKENS = 16
# How often it is asked how much is read, and after how many equal answers no more.
_SHARE_INTERVAL_S = 0.4
_MOST_SAME_SHARES = 20
# At most the partial block at the end, and what the ending of a template takes.
_FEW_TOKENS = 64


def finished(text: str) -> str:
    """Return the part of a text that typing on will hardly change: whole lines, or whole words of a
    long line.
    """
    lines, line_end, rest = text.rpartition("\n")
    words = rest[: rest.rfind(" ") + 1] if len(rest) > _MAX_UNREAD_CHARS else ""
    return lines + line_end + words


class ReadAhead:
    """Reads ahead for one controller's next message. Used on the event loop.

    `share` is how much is read of what is read ahead, as `share_read` says. `is_too_long` if the
    message would be refused; then nothing is read.
    """

    def __init__(self, controller: "ChatController") -> None:
        self._controller = controller
        self.share: float | None = None
        self.is_too_long = False
        self._begun: list[int] = []
        self._num_before = 0  # of these, the tokens of the conversation so far

    async def consider(self, text: str) -> None:
        """Prefill what will hardly change of a message being typed; end it where that changed."""
        controller = self._controller
        if controller.host.ready is None:
            return
        host, files = controller.host, tuple(file.text for file in controller.attached)
        limit = controller.host.ready.told_context_limit
        ids = await asyncio.to_thread(self._stable_ids, files, text)
        if host is not controller.host:
            return
        is_over = ids is not None and limit is not None and len(ids) >= limit
        makes_room = controller.options.context_policy is not ContextPolicy.STOP
        self.is_too_long = ids is None or (is_over and not makes_room)
        if ids is None or is_over:
            self.end()
            return
        if ids == self._begun:
            return
        if len(ids) - common_len(ids, self._begun) >= _MIN_NEW_TOKENS:
            self._begun, self._num_before = ids, len(_ids_before(controller))
            host.read_ahead(ids)
        elif not ids or ids[: len(self._begun)] != self._begun[: len(ids)]:
            self.end()

    async def share_read(self) -> float | None:
        """Return which share of what was begun is cached, 1.0 if all is but a block or two.

        None if nothing is begun, and where that cannot be known.
        """
        begun, num_before = self._begun, self._num_before
        cost = await self._controller.engine.cost(begun) if begun else None
        if cost is None or begun is not self._begun:
            return None
        if cost.num_read < _FEW_TOKENS:
            return 1.0
        num_new = max(1, len(begun) - num_before)  # none where the place moved meanwhile
        return min(1.0, max(0.0, (cost.num_cached - num_before) / num_new))

    async def watch(self, is_wanted: Callable[[], bool], show: Callable[[], None]) -> None:
        """Keep `share` up to date and `show` it, until all is read or nothing more comes."""
        num_same = 0
        while is_wanted() and num_same < _MOST_SAME_SHARES:
            share = await self.share_read()
            num_same = 0 if share != self.share else num_same + 1
            self.share = share
            show()
            if share is None or share == 1.0:
                return
            await asyncio.sleep(_SHARE_INTERVAL_S)

    def end(self) -> None:
        """End what is under way; what was read stays cached."""
        if self._begun:
            self._begun = []
            self._controller.host.end_read_ahead()

    def forget(self) -> None:
        """The message was sent: its request has ended the reading."""
        self._begun = []
        self.share = None
        self.is_too_long = False

    def _stable_ids(self, files: tuple[str, ...], text: str) -> list[int] | None:
        """Return the context that the message will begin with; empty if it adds nothing yet, None
        if no context could hold it.
        """
        controller = self._controller
        try:
            paths = mentioned_files(finished(text), controller.pins.paths())
            mentioned = [read_attachment(path).text for path in paths]
            attached = dict.fromkeys((*files, *mentioned))  # each once, as when it is sent
            begun = "".join(f"{file}\n" for file in attached) + finished(text)
            return self._ids_of(controller, begun) if begun else []
        except ContextTooLong:
            return None
        except KvchatError:  # sending the message reports it
            return []

    @staticmethod
    def _ids_of(controller: "ChatController", begun: str) -> list[int]:
        conversation = controller.conversation
        if conversation is None:
            conversation = Conversation("", time.time(), controller.system, controller.tools)
        parent, before = controller.place.parent_id, _ids_before(controller)
        system = conversation.system if not before else None
        model = controller.host.model
        return [*before, *model.beginning_ids(conversation, parent, begun, system)]


def _ids_before(controller: "ChatController") -> list[int]:
    """Return the context that the next message goes below."""
    conversation, parent = controller.conversation, controller.place.parent_id
    return conversation.context_ids(parent) if conversation is not None and parent != ROOT else []
