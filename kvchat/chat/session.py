"""ChatSession: one conversation with one model. Ask, retry, move the tip; each change is saved.

Joins conversation, text model, engine and session file; start reading this package here.
`reply.py` stores answers while they are generated.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from kvchat.chat import session_file
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.asking import Asking
from kvchat.chat.chat_model import ChatModel, readopt
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.reply import AnswerLedger, ContinuedLedger, Ledger, Reply, UnsavedLedger
from kvchat.chat.store import SessionLog, SessionStore, new_session_id
from kvchat.chat.thinking import Think, ThinkingSplitter
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.errors import ContextTooLong, KvchatError, StoreError, UsageError
from kvchat.core.paths import is_same_place
from kvchat.core.text import one_line
from kvchat.core.types import FinishReason
from kvchat.engine.thread import EngineThread

_log = logging.getLogger(__name__)


_NO_LOCK = (
    "Conversations are on a file system without locks: open none in two kvchats at once, or one "
    "overwrites the other."
)


class ChatSession:
    """One conversation, its file (None if nothing is saved), and the engine that answers.

    Not thread-safe: one thread uses a session. Answers arrive through the Reply that `ask` returns.
    `notes` are sentences for the user on what was found on opening. `answered_by` is the name of
    the model that answered last, "" if that is not known. The session owns the file.
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
        self.model = model
        self.conversation = conversation
        self._engine = engine
        self._log = log
        self._saving_problem: str | None = None
        self._is_problem_told = False
        self._is_shared = log is not None and not log.is_locked  # until the user knows
        # The name in the file; another name of the same model takes its place too.
        self._has_other_name = answered_by not in ("", model.name)
        is_taken_over = self._has_other_name and not is_same_place(answered_by, model.name)
        digest = model.tokenizer.digest
        is_odd = any(t.tokenizer == digest and model.is_stranger(t) for t in conversation.turns())
        readopt(conversation, model)
        answers = [turn for turn in conversation.turns() if turn.role is Role.ASSISTANT]
        if is_odd:
            odd = "Some tokens of this conversation do not exist in this model"
            notes = (*notes, f"{odd}; it will be read again once, from its text.")
        elif answers and (is_taken_over or answers[-1].is_adopted):
            notes = (*notes, _other_model(answered_by if is_taken_over else ""))
        self.notes = notes

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
        tools = original.tools
        copy = Conversation(new_session_id(), original.created_s, original.system, tools)
        log = store.create(copy, model.name) if store is not None else None
        lines = [session_file.tools_line(tools)] if tools is not None else []
        for turn in original.turns():
            copy.add(turn)
            lines.append(session_file.turn_line(turn))
            if turn.finish is not None:
                lines.append(session_file.end_line(turn.turn_id, turn.finish, {}, turn.calls))
        copy.move_tip(original.tip_id)
        lines.append(session_file.tip_line(original.tip_id))
        if log is not None:
            log.write("".join(lines), durable=True)
        session = cls(model, engine, copy, log)
        session.rename(f"{original.label} (fork)")
        return session

    @property
    def session_id(self) -> str:
        return self.conversation.session_id

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

    def add_user_turn(
        self,
        text: str,
        parent_id: int | None = None,
        think: Think = Think.AUTO,
        results: tuple[ToolResult, ...] = (),
        most_ids: int | None = None,
    ) -> Turn:
        """Add a user turn below `parent_id`, by default the tip, and save it.

        Raises ContextTooLong, and adds nothing, if its context would have more than `most_ids`.
        """
        parent = self.conversation.tip_id if parent_id is None else parent_id
        is_first = not self.conversation.context_ids(parent)
        system = self.conversation.system if is_first else None
        return self._add_user_turn(text, parent, system, think, results=results, most_ids=most_ids)

    def _add_user_turn(
        self,
        text: str,
        parent: int,
        system: str | None,
        think: Think = Think.AUTO,
        summary_of: int | None = None,
        results: tuple[ToolResult, ...] = (),
        most_ids: int | None = None,
    ) -> Turn:
        conversation, model = self.conversation, self.model
        turn = Turn(
            turn_id=conversation.next_turn_id,
            parent_id=parent,
            role=Role.USER,
            text=text,
            token_ids=model.user_ids(conversation, parent, text, system, think, results=results),
            tokenizer=model.tokenizer.digest,
            created_s=time.time(),
            system=system,
            summary_of=summary_of,
            results=results,
        )
        if not turn.token_ids and not conversation.context_ids(parent):
            raise UsageError("The message is empty.", "Type something.")
        num_ids = len(conversation.context_ids(parent)) + len(turn.token_ids)
        if most_ids is not None and num_ids > most_ids:
            raise ContextTooLong(
                f"The prompt has {num_ids:,} tokens, and the context holds {most_ids + 1:,}.",
                "Shorten it or start a new conversation.",
                num_ids,
                most_ids + 1,
            )
        conversation.add(turn)
        self.save(session_file.turn_line(turn), durable=True)
        return turn

    def add_answer(
        self,
        text: str,
        finish: FinishReason = FinishReason.STOP,
        known: tuple[tuple[int, ...], FinishReason] | None = None,
        summary_of: int | None = None,
        calls: tuple[ToolCall, ...] = (),
    ) -> Turn:
        """Add and save an answer that is given as text, as if the model had generated it.

        `known` are the ids that the model did generate, and why they ended. Without them the text
        is encoded.
        """
        turn = Turn(
            turn_id=self.conversation.next_turn_id,
            parent_id=self.conversation.tip_id,
            role=Role.ASSISTANT,
            text=text,
            token_ids=(),
            tokenizer=self.model.tokenizer.digest,
            created_s=time.time(),
            finish=finish,
            summary_of=summary_of,
            calls=calls,
        )
        if known is not None:
            turn = replace(turn, token_ids=known[0], finish=known[1])
        else:
            if (asked := self.model.retold(self.conversation, turn)) is not None:
                self.conversation.replace(asked)
                ids, tokenizer = asked.token_ids, asked.tokenizer
                self.save(session_file.more_line(asked.turn_id, "", ids, tokenizer))
            turn = replace(turn, token_ids=self.model.answer_ids(self.conversation, turn))
        self.conversation.add(turn)
        self.save(session_file.turn_line(turn))
        self.save(session_file.end_line(turn.turn_id, turn.finish or finish, {}, calls))
        return turn

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
        options = replace(options, num_samples=1)
        starts_thinking = self.model.starts_thinking(prompt)
        return self._submit(prompt, UnsavedLedger(), starts_thinking, options, notify, False)

    def compact(self, plan: CompactionPlan, summary: str | None) -> None:
        """Continue on a new branch: a summary of the plan's older turns, then copies of the others.

        Without a summary a note says that they were left out. The old branch stays.
        """
        first, summarised = plan.older[0], plan.older[-1].turn_id
        said, reply = plan.opening(summary)
        self._add_user_turn(said, ROOT, first.system, summary_of=summarised)
        parent = self.add_answer(reply, summary_of=summarised).turn_id
        for number, turn in enumerate(plan.kept):
            parent = self._copy_below(turn, parent, None, is_rendered=not number)
        self.move_tip(parent)

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
        options = replace(options, is_one_shot=is_one_shot)
        return self._submit(context, ledger, starts_thinking, options, notify)

    def _save_adopted(self, turn_id: int) -> None:
        """Save the ids of other models' turns that are about to be fed, once for each tokenizer."""
        noted = self.conversation.adopted
        for turn in self.conversation.path(turn_id):
            mark = turn.turn_id, turn.tokenizer
            if (turn.is_adopted or turn.is_imported) and mark not in noted:
                noted.add(mark)
                self.save(session_file.adopted_line(turn))

    def _submit(
        self,
        context: tuple[int, ...],
        ledger: AnswerLedger,
        starts_thinking: bool | None,
        options: AskOptions,
        notify: Callable[[], None] | None,
        is_kept: bool = True,
    ) -> Reply:
        tools = self.conversation.tools
        asking = Asking(self.model, context, options, starts_thinking, tools)
        scored_context = context if options.scores_prompt else ()
        reply = Reply(ledger, asking.decodings(), notify, scored_context=scored_context)
        session_id = self.session_id if self._log is not None and is_kept else ""
        ticket = self._engine.submit(asking.spec(session_id, is_kept), reply.listen)
        reply.on_cancel(lambda reason: self._engine.cancel(ticket, reason))
        return reply

    # Moving the tip; no turn is removed

    def move_tip(self, turn_id: int) -> None:
        """Make another turn the tip, and save that."""
        self.conversation.move_tip(turn_id)
        self.save(session_file.tip_line(turn_id))

    def undo(self) -> Turn | None:
        """Move the tip before the last message; return that turn, or None at the beginning.

        Where compacting was last, move it to where it was before that; return the summary.
        """
        if before := self.conversation.before_compaction():
            summary = self.conversation.path()[0]
            self.move_tip(before)
            return summary
        for turn in reversed(self.conversation.path()):
            if turn.is_message:
                self.move_tip(turn.parent_id)
                return turn
        return None

    def rename(self, title: str) -> None:
        self.conversation.title = title
        self.save(session_file.title_line(title))

    def set_system(self, system: str | None) -> None:
        """Use another system prompt for this path and for later messages.

        The path is copied below ROOT under the new prompt, or the copy there is becomes the path.
        The copied answers keep their exact ids, and the old branch stays. Raises ContextTooLong,
        and changes nothing, for a prompt that no context could hold.
        """
        self.model.require_fit(system or "")
        conversation = self.conversation
        conversation.system = system
        self.save(session_file.system_line(system))
        originals, wanted = conversation.originals(), conversation.tip_id
        for turn in conversation.turns():
            is_copy = originals[turn.turn_id] == originals[wanted]
            if is_copy and conversation.path(turn.turn_id)[0].system == system:
                self.move_tip(turn.turn_id)
                return
        parent = ROOT
        for turn in conversation.path():
            parent = self._copy_below(turn, parent, system, is_rendered=parent == ROOT)

    def _copy_below(self, turn: Turn, parent: int, system: str | None, is_rendered: bool) -> int:
        """Add and save a copy of a turn; `is_rendered` if its ids depend on what is before it."""
        ids = turn.token_ids
        if is_rendered and parent == ROOT:
            ids = self.model.ids_with_system(self.conversation, turn, system)
        elif is_rendered:
            think = self.model.think_of(self.conversation, turn) or Think.AUTO
            ids = self.model.user_ids(self.conversation, parent, turn.text, None, think)
        copy = replace(
            turn,
            turn_id=self.conversation.next_turn_id,
            parent_id=parent,
            token_ids=ids,
            system=system if parent == ROOT else None,
            copy_of=turn.turn_id,
        )
        self.conversation.add(copy)
        self.save(session_file.turn_line(copy))
        if copy.finish is not None:
            self.save(session_file.end_line(copy.turn_id, copy.finish, {}, copy.calls))
        return copy.turn_id

    def set_tools(self, tools: ToolSet | None) -> None:
        """Offer other tools on this path and to later messages.

        The path is copied below ROOT with the new definitions. The copied answers keep their ids,
        and the old branch stays.
        """
        conversation = self.conversation
        conversation.tools = tools
        self.save(session_file.tools_line(tools))
        parent = ROOT
        for turn in conversation.path():
            system = conversation.system
            parent = self._copy_below(turn, parent, system, is_rendered=parent == ROOT)

    def forget(self, turn_id: int) -> None:
        """Remove a turn, its copies on other branches, and all turns below them permanently.

        Raises StoreError, and removes nothing, if the file cannot be changed.
        """
        parent = self.conversation.turn(turn_id).parent_id
        is_first = parent == ROOT
        copies = self.conversation.copies(turn_id)
        gone = {below for copy in copies for below in self.conversation.below(copy)}
        if self._log is not None:
            self._log.rewrite(lambda data: session_file.without_turns(data, gone, not is_first))
        is_tip_gone = self.conversation.tip_id in gone
        for copy in copies:
            if self.conversation.has(copy):  # not removed with a turn above it
                self.conversation.remove(copy)
        if is_tip_gone and self.conversation.has(parent):
            self.conversation.move_tip(parent)
        if is_first:
            self.conversation.title = ""
        self.save(session_file.tip_line(self.conversation.tip_id), durable=True)

    def drop_leaf(self, turn_id: int) -> None:
        """Remove a turn that nothing follows; it stays where the file cannot be changed."""
        if not self.conversation.has(turn_id) or self.conversation.children(turn_id):
            return
        try:
            if self._log is not None:
                self._log.rewrite(lambda data: session_file.without_turns(data, {turn_id}, True))
        except StoreError as error:
            _log.info("a message that was refused stays: %s", error)
            return
        self.conversation.remove(turn_id)

    def complete(self) -> None:
        """Write pending lines to the file; if that fails, keep them and raise StoreError."""
        if self._log is not None:
            self._log.complete()

    def close(self) -> str | None:
        """Close the session file; return None or a sentence on what was not saved. Idempotent."""
        return self._log.close() if self._log is not None else None

    def discard(self) -> None:
        """Close the session and delete its file: for a conversation in which nothing was said."""
        if self._log is not None:
            self._log.discard()

    @property
    def is_saved(self) -> bool:
        """Whether the conversation has a file."""
        return self._log is not None

    def note_answering(self) -> None:
        """Save the model's name, if another model has answered last; when an answer begins."""
        if self._has_other_name:
            self.save(session_file.model_line(self.model.name))
            self._has_other_name = False

    def save(self, line: str, durable: bool = False) -> None:
        """Append a line to the session file; `saving_problem` returns a failure.

        `durable` waits until the line would survive a power loss.
        """
        if self._log is None:
            return
        self._saving_problem = self._log.write(line, durable)
        self._is_problem_told &= self._saving_problem is not None

    def saving_problem(self) -> str | None:
        """Return a sentence if lines are not yet in the file, else None.

        A problem is returned only once, until the file is complete again. So is that other
        processes may write to the file, where the file system has no locks.
        """
        if self._saving_problem is None or self._is_problem_told:
            note, self._is_shared = _NO_LOCK if self._is_shared else None, False
            return note
        self._is_problem_told = True
        return self._saving_problem


def _other_model(name: str) -> str:
    """Return a note on a conversation whose last answers another model wrote."""
    if not name:
        return "Another model wrote this conversation; this one reads it once."
    shown = one_line(name, 80)
    return f"{shown} wrote the last answers here; /model {shown} goes on with it."
