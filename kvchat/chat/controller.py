"""ChatController: the open conversation, its model, and the operations on them.

Slash commands and keys call it. `Place` of `session.py` moves between the turns.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvchat.chat import session_file
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.attachment import (
    Attached,
    PinFiles,
    mentioned_files,
    mentioned_pins,
    read_attachment,
    split_attached,
)
from kvchat.chat.chat_model import readopt
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.conversation_settings import ConversationSettings
from kvchat.chat.deletion import SavedPlaces
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import PATIENCE_AFTER_LOADING_S, ChatHost, EngineQueries
from kvchat.chat.reply import Reply
from kvchat.chat.session import ChatSession, Place
from kvchat.chat.surroundings import Surroundings
from kvchat.chat.text_codec import Segment
from kvchat.chat.tools import ToolResult, ToolSet
from kvchat.chat.why import (
    NOT_WORTH_MENTIONING,
    Reuse,
    Times,
    cached_ids,
    cause,
    explain,
    is_as_expected,
    reuse_of,
)
from kvchat.core.errors import KvchatError, StoreError, UsageError
from kvchat.core.events import LoadEvent
from kvchat.core.stats import Cost
from kvchat.core.text import one_line
from kvchat.core.types import MissReason

if TYPE_CHECKING:
    from kvchat.cache.disk.admin import StoreAdmin

# Starts loading a model by its name; load events go to the listener. The last argument is what a
# conversation with the model was saved with, None for the settings of this process.
NewHost = Callable[[str, Callable[[LoadEvent], None], Mapping[str, Any] | None], ChatHost]


class ChatController:
    """One conversation at a time. `session` is None until the first message creates one.

    place      where in the conversation the next message goes
    attached   files to put before the next message
    engine     queries to the host's engine, but for answers
    has_lost   whether a conversation was left that could not be saved whole
    kept       maintenance of the KV on disk, None where no KV is kept on disk
    tools      the tools that new conversations offer to the model, None for none
    pins       the files of pins, which can be attached by the pin's name
    places     every place that has something of saved conversations, for deleting them
    settings   what holds in every conversation: ConversationSettings explains the arguments
    surroundings   models, presets and the project of the directory
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
        kept: "StoreAdmin | None" = None,
        tools: ToolSet | None = None,
        pins: PinFiles | None = None,
        places: SavedPlaces | None = None,
        given: Mapping[str, Any] | None = None,
        keeps_model: bool = False,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.surroundings = surroundings or Surroundings()
        self.places = places if places is not None else SavedPlaces(host.store, kept)
        self.pins = pins if pins is not None else PinFiles(None)
        self.host = host
        self.engine = EngineQueries(host, kept)
        self.new_host = new_host
        self.place = Place(session)
        self.settings = ConversationSettings(options, dict(given or {}), keeps_model)
        opened = self.settings.options(session.conversation if session is not None else None)
        self.options = opened.for_model(host.model.sampling_defaults)
        self.system = system
        self.title = title
        self.attached = attached
        self.kept = kept
        self.tools = tools
        self.has_lost = False
        self.last: AnswerEnded | None = None
        self._last_session_id = ""
        self._held: tuple[int, tuple[ToolResult, ...]] = (ROOT, ())
        self._asked = ("", ROOT)  # the session and the turn of the last new message
        host.thin_beginnings(self.pins.thinned.of_model(host.model.name))

    # State
    @property
    def session(self) -> ChatSession | None:
        return self.place.session

    @property
    def conversation(self) -> Conversation | None:
        return self.place.conversation

    @property
    def label(self) -> str:
        """The conversation's title, or else the beginning of its first message."""
        return self.conversation.label if self.conversation is not None else self.title

    @property
    def context_ids(self) -> list[int]:
        return self.conversation.context_ids() if self.conversation is not None else []

    @property
    def is_unanswered(self) -> bool:
        """Whether the last message on the branch has no answer yet."""
        path = self.conversation.path() if self.conversation is not None else []
        return bool(path) and path[-1].role is Role.USER

    @property
    def think_problem(self) -> str | None:
        """One sentence if the model's template ignores the user's `think`, else None."""
        return self.host.model.think_problem(self.options.think)

    def require_conversation(self) -> Conversation:
        """Return the conversation; raises UsageError while it is empty."""
        return self.place.require_conversation()

    def require_session(self) -> ChatSession:
        """Return the session; raises UsageError before the first message."""
        return self.place.require_session()

    def take_options(self, options: AskOptions) -> None:
        """Generate answers so from now on; whether tools may be called stays as it is."""
        own = options.for_model(self.host.model.sampling_defaults)
        self.options = replace(own, max_calls=self.options.max_calls)

    # Asking

    def attach(self, file: Attached) -> int:
        """Put a file before the next message, unless it is there; return its number of tokens.

        Raises UsageError for a file that does not fit in the context.
        """
        text, model = file.text, self.host.model
        is_huge, limit = model.tokenizer.exceeds(text, model.max_context), self.host.context_limit
        num_tokens = self.num_tokens(text) if not is_huge else 0
        if is_huge or num_tokens > limit:
            size = f"{len(text):,} characters" if is_huge else f"{num_tokens:,} tokens"
            raise UsageError(
                f"{file.name} has {size}, and the model's context holds {limit:,} tokens.",
                "Attach a part of it.",
            )
        if file not in self.attached:
            self.attached = (*self.attached, file)
        return num_tokens

    def attach_pin(self, label: str) -> tuple[int, str]:
        """Put all files of a pin before the next message, or none of them.

        Returns their number of tokens, and a sentence on those that changed since, "" for none.
        Raises UsageError as `attach` does.
        """
        before, paths, note = self.attached, self.pins.paths()[label], self.pins.check(label)
        try:
            return sum(self.attach(read_attachment(path)) for path in paths), note
        except UsageError:
            self.attached = before
            raise

    def attach_mentioned(self, text: str) -> list[str]:
        """Put the files and pins that a message mentions before it.

        Returns sentences on pinned files that changed since, and on what is no text in a file.
        Raises UsageError as `attach` does.
        """
        before, pins = self.attached, self.pins.paths()
        notes = [self.pins.check(label) for label in mentioned_pins(text, pins)]
        for path in mentioned_files(text, pins):
            self.attach(read_attachment(path))
        notes += [file.note for file in self.attached if file not in before]
        return [note for note in notes if note]

    def ask(self, text: str, notify: Callable[[], None] | None = None) -> Reply:
        """Send a message with the attached files; if a turn is being edited, replace that turn.

        `notify` is called on the engine's thread when the reply has events. A message that is
        refused, which raises, leaves everything as it was. ContextTooLong is raised where the
        context's limit is known; until the model is loaded, the reply has it.
        """
        is_new = self.session is None
        session = self._ensure_session()
        if not len(session.conversation) and self._is_other(session.conversation.tools):
            session.set_tools(self.tools)  # it was begun before they had started
        session.save_settings(
            self.settings.to_save(session.conversation, self.options, self.host.settings)
        )
        title = self._title_for(session, text)
        place, held = self.place.parent_id, self.held_results
        try:
            reply = session.ask(
                self._with_files(text), self.options, notify, held, place, self._most_ids
            )
        except KvchatError:
            if is_new:
                self._discard()
            raise
        self._asked = (session.session_id, session.conversation.tip_id)
        if title:
            session.rename(title)
        self.place.reset()
        self.attached = ()
        return reply

    def _with_files(self, text: str) -> str:
        """Return a message with the attached files before it."""
        return "".join(f"{file.text}\n" for file in self.attached) + text

    @property
    def held_results(self) -> tuple[ToolResult, ...]:
        """The results that go with the next message."""
        below, results = self._held
        return results if self.place.parent_id == below else ()

    def num_next_tokens(self, text: str | None, results: tuple[ToolResult, ...] = ()) -> int:
        """Return how many tokens a message would add to the context, or `results` without one.

        Nothing is added where the last answer is continued: `text` is None, and there are none.
        Raises ContextTooLong for a message that no context could hold.
        """
        if text is None and not results:
            return 0
        whole, given = (self._with_files(text), self.held_results) if text is not None else ("", ())
        conversation, parent = self.require_conversation(), self.place.parent_id
        ids = self.host.model.user_ids(
            conversation, parent, whole, None, self.options.think, results=results or given
        )
        return len(ids)

    def keep_waiting(self, texts: Sequence[str]) -> bool:
        """Save the messages that wait to be sent; false where nothing is saved.

        They begin a conversation where none is open; without any, one in which nothing was said is
        let go of. Raises StoreError if the conversation's file cannot be made.
        """
        if self.host.store is None:
            return False
        if texts or (self.conversation is not None and len(self.conversation)):
            self._ensure_session().save(session_file.waiting_line(texts), durable=True)
        elif self.session is not None:
            self._discard()
        return True

    def take_waiting(self) -> tuple[str, ...]:
        """Return, once, the messages that waited when the conversation was open before."""
        if self.conversation is None:
            return ()
        waiting, self.conversation.waiting = self.conversation.waiting, ()
        return waiting

    def give_results(
        self, results: tuple[ToolResult, ...], notify: Callable[[], None] | None = None
    ) -> Reply:
        """Answer the results of the last answer's calls."""
        return self.require_session().ask("", self.options, notify, results)

    def hold_results(self, results: tuple[ToolResult, ...]) -> None:
        """Keep the results of the last answer's calls for the message that follows it."""
        self._held = (self.require_conversation().tip_id, results)

    @property
    def has_other_tools(self) -> bool:
        """Whether the open conversation began with other tools than those offered now."""
        chat = self.conversation
        return chat is not None and len(chat) > 0 and self._is_other(chat.tools)

    def _is_other(self, tools: ToolSet | None) -> bool:
        """Whether these are other tools than those offered now."""
        before, now = (each.text if each is not None else "" for each in (tools, self.tools))
        return before != now

    def ids_with_tools(self, tools: ToolSet | None) -> list[int]:
        """Return the token ids of the context with other tools at its beginning."""

        def first(conversation: Conversation, turn: Turn) -> Sequence[int]:
            empty = Conversation("", conversation.created_s, tools=tools)
            return self.host.model.user_ids(empty, ROOT, turn.text, turn.system)

        return self._ids_with(first)

    def ids_with_system(self, system: str | None) -> list[int]:
        """Return the token ids of the context under another system prompt."""
        model = self.host.model
        return self._ids_with(lambda chat, turn: model.ids_with_system(chat, turn, system))

    def _ids_with(self, first: Callable[[Conversation, Turn], Sequence[int]]) -> list[int]:
        """Return the context with the ids that `first` gives its first turn, none without."""
        conversation = self.conversation
        if conversation is None or not (path := conversation.path()):
            return []
        rest = (token for turn in path[1:] for token in turn.token_ids)
        return [*first(conversation, path[0]), *rest]

    def set_tools(self, tools: ToolSet | None) -> None:
        """Offer other tools in this and in later conversations."""
        self.tools = tools
        self.options = replace(self.options, max_calls=None if tools else 0)
        if self.session is not None and self.has_other_tools:
            self.session.set_tools(tools)
            self.place.reset()

    def retry(self, options: AskOptions, notify: Callable[[], None] | None = None) -> Reply:
        """Answer the last message once more."""
        self._asked = ("", ROOT)
        self.place.drop_undone()
        return self.require_session().retry(options, notify)

    def continue_answer(self, notify: Callable[[], None] | None = None) -> Reply:
        """Continue the last answer from where it was cut off."""
        self._asked = ("", ROOT)
        return self.require_session().continue_answer(self.options, notify)

    def ask_aside(self, text: str, notify: Callable[[], None] | None = None) -> Reply:
        """Answer a message in the conversation's context; neither joins the conversation."""
        return self.require_session().ask_aside(text, self.options, notify)

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text as it stands."""
        return len(self.host.model.tokenizer.encode([Segment(text, is_inert=True)]))

    def note_ended(self, ended: AnswerEnded) -> None:
        """Remember a finished answer, for `why` and for the statistics; not that of an aside."""
        if ended.turn_id == ROOT:
            return
        self.last = ended
        self._last_session_id = self.session.session_id if self.session is not None else ""

    def why(self) -> list[str]:
        """Return lines on how much of the last context was cached, and why the rest was computed.

        Raises UsageError before the first answer.
        """
        last = self.last
        reuse = self._reuse(last) if last is not None else None
        if last is None or reuse is None:
            path = self.conversation.path() if self.conversation is not None else []
            has_answers = any(turn.role is Role.ASSISTANT for turn in path)
            since = "since this conversation was opened" if has_answers else "here yet"
            raise UsageError(f"Nothing has been answered {since}.", "Send a message first.")
        return explain(reuse, self.host.model.tokenizer.decode)

    def why_so_much(self, ended: AnswerEnded) -> str:
        """Return in a few words why more than the new turn was prefilled; "" if no more was.

        `ended` must have been passed to `note_ended`.
        """
        if ended.usage.prefilled_tokens < NOT_WORTH_MENTIONING:
            return ""
        conversation = self.conversation
        with suppress(KeyError):  # the user may have removed the turn meanwhile
            if conversation is None or conversation.turn(ended.turn_id).role is not Role.ASSISTANT:
                return ""
            cached = cached_ids(conversation, ended.turn_id, ended.usage)
            if is_as_expected(conversation, ended.turn_id, cached):
                return ""
        if ended.miss_reason is MissReason.NOT_TOLD:
            return ""
        reuse = self._reuse(ended)
        return cause(reuse) if reuse is not None else ""

    def _reuse(self, ended: AnswerEnded) -> Reuse | None:
        conversation = self.conversation
        if conversation is None or conversation.session_id != self._last_session_id:
            return None
        with suppress(KeyError):  # as above
            cleared_s = self.kept.cleared_s() if self.kept is not None else 0.0
            times = Times(self.host.began_s, cleared_s)
            cached = cached_ids(conversation, ended.turn_id, ended.usage)
            reuse = reuse_of(conversation, ended.turn_id, cached, ended.miss_reason, times)
            reuse = replace(reuse, num_unread=min(ended.usage.unread_tokens, len(reuse.ids)))
            reuse = replace(reuse, miss_reason=self._why_changed(reuse) or reuse.miss_reason)
            if reuse.miss_reason is MissReason.NEVER_WRITTEN and self._is_original_open():
                return replace(reuse, miss_reason=MissReason.OPEN_ELSEWHERE)
            return reuse
        return None

    def _is_original_open(self) -> bool:
        """Whether the conversation is a copy of one that another kvchat has open."""
        store, original = self.host.store, self.place.copied_from
        return store is not None and original is not None and bool(store.open_elsewhere([original]))

    def _why_changed(self, reuse: Reuse) -> MissReason | None:
        """Return what changed about the model's run since its KV was kept; None if nothing did."""
        ready = self.host.ready
        may_be = reuse.miss_reason in (MissReason.NEVER_WRITTEN, MissReason.OTHER_MODEL)
        if not (may_be and reuse.num_lost) or self.kept is None or ready is None:
            return None
        return self.kept.why_changed(ready, reuse.ids, reuse.cached.total)

    @property
    def _most_ids(self) -> int | None:
        """The most ids of a prompt; None if it is not known, or another limit than the model's."""
        ready = self.host.ready
        if ready is None or ready.sent_as or ready.context_limit != self.host.model.max_context:
            return None
        return ready.context_limit - 1

    def _title_for(self, session: ChatSession, text: str) -> str:
        """Return the message after a file that begins a conversation, which is its title, or ""."""
        is_new = not len(session.conversation) and not session.conversation.title
        return one_line(text, 60) if self.attached and is_new and text.strip() else ""

    def drop_refused(self, is_given_back: bool = False) -> None:
        """Let go of a conversation, and of its file, in which every message was refused.

        Of another one remove the last new message, which was refused as too long and would keep its
        number, if the user `is_given_back` its text. No model has read one while none is loaded.
        """
        conversation, (asked_in, asked) = self.conversation, self._asked
        self._asked = ("", ROOT)
        if conversation is None:
            return
        is_asked = (asked_in, asked) == (conversation.session_id, conversation.tip_id)
        if is_asked and self.host.ready is None:
            self.require_session().move_tip(conversation.turn(asked).parent_id)
        is_empty = all(turn.is_message for turn in conversation.turns())
        if conversation.tip_id == ROOT and is_empty:
            self._discard()
        elif is_given_back and conversation.session_id == asked_in and conversation.tip_id != asked:
            self.require_session().drop_leaf(asked)

    def take_back(self) -> str:
        """Return the last new message, which no model was there to read, and let go of it.

        "" if there is none, or if it is saved with files, which it would lose: then it stays.
        """
        conversation, asked = self.conversation, self._asked
        if conversation is None or asked != (conversation.session_id, conversation.tip_id):
            return ""
        files, words = split_attached(conversation.turn(conversation.tip_id).text)
        if files and self.host.store is not None:
            return ""
        self.drop_refused(is_given_back=True)
        return words

    def _discard(self) -> None:
        session, self.place = self.session, Place(None)
        if session is not None:
            session.discard()

    def _ensure_session(self) -> ChatSession:
        if self.session is not None:
            return self.session
        one_shot = self.options.is_one_shot
        session = self.host.new_session(self.system, self.title, one_shot, self.tools)
        self.place = Place(session)
        return session

    # Conversations

    def begin_new(self, title: str = "") -> str | None:
        """Close the conversation and drop attached files; the next message begins a new one.

        Returns None, or a sentence on what could not be saved.
        """
        problem = self._leave()
        self.attached = ()
        self.title = title
        return problem

    def open(self, session_id: str) -> ChatSession:
        """Open a saved conversation; if that fails, the current one stays open.

        Raises SessionNotFound or StoreError.
        """
        if self.session is not None and self.session.session_id == session_id:
            return self.session
        session = self.host.open_session(session_id)
        self._enter(session)
        return session

    def open_with(self, host: ChatHost, session_id: str) -> ChatHost:
        """Open a saved conversation with another, loaded model; return the old host to close.

        Raises SessionNotFound or StoreError, and changes nothing.
        """
        session, old = host.open_session(session_id), self.host
        self._take(host)
        self._enter(session)
        return old

    def _enter(self, session: ChatSession) -> None:
        """Replace the open session by one that goes on with settings of its own."""
        self._exchange(session)
        self.take_options(self.settings.options(session.conversation))

    def fork(self, title: str = "") -> ChatSession:
        """Copy the conversation and make the copy the open one."""
        session = self.host.fork_session(self.require_conversation())
        if title:
            session.rename(title)
        original = self.require_session().session_id
        self._exchange(session)
        self.place.copied_from = original
        return session

    def _exchange(self, session: ChatSession) -> None:
        """Replace the open session; the new one's notes say what the old one could not save."""
        if (problem := self._leave()) is not None:
            session.notes = (*session.notes, problem)
        self.place = Place(session)

    def _leave(self) -> str | None:
        """Close a conversation that is to be kept; return None or what could not be saved."""
        problem = self.close_session()
        self.has_lost |= problem is not None
        return problem

    async def cost_with(self, host: ChatHost) -> Cost | None:
        """Return what the next message costs with another, loaded model; None if nothing is said
        yet, or while that cannot be known.
        """
        if self.conversation is None:
            return None
        conversation = copy.deepcopy(self.conversation)
        await asyncio.to_thread(readopt, conversation, host.model)
        engine = EngineQueries(host, patience_s=PATIENCE_AFTER_LOADING_S)
        return await engine.cost(conversation.context_ids())

    def change_host(self, host: ChatHost) -> ChatHost:
        """Switch to another model, which is loaded; return the old host, for the caller to close.

        The new host reads the conversation from its file. Raises StoreError, and changes nothing,
        if the file is not complete. Sampling values that the user did not choose become the new
        model's defaults.
        """
        old, session = self.host, self.session
        if session is not None:
            session.complete()
            session.close()
            try:
                self.place = self.place.reopened(_reopened(host, session))
            except KvchatError:
                self.place = self.place.reopened(_reopened(old, session))
                raise
        self._take(host)
        return old

    def _take(self, host: ChatHost) -> None:
        self.host, self.options = host, self.options.for_model(host.model.sampling_defaults)
        self.last = None  # its figures are the other model's
        self.engine.change_host(host)
        host.thin_beginnings(self.pins.thinned.of_model(host.model.name))

    def saving_problem(self) -> str | None:
        """Try again to save what is not saved; return None or a sentence on why it cannot be."""
        try:
            if self.session is not None:
                self.session.complete()
        except StoreError as error:
            return error.message
        return None

    def close_session(self) -> str | None:
        """Close the conversation's file; return None or a sentence on what could not be saved."""
        problem = self.session.close() if self.session is not None else None
        self.place = Place(None)
        return problem

    def set_system(self, system: str | None) -> None:
        """Use another system prompt for this and later messages."""
        self.system = system
        self.place.set_system(system)


def _reopened(host: ChatHost, session: ChatSession) -> ChatSession:
    """Open a conversation again with a host's model; an unsaved one is copied instead."""
    if host.store is None:
        copy = host.fork_session(session.conversation)
        copy.rename(session.conversation.title)
        return copy
    return host.open_session(session.session_id)
