"""Prefixes: finds the context that a conversation which is sent as text continues.

The text alone does not give the ids: another encoding of the same answer is another context, and a
template may show the date or how a message was asked. So a conversation is opened message by
message, each with the ids that were fed or generated when this beginning was here before.
"""

import math
import time

from kvchat.chat.answer_memory import AnswerMemory, ContextDigest, KnownAnswer
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.resent_chat import Message, ResentChat
from kvchat.chat.session import ChatSession
from kvchat.chat.thinking import Think
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import ContextTooLong, UsageError
from kvchat.core.types import FinishReason

_KEPT_FINISHES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class Prefixes:
    """The known beginnings of conversations with one host's model. One thread at a time uses it.

    Owns the memory until `close`.
    """

    def __init__(self, host: ChatHost, memory: AnswerMemory) -> None:
        self._host = host
        self._memory = memory

    def opened(self, chat: ResentChat, think: Think, num_contexts: int = 1) -> ChatSession:
        """Return a session with all messages but a last one of the user.

        `think` is how the last message is asked, and earlier ones that were not answered here.
        Raises ContextTooLong as soon as there are the tokens of `num_contexts` full contexts: what
        follows is not encoded, which would keep the requests of other clients waiting.
        """
        model = self._host.model
        if chat.needs_tools and model.format.tools is None:
            raise UsageError(f"The chat template of {model.name} has no place for tools.")
        ready = self._host.ready
        limit = ready.context_limit if ready is not None else math.inf
        if chat.tools is not None and ready is not None:
            self._require_room(chat.tools, ready.context_limit)
        session = self._host.unsaved_session(chat.system, self._began_s(chat), chat.tools)
        digest = self.digest()
        num_tokens = 0
        history = chat.messages if chat.is_continuation else chat.messages[:-1]
        for number, message in enumerate(history, start=1):
            if message.role is Role.USER:
                answer = chat.messages[number] if number < len(chat.messages) else None
                asked_with = self._think_of(session, digest, message, answer, think)
                turn = session.add_user_turn(
                    message.text, think=asked_with, results=message.results
                )
            else:
                is_last = number == len(chat.messages)
                key = digest.key(_answer_text(message.text, message.calls))
                known = self._memory.find(key) if not is_last else None
                asked = session.conversation.path()[-1]
                turn = session.add_answer(
                    message.text,
                    finish=FinishReason.LENGTH if is_last else FinishReason.STOP,
                    known=(known.token_ids, known.finish) if known is not None else None,
                    calls=message.calls,
                )
                if session.conversation.turn(asked.turn_id) is not asked:  # told, not asked
                    digest = self.digest()
                    digest.extend(session.conversation.context_ids(asked.turn_id))
            digest.extend(turn.token_ids)
            num_tokens += len(turn.token_ids)
            if num_tokens >= num_contexts * limit:
                raise ContextTooLong(
                    f"The first {number} of {len(chat.messages)} messages have {num_tokens:,} "
                    f"tokens, and the context holds {limit:,}.",
                    "Shorten it or start a new conversation.",
                    num_tokens,
                    int(limit),
                )
        return session

    def remember(self, session: ChatSession, ended: AnswerEnded) -> bytes:
        """Keep the ids of a complete answer, or of one that ended at its limit.

        Returns the key by which `forget` removes it, b"" for an answer that is not kept.
        """
        conversation = session.conversation
        turn = conversation.turn(ended.turn_id)
        if turn.role is not Role.ASSISTANT or ended.reason not in _KEPT_FINISHES:
            return b""
        if ended.num_dropped_calls:
            return b""  # the ids hold calls that the client does not know
        digest = self.digest()
        digest.extend(conversation.context_ids(turn.parent_id))
        text = ended.text if ended.thinking or ended.calls else turn.text
        key = digest.key(_answer_text(text, ended.calls))
        self._memory.put(key, KnownAnswer(turn.token_ids, ended.reason))
        return key

    def forget(self, key: bytes) -> None:
        """Remove an answer for good. Raises StoreError."""
        self._memory.remove(key)

    def close(self) -> None:
        self._memory.close()

    def digest(self) -> ContextDigest:
        """Return the digest of the empty context."""
        return ContextDigest(self._host.model.tokenizer.digest)

    def _require_room(self, tools: ToolSet, limit: int) -> None:
        """Raise ContextTooLong for definitions that the template would write in vain."""
        if self._host.model.tokenizer.exceeds(tools.text, limit):
            raise ContextTooLong(
                f"The tools have {len(tools.text):,} characters, and the context holds {limit:,} "
                "tokens.",
                "Offer fewer tools, or describe them in fewer words.",
                limit + 1,
                limit,
            )

    def _think_of(
        self,
        session: ChatSession,
        digest: ContextDigest,
        message: Message,
        answer: Message | None,
        think: Think,
    ) -> Think:
        """Return how a message was asked, by what was answered; `think` if that is not known."""
        model, conversation = self._host.model, session.conversation
        known = model.format.switch.known
        if answer is None or len(known) == 1:
            return think
        parent = conversation.tip_id
        system = conversation.system if not conversation.context_ids(parent) else None
        for tried in dict.fromkeys((think, *known)):
            ids = model.user_ids(
                conversation, parent, message.text, system, tried, results=message.results
            )
            asked = digest.copy()
            asked.extend(ids)
            if self._memory.find(asked.key(_answer_text(answer.text, answer.calls))) is not None:
                return tried
        return think

    def _began_s(self, chat: ResentChat) -> float:
        """Return when a conversation with this beginning was first seen.

        A template may show the date, which must not change within a conversation.
        """
        digest = self.digest()
        opening = digest.key(f"began\0{chat.system}\0{chat.messages[0].text}")
        return self._memory.first_time(opening, time.time())


def _answer_text(text: str, calls: tuple[ToolCall, ...]) -> str:
    """Return the text that stands for an answer and its calls, whatever ids the client uses."""
    return "\0".join((text.strip(), *(call.key for call in calls)))
