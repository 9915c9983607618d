"""Unsent: messages that are typed and not sent, which are saved and offered again.

The queue has what waits to be sent. It is saved with the conversation, so that a kill loses none of
it; what an earlier chat left is offered in the prompt, one message after another.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvchat.chat.controller import ChatController
from kvchat.core.errors import StoreError
from kvchat.terminal import history_view
from kvchat.terminal.theme import Role
from kvchat.terminal.view import View

# A message that is being edited keeps its place. While the first message is being edited, no
# message is sent. Messages that an earlier process did not send are offered in the prompt one after
# another: none of them is sent unless the user sends it.


@dataclass(slots=True)
class _Waiting:
    text: str


class MessageQueue:
    """Messages waiting to be sent. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._edited: _Waiting | None = None
        self._offered: list[str] = []  # not yet in the prompt
        self._in_prompt: str | None = None  # the one of these that is

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(message.text for message in self._waiting)

    @property
    def unsent(self) -> tuple[str, ...]:
        """All that is to outlive the process, in the order in which it would be sent."""
        return (*self.offers, *self.texts)

    @property
    def offers(self) -> tuple[str, ...]:
        """What an earlier process did not send, and this one neither."""
        shown = () if self._in_prompt is None else (self._in_prompt,)
        return (*shown, *self._offered)

    def offer(self, texts: Iterable[str]) -> None:
        """Take the messages that an earlier process did not send, in place of others like them."""
        self._offered, self._in_prompt = list(texts), None

    def next_offer(self) -> str | None:
        """Return the message to put into the prompt, which is empty; None for none."""
        if self._in_prompt is None and self._offered:
            self._in_prompt = self._offered.pop(0)
        return self._in_prompt

    def drop_offer(self) -> None:
        """Forget the offered message in the prompt: it was sent, or cleared."""
        self._in_prompt = None

    def drop_offers(self) -> str | None:
        """Forget all offered messages; return the one that was put into the prompt, None for none.

        It may be changed there since.
        """
        offered, self._in_prompt = self._in_prompt, None
        self._offered.clear()
        return offered

    @property
    def edited_index(self) -> int | None:
        """The index of the message that is in the prompt, None if none is."""
        return self._waiting.index(self._edited) if self._edited is not None else None

    @property
    def has_next(self) -> bool:
        """Whether a message may be sent now."""
        return bool(self._waiting) and self._waiting[0] is not self._edited

    def add(self, text: str) -> None:
        """Append a message, or store the edited one in its place; empty text removes that one."""
        edited, self._edited = self._edited, None
        if edited is None:
            self._waiting.append(_Waiting(text))
        elif text.strip():
            edited.text = text
        else:
            self._waiting.remove(edited)

    def put_first(self, text: str) -> None:
        """Let a message wait that is to be sent before all others."""
        self._waiting.insert(0, _Waiting(text))

    def take(self) -> str:
        """Remove the first message and return it."""
        assert self.has_next
        return self._waiting.pop(0).text

    def edit_previous(self, current: str) -> str | None:
        """Return the message before the one in the prompt for editing; at first the last message.

        Returns None at the first message. `current` is the prompt's text; it becomes the text of
        the message that was edited.
        """
        index = self.edited_index
        target = len(self._waiting) - 1 if index is None else index - 1
        return self._edit(target, current)

    def edit_next(self, current: str) -> str | None:
        """Return the message after the one in the prompt for editing, "" after the last one.

        Returns None if no message is being edited.
        """
        index = self.edited_index
        if index is None:
            return None
        if index + 1 == len(self._waiting):
            self.add(current)
            return ""
        return self._edit(index + 1, current)

    def stop_editing(self) -> None:
        """Stop editing; the message keeps its earlier text."""
        self._edited = None

    def clear(self) -> tuple[str, ...]:
        """Remove all messages and return them, but for an offered one that is in the prompt."""
        texts = (*self._offered, *self.texts)
        self._offered.clear()
        self._in_prompt = None
        self._waiting.clear()
        self._edited = None
        return texts

    def _edit(self, index: int, current: str) -> str | None:
        if not 0 <= index < len(self._waiting):
            return None
        target = self._waiting[index]
        if self._edited is not None:
            self.add(current)
        self._edited = target
        return target.text


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

    def take_back(self) -> None:
        """Let the message that was sent to a model which could not be loaded wait again.

        In the conversation it would stand unanswered before the next one.
        """
        if text := self._controller.take_back():
            self._queue.put_first(text)
            self.keep(is_stale=True)

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
            if (store := self._controller.host.store) is not None:
                store.keep_waiting(left, stays)
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
