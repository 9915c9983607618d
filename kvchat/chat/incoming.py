"""IncomingChat: collects messages that come as JSON, in whichever interface they were written.

Each interface reads its own fields, and adds here what it finds. The result is a ResentChat.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from kvchat.chat.conversation import Role
from kvchat.chat.fields import FieldFault, Fields
from kvchat.chat.open_calls import OpenCalls
from kvchat.chat.resent_chat import KeptPart, Message, ResentChat, joined, resent_chat
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import UsageError

_MESSAGES = "messages"


class IncomingChat:
    """The messages so far. Add them in their order, then take `chat`, or `turns`.

    needs_results   whether every call has to have a result
    """

    def __init__(self, needs_results: bool = True) -> None:
        self._needs_results = needs_results
        self._systems: list[str] = []
        self._messages: list[Message] = []
        self._indexes: list[int] = []
        self._num_items = 0
        self._open_calls = OpenCalls()
        self._kept: list[tuple[int, float, str | None]] = []

    def next_item(self) -> None:
        """Begin the next item of the client's list: what is added until the next call is from it.

        What is added before the first item counts as of the first.
        """
        self._num_items += 1

    def instruct(self, text: str) -> None:
        """Add to the system prompt; an instruction after the first message stands where it came."""
        if self._messages:
            self.ask(text)
        elif text:
            self._systems.append(text)

    def ask(self, text: str) -> None:
        """Add a message of the user."""
        self._end_calls()
        self._add(Message(Role.USER, text))

    def answer(self, text: str, calls: Iterable[tuple[str, ToolCall]] = ()) -> None:
        """Add an answer, with calls by the ids that the client gave them."""
        if self._open_calls.have_results:
            self._end_calls()
        if not self._messages:  # templates want a message of the user before it: an empty one
            self.ask("")
        named = list(calls)
        for call_id, call in named:
            self._open_calls.add(call_id, call)
        self._add(Message(Role.ASSISTANT, text, tuple(call for _, call in named)))

    def add_result(self, item: Fields, id_field: str, text: str) -> None:
        """Add the result of a call; raises FieldFault if the item's id names no call before it."""
        call_id = item.text(id_field)
        if call_id is None or not self._open_calls.add_result(call_id, text, self._index):
            raise item.fault(id_field, "names no call of the answer before it")

    def keep_so_far(self, ttl_s: float, text: str | None = None) -> None:
        """Keep the KV of all that was added for so many seconds.

        text   the beginning of the last message's text to which it reaches; None for its end
        """
        self._kept.append((len(self._messages) + self._open_calls.have_results, ttl_s, text))

    @property
    def system(self) -> str:
        """The system prompt so far, "" without any."""
        return "\n\n".join(self._systems)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that was added, but results of calls that may still get others."""
        return tuple(self._messages)

    def turns(self) -> tuple[Message, ...]:
        """Return the messages as turns: results, and the user's text after them, are one."""
        self._end_calls()
        turns: list[Message] = []
        for message in self._messages:
            last = turns[-1] if turns else message
            if last.results and not last.text and message.role is Role.USER:
                turns[-1] = joined([last, message])
            else:
                turns.append(message)
        return tuple(turns)

    def chat(self, tools: ToolSet | None = None) -> ResentChat:
        """Return the conversation, or raise FieldFault for one that cannot be answered.

        Instructions alone are the user's message: templates want one.
        """
        self._end_calls()
        if not self._messages and self._systems:
            self.ask(self._systems.pop())
        try:
            chat = resent_chat(self.system, self._messages, tools, self._indexes)
            kept = tuple(self._joined(*part) for part in self._kept)
            return replace(chat, kept=kept)
        except UsageError as error:
            raise FieldFault(str(error), _MESSAGES) from error

    def _joined(self, num_messages: int, ttl_s: float, text: str | None) -> KeptPart:
        """Return what to keep, counted in messages whose neighbours of one role are joined."""
        messages = self._messages[:num_messages]
        groups = [list(group) for _, group in groupby(messages, lambda message: message.role)]
        if text is None:
            return KeptPart(len(groups), ttl_s)
        before = groups[-1][:-1]
        cut = joined([*before, replace(groups[-1][-1], text=text)])
        return KeptPart(len(groups), ttl_s, cut.text)

    @property
    def _index(self) -> int:
        return max(0, self._num_items - 1)

    def _add(self, message: Message, index: int | None = None) -> None:
        self._messages.append(message)
        self._indexes.append(self._index if index is None else index)

    def _end_calls(self) -> None:
        """Add the results of the last calls, in the order of the calls."""
        if not self._open_calls:
            return
        call = self._open_calls.without_result()
        if call is not None and self._needs_results:
            sentence = f"The call of {call.name!r} has no result."
            raise FieldFault(sentence, _MESSAGES, "invalid_value")
        for index, result in self._open_calls.take_results():
            self._add(Message(Role.USER, "", results=(result,)), index)
