"""MessageQueue: the messages typed while the model was busy, in order and editable.

A message that is being edited keeps its place. While the first message is being edited, no message
is sent. Messages that an earlier process did not send are offered in the prompt one after another:
none of them is sent unless the user sends it.
"""

from collections.abc import Iterable
from dataclasses import dataclass


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
