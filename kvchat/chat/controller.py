"""ChatController: the open conversation, the model it is with, and what can be done to them.

Commands and keys act through it. Moving about loses nothing: turns stay in their tree. What the
engine is asked beside answers is `engine_queries.py`'s. Draws nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.attachment import Attached, read_attachment
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.engine_queries import EngineQueries
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.reply import Reply
from kvchat.chat.session import ChatSession
from kvchat.chat.tokenizer import Segment
from kvchat.chat.why import Reuse, beside_earlier, cause, earlier, explain, is_as_expected, reuse_of
from kvchat.core.errors import KvchatError, UsageError
from kvchat.core.events import LoadEvent
from kvchat.core.stats import KeptPack, ModelDirStatus, StoreStatus, Verified
from kvchat.core.text import one_line, whole_number


class KeptKv(Protocol):
    """What looks after the store of KV. Any thread may use it; it raises StoreError."""

    @property
    def directory(self) -> Path:
        """Where the store is."""

    def status(self) -> StoreStatus:
        """Return what it holds."""

    def num_bytes(self) -> int:
        """Return how many bytes it takes: as `status` says, and sooner."""

    def tree(self) -> list[tuple[ModelDirStatus, list[KeptPack]]]:
        """Return every pack."""

    def verify(self, goes_on: Callable[[], bool]) -> Verified:
        """Read every pack while `goes_on`; forget what is damaged."""

    def gc(self) -> int:
        """Remove what is out of date or too much; return its bytes."""

    def clear(self) -> int:
        """Delete everything; return its bytes."""

    def unpin(self, label: str) -> int:
        """Remove the pins of a label; return how many there were."""

    def forget(
        self, contexts: Iterable[Sequence[int]], shared: Iterable[Sequence[int]], label: str = ""
    ) -> int:
        """Remove contexts, and a pin, but nothing that is shared; return how many blocks went."""


# Begins loading a model by its name; what it has to say about that goes to the listener.
NewHost = Callable[[str, Callable[[LoadEvent], None]], ChatHost]


class ChatController:
    """One conversation at a time. `session` is None until the first message makes one.

    `attached` goes before the next message; `edited` is the turn it will stand in for. `engine` is
    asked how things stand. `kept` looks after the KV that outlives the chat, None where nothing
    does.
    """

    def __init__(
        self,
        host: ChatHost,
        new_host: NewHost,
        session: ChatSession | None,
        options: AskOptions,
        system: str | None = None,
        title: str = "",
        attached: tuple[Attached, ...] = (),
        kept: KeptKv | None = None,
    ) -> None:
        self.host = host
        self.engine = EngineQueries(host)
        self.new_host = new_host
        self.session = session
        self.options = options
        self.system = system
        self.title = title
        self.attached = attached
        self.kept = kept
        self.edited: Turn | None = None
        self.last: AnswerEnded | None = None
        self._last_session_id = ""
        self._undone: list[int] = []

    # What there is

    @property
    def conversation(self) -> Conversation | None:
        return self.session.conversation if self.session is not None else None

    @property
    def label(self) -> str:
        """The conversation's title, or what stands in for it."""
        return self.conversation.label if self.conversation is not None else self.title

    @property
    def user_turns(self) -> list[Turn]:
        """The user's messages on the way to the tip; people count them from one."""
        path = self.conversation.path() if self.conversation is not None else []
        return [turn for turn in path if turn.role is Role.USER]

    @property
    def context_ids(self) -> list[int]:
        return self.conversation.context_ids() if self.conversation is not None else []

    @property
    def branch(self) -> tuple[int, int] | None:
        """Which answer the tip is and of how many, None where there is one."""
        if self.conversation is None or self.conversation.tip_id == ROOT:
            return None
        siblings = [turn.turn_id for turn in self.conversation.siblings(self.conversation.tip_id)]
        if len(siblings) < 2:
            return None
        return siblings.index(self.conversation.tip_id) + 1, len(siblings)

    @property
    def editing(self) -> str:
        """Which message the next one will stand in for, in words."""
        turns = self.user_turns
        return f"editing {turns.index(self.edited) + 1}" if self.edited in turns else ""

    def require_conversation(self) -> Conversation:
        """Return the conversation; raises UsageError while it is empty."""
        if self.conversation is None or not len(self.conversation):
            raise UsageError("The conversation is empty.")
        return self.conversation

    def require_session(self) -> ChatSession:
        """Return the session; raises UsageError before the first message."""
        self.require_conversation()
        assert self.session is not None
        return self.session

    def user_turn(self, number: str) -> Turn:
        """Return the user's n-th message on the path, without a number the last."""
        turns = self.user_turns
        if not turns:
            raise UsageError("There is no message yet.")
        if not number:
            return turns[-1]
        index = whole_number(number)
        if index is None or not 1 <= index <= len(turns):
            said = one_line(number, 20)
            raise UsageError(f"{said} is no message; they are numbered 1 to {len(turns)}.")
        return turns[index - 1]

    # Asking

    def attach(self, path: Path) -> int:
        """Put a file before the next message; return its tokens. Raises UsageError."""
        text = read_attachment(path)
        model = self.host.model
        if model.tokenizer.exceeds(text, model.max_context):
            raise UsageError(
                f"{path} has {len(text):,} characters, which are more than twice the "
                f"{model.max_context:,} tokens that the model's context holds.",
                "Attach a part of it.",
            )
        num_tokens = len(model.tokenizer.encode([Segment(text, is_inert=True)]))
        limit = self.host.ready.context_limit if self.host.ready is not None else num_tokens
        if num_tokens > limit:
            raise UsageError(
                f"{path} has {num_tokens:,} tokens, and the model's context holds {limit:,}.",
                "Attach a part of it.",
            )
        self.attached = (*self.attached, Attached(path.name, text))
        return num_tokens

    def ask(self, text: str, notify: Callable[[], None] | None = None) -> Reply:
        """Send a message with what is attached; where a turn is being edited, in its place."""
        session = self._ensure_session()
        whole = "".join(f"{file.text}\n" for file in self.attached) + text
        self._name(session, text)
        edited = self.edited
        if edited is not None:
            session.move_tip(edited.parent_id)
        reply = session.ask(whole, self.options, notify)
        self.edited = None
        self.attached = ()
        self._undone.clear()
        return reply

    def retry(self, options: AskOptions, notify: Callable[[], None] | None = None) -> Reply:
        """Answer the last message once more."""
        self._undone.clear()
        return self.require_session().retry(options, notify)

    def continue_answer(self, notify: Callable[[], None] | None = None) -> Reply:
        """Go on with the last answer where it was cut off."""
        return self.require_session().continue_answer(self.options, notify)

    def note_ended(self, ended: AnswerEnded) -> None:
        """Remember an answer that was heard to its end, for whoever asks about it."""
        self.last = ended
        self._last_session_id = self.session.session_id if self.session is not None else ""
        self.engine.note_ended(ended)

    def why(self) -> list[str]:
        """Return how much of the last context was there, and what cost the rest, line by line.

        Raises UsageError before the first answer.
        """
        last = self.last
        reuse = self._reuse(last) if last is not None else None
        if last is None or reuse is None:
            raise UsageError("Nothing has been answered here yet.")
        if not reuse.before:
            [begun, *_] = self.require_conversation().path(last.turn_id)
            others = earlier(self.host.store, self._last_session_id)
            reuse = beside_earlier(reuse, begun, self.host.model, others)
        return explain(reuse, self.host.model.tokenizer.decode)

    def why_so_much(self, ended: AnswerEnded) -> str:
        """Return in a few words why more was read than what is new; "" where nothing was.

        Of an answer that was noted.
        """
        conversation = self.conversation
        with suppress(KeyError):  # it may have been forgotten meanwhile
            if conversation is None or conversation.turn(ended.turn_id).role is not Role.ASSISTANT:
                return ""
            if is_as_expected(conversation, ended.turn_id, ended.usage.cached):
                return ""
        reuse = self._reuse(ended)
        return cause(reuse) if reuse is not None else ""

    def _reuse(self, ended: AnswerEnded) -> Reuse | None:
        conversation = self.conversation
        if conversation is None or conversation.session_id != self._last_session_id:
            return None
        with suppress(KeyError):  # as above
            return reuse_of(conversation, ended.turn_id, ended.usage.cached, ended.miss_reason)
        return None

    def _name(self, session: ChatSession, text: str) -> None:
        """A conversation that begins with a file is called after the message, not the file."""
        is_new = not len(session.conversation) and not session.conversation.title
        if self.attached and is_new and text.strip():
            session.rename(one_line(text, 60))

    def _ensure_session(self) -> ChatSession:
        if self.session is None:
            self.session = self.host.new_session(self.system, self.title)
        return self.session

    # Conversations

    def begin_new(self, title: str = "") -> str | None:
        """Put the conversation away, and what was attached; the next message begins another.

        Returns a sentence on what of it could not be saved.
        """
        problem = self.close_session()
        self.attached = ()
        self.title = title
        return problem

    def open(self, session_id: str) -> ChatSession:
        """Go on with a saved conversation; the one that is open stays so if that fails."""
        if self.session is not None and self.session.session_id == session_id:
            return self.session
        session = self.host.open_session(session_id)
        self._exchange(session)
        return session

    def fork(self, title: str = "") -> ChatSession:
        """Go on in a copy of the conversation."""
        session = self.host.fork_session(self.require_conversation())
        if title:
            session.rename(title)
        self._exchange(session)
        return session

    def _exchange(self, session: ChatSession) -> None:
        """Put another in the place of the session; its notes say what of the last is not saved."""
        if (problem := self.close_session()) is not None:
            session.notes = (*session.notes, problem)
        self.session = session

    def change_host(self, host: ChatHost) -> ChatHost:
        """Go on with another model, which is loaded; return the host to be closed.

        It reads the conversation from its file: raises StoreError, and everything stays as it is,
        where that does not have all of it. Sampling becomes the model's own where nothing else was
        wished.
        """
        old, session = self.host, self.session
        options = self.options.for_model(host.model.sampling_defaults)
        if session is not None:
            session.complete()
            session.close()
            try:
                self.session = _reopened(host, session)
            except KvchatError:
                self.session = _reopened(old, session)
                raise
        self.host, self.options = host, options
        self.engine.change_host(host)
        return old

    def close_session(self) -> str | None:
        """Let go of the conversation's file; return a sentence on what could not be saved."""
        problem = self.session.close() if self.session is not None else None
        self.session = None
        self.edited = None
        self._undone.clear()
        return problem

    # Moving about in the tree

    def move(self, turn_id: int) -> None:
        """Go on from another turn."""
        self.edited = None
        self._undone.clear()
        self.require_session().move_tip(turn_id)

    def undo(self) -> Turn | None:
        """Step back before the last message; return it."""
        session = self.require_session()
        tip = session.conversation.tip_id
        self.edited = None
        turn = session.undo()
        if turn is not None:
            self._undone.append(tip)
        return turn

    def forget(self, turn_id: int) -> None:
        """Remove a turn and all below it, for good."""
        self.require_session().forget(turn_id)
        self.edited = None
        self._undone.clear()

    def redo(self) -> bool:
        """Take back the last undo, or go down to where this branch was left."""
        session = self.require_session()
        conversation = session.conversation
        if self._undone:
            session.move_tip(self._undone.pop())
            return True
        further = _further_on(conversation, conversation.tip_id)
        if further is None:
            return False
        answer = _further_on(conversation, further.turn_id) if further.role is Role.USER else None
        session.move_tip((answer or further).turn_id)
        return True

    def step_sibling(self, step: int) -> Turn | None:
        """Go to the next or previous answer beside the tip; None where there is none."""
        branch = self.branch
        if branch is None or self.conversation is None:
            return None
        number, count = branch
        if not 1 <= number + step <= count:
            return None
        turn = self.conversation.siblings(self.conversation.tip_id)[number - 1 + step]
        self.move(turn.turn_id)
        return turn

    # System prompts

    def ids_with_system(self, system: str | None) -> list[int]:
        """Return the context as it would be under another system prompt."""
        conversation = self.conversation
        path = conversation.path() if conversation is not None else []
        if conversation is None or not path:
            return []
        first = self.host.model.user_ids(conversation, ROOT, path[0].text, system)
        return [*first, *(token for turn in path[1:] for token in turn.token_ids)]

    def set_system(self, system: str | None) -> None:
        """Use another system prompt from here on.

        What was undone is left behind on the old prompt's branch; the message that is being edited
        is the same one under the new prompt.
        """
        self.system = system
        if self.session is None:
            return
        before = self.user_turns
        self.session.set_system(system)
        self._undone.clear()
        if self.edited is not None:
            number = before.index(self.edited) if self.edited in before else None
            self.edited = self.user_turns[number] if number is not None else None


def _further_on(conversation: Conversation, turn_id: int) -> Turn | None:
    """Return the newest turn below another, at the beginning only under the present prompt."""
    below = [
        turn
        for turn in conversation.children(turn_id)
        if turn_id != ROOT or turn.system == conversation.system
    ]
    return below[-1] if below else None


def _reopened(host: ChatHost, session: ChatSession) -> ChatSession:
    """Open a conversation once more with a host's model; an unsaved one goes on as a copy."""
    if host.store is None:
        copy = host.fork_session(session.conversation)
        copy.rename(session.conversation.title)
        return copy
    return host.open_session(session.session_id)
