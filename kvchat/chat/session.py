"""ChatSession: one conversation with one model that answers it. Ask, retry, continue.

Joins a saved conversation, the text model and the engine; start reading this package here.
`saved_conversation.py` changes and saves it, and `reply.py` decodes answers while they are
generated.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from kvchat.chat import session_file
from kvchat.chat.answer_format import with_grammar
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.messages import MessageNumbers, in_words
from kvchat.chat.moved_kv import move_kv
from kvchat.chat.reply import AnswerLedger, Asking, ContinuedLedger, Ledger, Reply
from kvchat.chat.saved_conversation import SavedConversation
from kvchat.chat.store import SessionLog, SessionStore, new_session_id
from kvchat.chat.thinking import Think, ThinkingSplitter
from kvchat.chat.thinning import budget_thinning
from kvchat.chat.tools import ToolResult, ToolSet
from kvchat.core.errors import KvchatError, UsageError
from kvchat.core.schemas import TEXT
from kvchat.core.text import one_line, whole_number
from kvchat.engine.request import Thinning
from kvchat.engine.thread import EngineThread


class ChatSession(SavedConversation):
    """A saved conversation, and the engine that answers.

    One thread uses a session. Answers arrive through the Reply that `ask` returns.
    """

    def __init__(
        self,
        model: ChatModel,
        engine: EngineThread,
        conversation: Conversation,
        log: SessionLog | None,
        notes: tuple[str, ...] = (),
        answered_by: str = "",
    ) -> None:
        super().__init__(model, conversation, log, notes, answered_by)
        self._engine = engine
        self._has_moved = False

    @classmethod
    def new(
        cls,
        model: ChatModel,
        engine: EngineThread,
        store: SessionStore | None,
        system: str | None = None,
        title: str = "",
        is_one_shot: bool = False,
        created_s: float | None = None,
        tools: ToolSet | None = None,
    ) -> "ChatSession":
        """Begin a conversation; with `store` None it is never written to a file.

        `is_one_shot` if a script begins it, so that it will probably not be continued. `created_s`
        is its time in seconds since the epoch; None is now.
        """
        began_s = time.time() if created_s is None else created_s
        conversation = Conversation(new_session_id(), began_s, system, tools)
        log = store.create(conversation, model.name, is_one_shot) if store is not None else None
        session = cls(model, engine, conversation, log)
        if tools is not None:
            session.save(session_file.tools_line(tools))
        if title:
            session.rename(title)
        return session

    @classmethod
    def open(
        cls, model: ChatModel, engine: EngineThread, store: SessionStore, session_id: str
    ) -> "ChatSession":
        """Open a saved conversation.

        Raises SessionNotFound, or StoreError while another process has it open.
        """
        read, log = store.open(session_id)
        try:
            return cls(model, engine, read.conversation, log, read.notes, read.model)
        except KvchatError:
            log.close()
            raise

    @classmethod
    def fork_of(
        cls,
        model: ChatModel,
        engine: EngineThread,
        store: SessionStore | None,
        original: Conversation,
    ) -> "ChatSession":
        """Begin a conversation as a copy of another one; the original does not change."""
        copy = original.copied(new_session_id())
        log = store.create(copy, model.name) if store is not None else None
        if log is not None:
            log.write(session_file.conversation_lines(copy), durable=True)
        session = cls(model, engine, copy, log)
        session.rename(f"{original.label} (fork)")
        return session

    def move_kv(self, before: list[int]) -> Future[int]:
        """Move KV from the longer context `before` to the present one, for the next answers.

        As `chat.moved_kv.move_kv`.
        """
        self._has_moved = True
        return move_kv(self._engine, before, self.conversation.context_ids(), self.session_id)

    # Asking

    def ask(
        self,
        text: str,
        options: AskOptions,
        notify: Callable[[], None] | None = None,
        results: tuple[ToolResult, ...] = (),
        below: int | None = None,
        most_ids: int | None = None,
    ) -> Reply:
        """Add a user turn below a turn, by default the tip, save it, and start answering it.

        `results` are what the calls of the last answer returned. Raises UsageError for an empty
        message, ContextTooLong for one that no context could hold or with which the prompt has more
        than `most_ids`; nothing is changed then. If the engine refuses it as too long, the tip
        moves back to where it was.
        """
        before = self.conversation.tip_id
        turn = self.add_user_turn(text, below, options.think, results, most_ids)
        return self._answer(turn, options, notify, refused_to=before)

    def continue_text(
        self,
        prompt: str | tuple[int, ...],
        options: AskOptions,
        notify: Callable[[], None] | None = None,
    ) -> Reply:
        """Continue a text, or a context of token ids, without a template, in a new conversation.

        Control tokens in the text are control tokens. Raises UsageError for an empty prompt and for
        ids that the model does not have, ContextTooLong for a text that no context could hold.
        """
        assert not len(self.conversation), "a completion begins a conversation"
        if isinstance(prompt, str):
            self.model.require_fit(prompt)
            ids = tuple(self.model.tokenizer.encode_raw(prompt))
        else:
            ids = prompt
        turn = Turn(
            turn_id=self.conversation.next_turn_id,
            parent_id=ROOT,
            role=Role.USER,
            text=prompt if isinstance(prompt, str) else "",
            token_ids=ids,
            tokenizer=self.model.tokenizer.digest,
            created_s=time.time(),
        )
        if not ids:
            raise UsageError("The prompt is empty.")
        if min(ids) < 0 or self.model.is_stranger(turn):
            raise UsageError("The prompt has token ids that the model does not have.")
        self.conversation.add(turn)
        return self._generate(turn.turn_id, Ledger(self, turn), None, options, notify)

    def retry(self, options: AskOptions, notify: Callable[[], None] | None = None) -> Reply:
        """Answer the last user turn again; earlier answers stay as siblings.

        Where the question was put with another `think`, it is put again, as a sibling. If the
        request ends before its first token, the tip moves back to where it was.
        """
        for turn in reversed(self.conversation.path()):
            if turn.is_message:
                before = self.conversation.tip_id
                turn = self._asked_with(turn, options.think)
                self.move_tip(turn.turn_id)
                return self._answer(turn, options, notify, before)
        raise UsageError("There is nothing to answer again.")

    def _asked_with(self, turn: Turn, think: Think) -> Turn:
        """Return the user turn itself if its ids ask for `think`, else a sibling that does.

        Ids that the template would not write for any setting, such as those of an earlier
        template, stay as they are.
        """
        conversation, model = self.conversation, self.model
        if model.think_of(conversation, turn) is None and not model.is_told(conversation, turn):
            return turn
        wanted = self.model.asking_ids(self.conversation, turn, think)
        for sibling in (turn, *reversed(self.conversation.siblings(turn.turn_id))):
            if sibling.text == turn.text and sibling.token_ids == wanted:
                return sibling
        return self.add_user_turn(turn.text, turn.parent_id, think)

    def continue_answer(
        self, options: AskOptions, notify: Callable[[], None] | None = None
    ) -> Reply:
        """Continue the cut-off answer at the tip from its own ids, in the same turn.

        The reply holds the new part only. A message that was stopped before its answer began is
        answered. Raises UsageError if the tip is neither.
        """
        path = self.conversation.path()
        if path and path[-1].role is Role.USER:
            return self._answer(path[-1], options, notify)
        if not path or not path[-1].is_partial:
            raise UsageError("The last answer is complete.", "/retry answers once more.")
        answer = path[-1]
        splitter = ThinkingSplitter(self._starts_thinking(answer.parent_id))
        said = "".join(p.text for p in splitter.feed(answer.text) if not p.is_thinking)
        ledger = ContinuedLedger(self, self.conversation.turn(answer.parent_id), answer)
        options = with_grammar(options, self.model, self.conversation.tools)
        grammar = options.grammar.begun(said) if options.grammar is not None else None
        options = replace(options, num_samples=1, grammar=grammar)
        return self._generate(answer.turn_id, ledger, splitter.is_thinking, options, notify)

    def ask_aside(
        self,
        text: str,
        options: AskOptions,
        notify: Callable[[], None] | None = None,
        below: int | None = None,
    ) -> Reply:
        """Answer a message below a turn, by default the tip, and store neither of them.

        Its KV is not kept on disk. Raises as `ask` does.
        """
        conversation = self.conversation
        parent = conversation.tip_id if below is None else below
        context = conversation.context_ids(parent)
        system = conversation.system if not context else None
        asked = self.model.user_ids(conversation, parent, text, system, options.think)
        if not asked:
            raise UsageError("The message is empty.", "Type something.")
        return self._ask_unsaved((*context, *asked), options, notify)

    def ask_apart(
        self, text: str, options: AskOptions, notify: Callable[[], None] | None = None
    ) -> Reply:
        """Answer a message without the conversation, and store neither of them."""
        empty = Conversation("", self.conversation.created_s)
        asked = self.model.user_ids(empty, ROOT, text, None, options.think)
        return self._ask_unsaved(tuple(asked), options, notify)

    def _ask_unsaved(
        self, prompt: tuple[int, ...], options: AskOptions, notify: Callable[[], None] | None
    ) -> Reply:
        options = replace(options, num_samples=1, shares_system=False, format=TEXT)
        starts_thinking = self.model.starts_thinking(prompt)
        return self._submit(prompt, AnswerLedger(), starts_thinking, options, notify, False)

    def _answer(
        self,
        user_turn: Turn,
        options: AskOptions,
        notify: Callable[[], None] | None,
        before: int | None = None,
        refused_to: int | None = None,
    ) -> Reply:
        """Answer a user turn; `before` and `refused_to` as for a Ledger."""
        ledger = Ledger(self, user_turn, before, refused_to)
        starts_thinking = self._starts_thinking(user_turn.turn_id)
        return self._generate(user_turn.turn_id, ledger, starts_thinking, options, notify)

    def _starts_thinking(self, turn_id: int) -> bool:
        return self.model.starts_thinking(self.conversation.turn(turn_id).token_ids)

    def _generate(
        self,
        turn_id: int,
        ledger: AnswerLedger,
        starts_thinking: bool | None,
        options: AskOptions,
        notify: Callable[[], None] | None,
    ) -> Reply:
        """Generate what follows the context of a turn, and store it through `ledger`."""
        context = tuple(self.conversation.context_ids(turn_id))
        self._save_adopted(turn_id)
        is_one_shot = options.is_one_shot and self.conversation.is_alone(turn_id)
        has_opening = bool(self.conversation.system or self.conversation.tools)
        is_first = has_opening and len(self.conversation.path(turn_id)) == 1
        options = replace(
            options, is_one_shot=is_one_shot, shares_system=options.shares_system and is_first
        )
        thinning = None
        if options.kv_budget is not None:
            thinning = budget_thinning(
                self.model, self.conversation, turn_id, len(context), options.kv_budget
            )
        return self._submit(context, ledger, starts_thinking, options, notify, thinning=thinning)

    def _submit(
        self,
        context: tuple[int, ...],
        ledger: AnswerLedger,
        starts_thinking: bool | None,
        options: AskOptions,
        notify: Callable[[], None] | None,
        is_kept: bool = True,
        thinning: Thinning | None = None,
    ) -> Reply:
        tools = self.conversation.tools
        options = with_grammar(options, self.model, tools)
        asking = Asking(self.model, context, options, starts_thinking, tools)
        scored_context = context if options.scores_prompt else ()
        reply = Reply(ledger, asking.decodings(), notify, scored_context=scored_context)
        session_id = self.session_id if self.is_saved and is_kept else ""
        spec = asking.spec(session_id, is_kept)
        if options.shares_system:
            spec = replace(spec, num_shared=len(self.model.opening_ids(self.conversation)))
        if self._has_moved:
            spec = replace(spec, moved_under=self.session_id)
        if thinning is not None:
            spec = replace(spec, thinning=thinning)
        ticket = self._engine.submit(spec, reply.listen)
        reply.on_cancel(lambda reason: self._engine.cancel(ticket, reason))
        return reply


# The next message goes below the tip, or takes the place of the message that is being edited.
# Moving deletes nothing: all turns stay in the tree.


class Place:
    """The place in the tree of one session, which is None before the first message.

    edited   the turn that the next message replaces, None if it replaces none
    undone   the tips that `redo` goes back to, the next one last
    copied_from   the id of the session that this one was begun as a copy of, in this process
    """

    def __init__(
        self, session: ChatSession | None, edited: Turn | None = None, undone: tuple[int, ...] = ()
    ) -> None:
        self.session = session
        self.edited = edited
        self._undone = list(undone)
        self.copied_from: str | None = None

    def reopened(self, session: ChatSession) -> "Place":
        """Return the same place in a session that was opened again from the same file."""
        return Place(session, self.edited, tuple(self._undone))

    @property
    def conversation(self) -> Conversation | None:
        return self.session.conversation if self.session is not None else None

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

    @property
    def parent_id(self) -> int:
        """The turn that the next message goes below."""
        if self.edited is not None:
            return self.edited.parent_id
        return self.conversation.tip_id if self.conversation is not None else ROOT

    @property
    def user_turns(self) -> list[Turn]:
        """The user's messages on the path to the tip; `MessageNumbers` numbers them."""
        path = self.conversation.path() if self.conversation is not None else []
        return [turn for turn in path if turn.is_message]

    @property
    def branch(self) -> tuple[int, int] | None:
        """The tip's number among its siblings and their count, None if it has no sibling."""
        if self.conversation is None or self.conversation.tip_id == ROOT:
            return None
        siblings = [turn.turn_id for turn in self.conversation.siblings(self.conversation.tip_id)]
        if len(siblings) < 2:
            return None
        return siblings.index(self.conversation.tip_id) + 1, len(siblings)

    @property
    def num_answers(self) -> int:
        """How many answers the last message of the path has."""
        turns = self.user_turns
        if not turns or self.conversation is None:
            return 0
        below = self.conversation.children(turns[-1].turn_id)
        return sum(turn.role is Role.ASSISTANT for turn in below)

    @property
    def editing(self) -> str:
        """Which message the next one replaces, as text for the toolbar; "" for none."""
        if self.edited is None or self.conversation is None:
            return ""
        return f"editing {MessageNumbers(self.conversation).of(self.edited)}"

    def user_turn(self, number: str) -> Turn:
        """Return the message on the path with this number; the last one for "".

        Raises UsageError for a number that is not one of the path.
        """
        turns = self.user_turns
        if not turns or self.conversation is None:
            if self.conversation is not None and len(self.conversation):
                raise UsageError("No message is before this place.", "/redo or /switch goes on.")
            raise UsageError("There is no message yet.")
        if not number:
            return turns[-1]
        numbers = MessageNumbers(self.conversation)
        wanted = whole_number(number)
        if wanted is not None:
            for turn in turns:
                if numbers.of(turn) == wanted:
                    return turn
            if numbers.find(wanted) is not None:
                raise UsageError(
                    f"Message {wanted} is on another branch.", f"/switch {wanted} goes there."
                )
        known = in_words([numbers.of(turn) for turn in turns])
        said = one_line(number, 20)
        raise UsageError(f"{said} is no message; on this branch they are numbered {known}.")

    # Moving

    def reset(self) -> None:
        """Edit no message any more, and let `redo` go back to no tip."""
        self.edited = None
        self.drop_undone()

    def drop_undone(self) -> None:
        """Let `redo` go back to no tip."""
        self._undone.clear()

    def move(self, turn_id: int) -> None:
        """Make another turn the tip."""
        self.reset()
        self.require_session().move_tip(turn_id)

    def undo(self, count: int = 1) -> list[Turn]:
        """Move the tip back by as many messages as there are, `count` at most; `redo` reverts it.

        Returns these messages; the last of them is now the next one. None at the beginning.
        """
        session = self.require_session()
        tip = session.conversation.tip_id
        self.edited = None
        undone: list[Turn] = []
        while len(undone) < count and (turn := session.undo()) is not None:
            undone.append(turn)
        if undone:
            self._undone.append(tip)
        return undone

    def redo(self) -> bool:
        """Revert the last undo, or else move the tip down to the newest next answer.

        Returns false if there is nothing below the tip.
        """
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
        """Make the next or previous sibling answer the tip; None where there is none."""
        branch = self.branch
        if branch is None or self.conversation is None:
            return None
        number, count = branch
        if not 1 <= number + step <= count:
            return None
        turn = self.conversation.siblings(self.conversation.tip_id)[number - 1 + step]
        self.move(turn.turn_id)
        return turn

    def forget(self, turn_id: int) -> None:
        """Remove a turn and all turns below it permanently. Raises StoreError."""
        self.require_session().forget(turn_id)
        self.reset()

    def set_system(self, system: str | None) -> None:
        """Move to the same place under another system prompt; nothing before the first message.

        Undone turns stay on the old prompt's branch and `redo` does not reach them. A message being
        edited becomes its copy under the new prompt.
        """
        if self.session is None:
            return
        before = self.user_turns
        self.session.set_system(system)
        self.drop_undone()
        if self.edited is not None:
            number = before.index(self.edited) if self.edited in before else None
            self.edited = self.user_turns[number] if number is not None else None


def _further_on(conversation: Conversation, turn_id: int) -> Turn | None:
    """Return the newest child of a turn; of ROOT, only a child with the current system prompt."""
    below = [
        turn
        for turn in conversation.children(turn_id)
        if turn_id != ROOT or turn.system == conversation.system
    ]
    return below[-1] if below else None
