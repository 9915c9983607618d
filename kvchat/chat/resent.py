"""ResentChats: conversations that a client sends as text with every request.

`prefixes.py` finds the ids that were fed and generated before, so that only the new part is read.
Sessions made here have no file: the client keeps the conversation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvchat.chat.answer_memory import AnswerMemory
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.keeping import opening_ids
from kvchat.chat.prefixes import Prefixes
from kvchat.chat.reply import Reply
from kvchat.chat.resent_chat import Difference, ResentChat, SeenChats
from kvchat.chat.response_memory import Fed
from kvchat.chat.session import ChatSession
from kvchat.chat.stabiliser import Stabiliser
from kvchat.chat.thinking import Think

# A client that counts has to know how much is too much, but not of any number of messages.
CONTEXTS_COUNTED = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in progress. The owner takes the reply's events and closes the session.

    `difference` says which earlier message the client changed, None if it changed none. `kept` are
    the beginnings of the context to keep on disk: their tokens and for how many seconds. `fed` is
    what the request was, once its answer is remembered.
    """

    session: ChatSession
    reply: Reply
    difference: Difference | None = None
    kept: tuple[tuple[int, float], ...] = ()
    fed: Fed = field(default_factory=Fed)


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

    def ask(
        self, chat: ResentChat, options: AskOptions, notify: Callable[[], None] | None = None
    ) -> Asked:
        """Begin to answer; errors as `ChatSession.ask`."""
        if self._stabiliser is not None:
            chat = self._stabiliser.stabilised(chat)
        session = self._prefixes.opened(chat, options.think)
        difference = self._seen.note(chat.system, chat.messages, chat.tools, chat.moved)
        if difference is not None:
            difference = difference.as_sent(chat)
        last = chat.messages[-1]
        if chat.is_continuation:
            reply = session.continue_answer(options, notify)
        else:
            ready = self._host.ready
            # The engine would refuse it too, but perhaps after a step that takes a while.
            most_ids = ready.context_limit - 1 if ready is not None else None
            reply = session.ask(last.text, options, notify, last.results, most_ids=most_ids)
        return Asked(session, reply, difference, tuple(self._kept_tokens(session, chat)))

    def _kept_tokens(self, session: ChatSession, chat: ResentChat) -> Iterator[tuple[int, float]]:
        """Yield how many tokens each part to keep has, and for how many seconds."""
        path = session.conversation.path()
        for part in chat.kept:
            if part.num_messages:
                num_tokens = sum(len(turn.token_ids) for turn in path[: part.num_messages])
                if part.text is not None and part.num_messages <= len(path):
                    whole = chat.messages[part.num_messages - 1].text
                    ids = path[part.num_messages - 1].token_ids
                    num_tokens -= self._num_behind(ids, whole, part.text)
            else:
                num_tokens = len(opening_ids(self._host.model, session.conversation))
            yield num_tokens, part.ttl_s

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
