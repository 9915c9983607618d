"""ResentChats: conversations that clients send as text. Prefixes finds the context they continue.

The text alone does not give the ids: another encoding of the same answer is another context, and a
template may show the date or how a message was asked. So a conversation is opened message by
message, each with the ids that were fed or generated when this beginning was here before.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvchat.chat.answer_memory import AnswerMemory, ContextDigest, Fed, KnownAnswer
from kvchat.chat.answer_settings import AskOptions, ContextPolicy
from kvchat.chat.compaction import num_left_out
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.reply import Reply
from kvchat.chat.resent_chat import Difference, Message, ResentChat, SeenChats
from kvchat.chat.session import ChatSession
from kvchat.chat.stabiliser import Stabiliser
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


# A client that counts has to know how much is too much, but not of any number of messages.
CONTEXTS_COUNTED = 2
# Of a conversation whose oldest messages are left out, so many full contexts are looked at.
_MOST_CONTEXTS = 32
# What agents begin with stays on the disk for so long, and is pinned anew once a day.
_OPENING_TTL_S = 30 * 86400.0
_PINNED_ANEW_S = 86400.0
_MOST_OPENINGS = 16  # as many as the disk keeps
_NO_SUMMARY = "Send context_policy drop: only in kvchat's own chats a summary makes room."


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in progress. The owner takes the reply's events and closes the session.

    `difference` says which earlier message the client changed, None if it changed none. `kept` are
    the beginnings of the context to keep on disk: their tokens and for how many seconds. `fed` is
    what the request was, once its answer is remembered. `num_left_out` of the oldest messages are
    not in the context, which was full. `opening` is a digest of what an agent's chat begins with.
    """

    session: ChatSession
    reply: Reply
    difference: Difference | None = None
    kept: tuple[tuple[int, float], ...] = ()
    fed: Fed = field(default_factory=Fed)
    num_left_out: int = 0
    opening: bytes | None = None


def _opening_of(chat: ResentChat) -> bytes | None:
    """Return a digest of the tools and the system prompt that a chat begins with; None without
    tools.

    With tools they are an agent's, and thousands of tokens that each of its sessions begins with.
    """
    if chat.tools is None:
        return None
    text = f"{chat.system or ''}\0{chat.tools.text}"
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()


class ResentChats:
    """Opens resent conversations on one host. One thread at a time uses it.

    `stabiliser` moves lines that change to the end; None leaves every prompt as it is. Owns both
    until `close`.
    """

    def __init__(
        self, host: ChatHost, memory: AnswerMemory, stabiliser: Stabiliser | None = None
    ) -> None:
        self._stabiliser = stabiliser
        self._host = host
        self._prefixes = Prefixes(host, memory)
        self._seen = SeenChats()
        self._openings: dict[bytes, float] = {}  # when they were pinned, the latest used last

    @property
    def stabilises(self) -> bool:
        return self._stabiliser is not None

    def ask(
        self, chat: ResentChat, options: AskOptions, notify: Callable[[], None] | None = None
    ) -> Asked:
        """Begin to answer; errors as `ChatSession.ask`.

        With the policy to drop, a conversation that is too long goes on without its oldest
        messages, if the model is loaded. A summary cannot take their place: there is no answer to
        wait for before this one.
        """
        try:
            return self._ask(chat, options, notify)
        except ContextTooLong as error:
            if options.context_policy is ContextPolicy.COMPACT:
                error.hint = _NO_SUMMARY
            raise

    def _ask(
        self, chat: ResentChat, options: AskOptions, notify: Callable[[], None] | None
    ) -> Asked:
        if self._stabiliser is not None:
            chat = self._stabiliser.stabilised(chat)
        session, num_without = self._opened(chat, options)
        difference = self._seen.note(chat.system, chat.messages, chat.tools, chat.moved)
        if difference is not None:
            difference = difference.as_sent(chat)
        chat = chat.without_oldest(num_without)
        last = chat.messages[-1]
        if chat.is_continuation:
            reply = session.continue_answer(options, notify)
        else:
            ready = self._host.ready
            # The engine would refuse it too, but perhaps after a step that takes a while.
            most_ids = ready.context_limit - 1 if ready is not None else None
            reply = session.ask(last.text, options, notify, last.results, most_ids=most_ids)
        opening = _opening_of(chat)
        kept = tuple(self._kept_tokens(session, chat, opening))
        return Asked(session, reply, difference, kept, num_left_out=num_without, opening=opening)

    def _opened(self, chat: ResentChat, options: AskOptions) -> tuple[ChatSession, int]:
        """Return a session with all messages of a chat but a last one of the user, or with those
        that have room, and how many of the oldest it is without.
        """
        think = options.think
        if options.context_policy is not ContextPolicy.DROP:
            return self._prefixes.opened(chat, think), 0
        ready = self._host.wait_until_ready()  # until then nothing knows how much has room
        session = self._prefixes.opened(chat, think, _MOST_CONTEXTS)
        conversation = session.conversation
        lengths = [len(turn.token_ids) for turn in conversation.path()]
        if not chat.is_continuation:
            last, parent = chat.messages[-1], conversation.tip_id
            system = None if lengths else conversation.system
            asked = self._host.model.user_ids(
                conversation, parent, last.text, system, think, results=last.results
            )
            lengths.append(len(asked))
        num_opening = len(self._host.model.opening_ids(conversation))
        lengths[0] -= num_opening
        begins = [
            number
            for number, message in enumerate(chat.messages)
            if message.role is Role.USER and not message.results
        ]
        count = num_left_out(lengths, begins, num_opening, ready.context_limit)
        if not count:
            return session, 0
        session.close()
        return self._prefixes.opened(chat.without_oldest(count), think), count

    def _kept_tokens(
        self, session: ChatSession, chat: ResentChat, opening: bytes | None
    ) -> Iterator[tuple[int, float]]:
        """Yield how many tokens each part to keep has, and for how many seconds."""
        if opening is not None and not self._is_pinned(opening):
            yield len(self._host.model.opening_ids(session.conversation)), _OPENING_TTL_S
        path = session.conversation.path()
        for part in chat.kept:
            if part.num_messages:
                num_tokens = sum(len(turn.token_ids) for turn in path[: part.num_messages])
                if part.text is not None and part.num_messages <= len(path):
                    whole = chat.messages[part.num_messages - 1].text
                    ids = path[part.num_messages - 1].token_ids
                    num_tokens -= self._num_behind(ids, whole, part.text)
            else:
                num_tokens = len(self._host.model.opening_ids(session.conversation))
            yield num_tokens, part.ttl_s

    def _is_pinned(self, opening: bytes) -> bool:
        """Return whether an opening was pinned not long ago; it counts as used then."""
        pinned_s = self._openings.pop(opening, None)
        if pinned_s is not None:
            self._openings[opening] = pinned_s
        return pinned_s is not None and time.time() - pinned_s < _PINNED_ANEW_S

    def _note_pinned(self, opening: bytes) -> None:
        self._openings.pop(opening, None)
        self._openings[opening] = time.time()
        if len(self._openings) > _MOST_OPENINGS:
            del self._openings[next(iter(self._openings))]

    def _num_behind(self, token_ids: Sequence[int], whole: str, beginning: str) -> int:
        """Return how many of a message's tokens stand behind a beginning of its text.

        None do where the tokens do not show the text as it is: then more is kept than was asked.
        """
        stream = self._host.model.tokenizer.new_stream([])
        ends, told = [], ""
        for token in token_ids:
            told += stream.feed(token)
            ends.append(len(told))
        start = told.rfind(whole)
        if start < 0 or not whole.startswith(beginning):
            return 0
        return sum(end > start + len(beginning) for end in ends)

    def complete(
        self,
        prompt: str | tuple[int, ...],
        options: AskOptions,
        notify: Callable[[], None] | None = None,
    ) -> Asked:
        """Begin to continue a text or token ids; errors as `ChatSession.continue_text`."""
        session = self._host.unsaved_session()
        return Asked(session, session.continue_text(prompt, options, notify))

    def count(self, chat: ResentChat, think: Think = Think.AUTO) -> int:
        """Return the number of tokens of the context that `ask` would feed.

        Raises ContextTooLong for more than `CONTEXTS_COUNTED` full contexts.
        """
        if self._stabiliser is not None:
            chat = self._stabiliser.stabilised(chat, is_kept=False)
        session = self._prefixes.opened(chat, think, CONTEXTS_COUNTED)
        if not chat.is_continuation:
            last = chat.messages[-1]
            session.add_user_turn(last.text, think=think, results=last.results)
        return len(session.conversation.context_ids())

    def remember(self, asked: Asked, ended: AnswerEnded) -> None:
        """Keep the ids of a complete answer, or of one that ended at its limit, and pin what the
        client wants to be kept.
        """
        asked.fed.token_ids = asked.session.conversation.context_ids(ended.turn_id)
        self._pin(asked.fed.token_ids, asked.kept)
        if asked.opening is not None and not self._is_pinned(asked.opening):
            self._note_pinned(asked.opening)
        asked.fed.answer_key = self._prefixes.remember(asked.session, ended)

    def forget(self, fed: Fed) -> None:
        """Remove the answer of a request for good. Raises StoreError."""
        if fed.answer_key:
            self._prefixes.forget(fed.answer_key)

    def _pin(self, context: list[int], kept: tuple[tuple[int, float], ...]) -> None:
        for num_tokens, ttl_s in kept:
            ids = context[:num_tokens]
            digest = self._prefixes.digest()
            digest.extend(ids)
            self._host.pin(ids, f"cache_control {digest.key('').hex()[:12]}", ttl_s)

    def close(self) -> None:
        self._prefixes.close()
        if self._stabiliser is not None:
            self._stabiliser.close()
