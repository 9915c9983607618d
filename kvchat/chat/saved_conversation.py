"""SavedConversation: a conversation with one model, and its file; each change is saved."""

import logging
import time
from dataclasses import replace
from typing import Any

from kvchat.chat import session_file
from kvchat.chat.chat_model import ChatModel, readopt
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.store import SessionLog
from kvchat.chat.thinking import Think
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.errors import ContextTooLong, StoreError, UsageError
from kvchat.core.paths import is_gone, is_same_place
from kvchat.core.text import one_line
from kvchat.core.types import FinishReason

_log = logging.getLogger(__name__)

_NO_LOCK = (
    "Conversations are on a file system without locks: open none in two kvchats at once, or one "
    "overwrites the other."
)


class SavedConversation:
    """One conversation, the model that answers it, and its file: None if nothing is saved.

    Not thread-safe. `notes` are sentences for the user on what was found on opening. `answered_by`
    is the name of the model that answered last, "" if that is not known. It owns the file.
    """

    def __init__(
        self,
        model: ChatModel,
        conversation: Conversation,
        log: SessionLog | None,
        notes: tuple[str, ...] = (),
        answered_by: str = "",
    ) -> None:
        self.model = model
        self.conversation = conversation
        self._log = log
        self._saving_problem: str | None = None
        self._is_problem_told = False
        self._is_shared = log is not None and not log.is_locked  # until the user knows
        # The name in the file; another name of the same model takes its place too.
        self._has_other_name = answered_by not in ("", model.name)
        is_taken_over = self._has_other_name and not is_same_place(answered_by, model.name)
        if is_gone(answered_by):  # moved, or deleted: no name that the user could go on with
            is_taken_over = False
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

    @property
    def session_id(self) -> str:
        return self.conversation.session_id

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
        self.save(session_file.whole_turn(turn))
        return turn

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
        self.save(session_file.whole_turn(copy))
        return copy.turn_id

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

    # The file

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

    def save_settings(self, settings: dict[str, Any]) -> None:
        """Save the settings that the conversation goes on with, if they have changed."""
        if settings != self.conversation.settings:
            self.conversation.settings = settings
            self.save(session_file.settings_line(settings))

    def _save_adopted(self, turn_id: int) -> None:
        """Save the ids of other models' turns that are about to be fed, once for each tokenizer."""
        noted = self.conversation.adopted
        for turn in self.conversation.path(turn_id):
            mark = turn.turn_id, turn.tokenizer
            if (turn.is_adopted or turn.is_imported) and mark not in noted:
                noted.add(mark)
                self.save(session_file.adopted_line(turn))

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
        return "Another tokenizer made the tokens of this conversation; it is read again once."
    shown = one_line(name, 80)
    return f"{shown} wrote the last answers here; /model {shown} goes on with it."
