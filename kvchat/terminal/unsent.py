"""Unsent: messages that are typed and not sent, which are saved and offered again.

The queue has what waits to be sent. It is saved with the conversation, so that a kill loses none of
it; what an earlier chat left is offered in the prompt, one message after another.
"""

import logging
from collections.abc import Callable, Sequence

from kvchat.chat.controller import ChatController
from kvchat.chat.message_queue import MessageQueue
from kvchat.core.errors import StoreError
from kvchat.terminal import history_view
from kvchat.terminal.theme import Role
from kvchat.terminal.view import View

_log = logging.getLogger(__name__)


class Unsent:
    """Keeps a queue's unsent messages in the file of the conversation, and offers those there.

    num_kept  of the messages that waited when the chat ended, those saved
    """

    def __init__(
        self,
        controller: ChatController,
        queue: MessageQueue,
        view: View,
        say: Callable[[str, Role], None],
    ) -> None:
        self._controller = controller
        self._queue = queue
        self._view = view
        self._say = say
        self._kept: tuple[str, ...] = ()  # what is saved to be sent in a later chat
        self._kept_in: str | None = None  # the session that it is saved in
        self._is_settled = False
        self.num_kept = 0

    @property
    def is_kept(self) -> bool:
        """Whether the file has messages to be sent."""
        return bool(self._kept)

    def keep(self, is_stale: bool = False) -> None:
        """Save what waits to be sent, so that it is offered when the conversation is opened.

        `is_stale` if the file has another list than was saved.
        """
        unsent = self._queue.unsent
        if (unsent == self._kept and not is_stale) or self._is_settled:
            return
        try:
            if self._controller.keep_waiting(unsent):
                self._kept, self._kept_in = unsent, self._session_id
        except StoreError as error:  # the message says so itself when it is sent
            _log.info("what waits cannot be kept: %s", error)

    def sending(self) -> None:
        """Note that a message was taken to be sent: its turn takes it off the list in the file."""
        self._kept = self._queue.unsent

    def settle(self) -> None:
        """Save a last time: what is saved stays, whatever key is pressed until the end."""
        if self._queue.unsent:  # else it was done before
            self.keep()
            self.num_kept += len(self._kept)
        self._is_settled = True

    def take(self) -> None:
        """Take over what the conversation, if it was just opened, has unsent.

        Where another one was open before, what was typed since goes along: a command that opens one
        waited before it.
        """
        left, kept = self._kept_in, self._kept
        if left == self._session_id:
            left = None
        stays = self._leave(left) if left is not None else ()
        if waiting := self._controller.take_waiting():
            self._kept, self._kept_in = waiting, self._session_id
            if self._view.painter.look.is_plain:
                self.show(waiting)  # nothing can be put into such a prompt
            else:
                self._queue.offer(waiting)
                self._say(history_view.unsent_in_words(len(waiting)), Role.WARNING)
        if left is not None and self._queue.unsent:
            self.keep()
        is_saved = self._kept == self._queue.unsent
        if left is not None and kept != stays and is_saved:
            self._strike(left, stays)

    def _leave(self, left: str) -> tuple[str, ...]:
        """Forget what is saved in a conversation; return what of it is to stay saved there.

        What was offered goes along into a copy. Elsewhere it is offered no more, and stays.
        """
        stays, self._kept, self._kept_in = list(self._kept), (), None
        if self._controller.place.copied_from != left:
            offered = self._queue.drop_offers()
            if offered and self._view.prompt_text == offered:
                self._view.put_back("")
        for text in self._queue.unsent:
            if text in stays:
                stays.remove(text)
        return tuple(stays)

    def _strike(self, left: str, stays: tuple[str, ...]) -> None:
        """Take off a conversation's list what is saved in the open one by now.

        In this order a kill between them loses nothing. On a full disk an old file may still have
        room for a line, and a new one none.
        """
        if self._controller.saving_problem() is not None:
            return
        try:
            self._controller.keep_waiting_in(left, stays)
        except StoreError as error:
            _log.info("what waited is offered there too: %s", error)

    def offer(self) -> None:
        """Put the next unsent message into the prompt, if that is empty."""
        if not self._view.prompt_text and (text := self._queue.next_offer()) is not None:
            self._view.put_back(text, gives_way=True)

    def show(self, texts: Sequence[str]) -> None:
        """Show what was typed and no model will answer, so that it can be copied."""
        if typed := [text for text in texts if text.strip()]:
            self._say("Not sent:", Role.WARNING)
            width = self._view.render_context.width
            for text in typed:
                self._view.write(self._view.painter.wrapped(text, width, Role.USER))

    @property
    def _session_id(self) -> str | None:
        conversation = self._controller.conversation
        return conversation.session_id if conversation is not None else None
