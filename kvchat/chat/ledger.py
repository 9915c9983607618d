"""Ledgers: store answers while they are generated, in a conversation and its file."""

import time
from dataclasses import replace
from typing import Protocol

from kvchat.chat import session_file
from kvchat.chat.conversation import ROOT, Role, Turn
from kvchat.chat.saved_conversation import SavedConversation
from kvchat.chat.tools import ToolCall
from kvchat.core.errors import ContextTooLong
from kvchat.core.events import RequestFailed, SampleFinished
from kvchat.core.types import FinishReason


class AnswerLedger(Protocol):
    """Stores answers. `Ledger` does so in a conversation and its file, `UnsavedLedger` nowhere.

    Each call returns None, or one sentence on why lines are not yet in the file.
    """

    def begin_answer(self, sample: int) -> str | None:
        """Create the answer's turn, at its first token. The first sample becomes the tip."""

    def extend_answer(self, sample: int, text: str, token_ids: list[int]) -> str | None:
        """Append text and ids to the turn."""

    def add_calls(self, sample: int, calls: tuple[ToolCall, ...], text: str) -> None:
        """Note the calls of an answer that is about to end, and its text without them."""

    def end_answer(self, sample: int, event: SampleFinished) -> tuple[int, str | None]:
        """Close the turn; returns its id as well."""

    def abandon(self, error: RequestFailed) -> str | None:
        """End the turns that exist, after the request failed."""


class Ledger:
    """Stores the answers to one user turn in its conversation; an AnswerLedger.

    before       the tip before a retry: if no answer begins, the tip moves back to it. None for a
                 new question
    refused_to   the tip to move back to if the context is too long; None for the turn before
    """

    def __init__(
        self,
        session: SavedConversation,
        user_turn: Turn,
        before: int | None = None,
        refused_to: int | None = None,
    ) -> None:
        self._session = session
        self._user_turn = user_turn
        self._before = before if before != user_turn.turn_id else None
        self._refused_to = user_turn.parent_id if refused_to is None else refused_to
        self._turn_ids: dict[int, int] = {}

    def begin_answer(self, sample: int) -> str | None:
        self._session.note_answering()
        conversation = self._session.conversation
        turn = Turn(
            turn_id=conversation.next_turn_id,
            parent_id=self._user_turn.turn_id,
            role=Role.ASSISTANT,
            text="",
            token_ids=(),
            tokenizer=self._session.model.tokenizer.digest,
            created_s=time.time(),
        )
        conversation.add(turn)
        self._turn_ids[sample] = turn.turn_id
        if self._session.is_saved:
            self._session.save(session_file.turn_line(turn))
        if sample > 0 and 0 in self._turn_ids:
            self._session.move_tip(self._turn_ids[0])  # the first sample stays the tip
        return self._session.saving_problem()

    def extend_answer(self, sample: int, text: str, token_ids: list[int]) -> str | None:
        self._grow(self._turn_ids[sample], text, tuple(token_ids))
        return self._session.saving_problem()

    def _grow(self, turn_id: int, text: str, token_ids: tuple[int, ...]) -> None:
        turn = self._session.conversation.turn(turn_id)
        grown = replace(turn, text=turn.text + text, token_ids=(*turn.token_ids, *token_ids))
        self._session.conversation.replace(grown)
        if self._session.is_saved:
            self._session.save(self._line(grown, text, token_ids))

    def _line(self, grown: Turn, text: str, token_ids: tuple[int, ...]) -> str:
        return session_file.more_line(grown.turn_id, text, token_ids)

    def add_calls(self, sample: int, calls: tuple[ToolCall, ...], text: str) -> None:
        turn = self._session.conversation.turn(self._turn_ids[sample])
        self._session.conversation.replace(replace(turn, calls=calls, text=text))

    def end_answer(self, sample: int, event: SampleFinished) -> tuple[int, str | None]:
        turn_id = self._turn_ids.get(sample)
        if turn_id is None:  # stopped before the first token
            self._step_back()
            return self._user_turn.turn_id, self._session.saving_problem()
        closing = self._session.model.kept_stop_ids(event.stop_token)
        if closing:
            self._grow(turn_id, "", closing)
        turn = self._session.conversation.turn(turn_id)
        self._session.conversation.replace(replace(turn, finish=event.reason))
        if self._session.is_saved:
            facts: dict[str, object] = {
                "usage": event.usage.as_dict(),
                "timing": event.timing.as_dict(event.usage),
            }
            line = session_file.end_line(turn_id, event.reason, facts, turn.calls, turn.text)
            self._session.save(line, durable=True)
        return turn_id, self._session.saving_problem()

    def abandon(self, failed: RequestFailed) -> str | None:
        """End the begun answers. If the context was too long, move the tip to where it was."""
        for turn_id in self._turn_ids.values():
            line = session_file.end_line(turn_id, FinishReason.CANCELLED, {})
            turn = self._session.conversation.turn(turn_id)
            if turn.finish is None:
                ended = replace(turn, finish=FinishReason.CANCELLED)
                self._session.conversation.replace(ended)
                self._session.save(line)
        if self._before is not None:
            self._step_back()
        elif isinstance(failed.error, ContextTooLong):
            self._session.move_tip(self._refused_to)
        return self._session.saving_problem()

    def _step_back(self) -> None:
        """If no answer has begun, move the tip back to the earlier answer, which is displayed."""
        is_waiting = self._session.conversation.tip_id == self._user_turn.turn_id
        if self._before is not None and is_waiting:
            self._session.move_tip(self._before)


class UnsavedLedger:
    """Stores nothing: the ledger of an answer that is no part of the conversation."""

    def begin_answer(self, sample: int) -> str | None:
        return None

    def extend_answer(self, sample: int, text: str, token_ids: list[int]) -> str | None:
        return None

    def add_calls(self, sample: int, calls: tuple[ToolCall, ...], text: str) -> None:
        """The answer's end has them."""

    def end_answer(self, sample: int, event: SampleFinished) -> tuple[int, str | None]:
        return ROOT, None

    def abandon(self, failed: RequestFailed) -> str | None:
        return None


class ContinuedLedger(Ledger):
    """Appends the continuation of a cut-off answer to that answer's turn."""

    def __init__(self, session: SavedConversation, user_turn: Turn, answer: Turn) -> None:
        super().__init__(session, user_turn)
        self._turn_ids[0] = answer.turn_id
        # Whether the file holds this model's ids of the answer, not another model's or none.
        self._has_line_of_model = not (
            answer.is_adopted or answer.is_imported or not answer.token_ids
        )

    def begin_answer(self, sample: int) -> str | None:
        self._session.note_answering()
        return None  # its turn is there already

    def _line(self, grown: Turn, text: str, token_ids: tuple[int, ...]) -> str:
        if self._has_line_of_model:
            return super()._line(grown, text, token_ids)
        self._has_line_of_model = True
        return session_file.more_line(grown.turn_id, text, grown.token_ids, grown.tokenizer)

    def abandon(self, failed: RequestFailed) -> str | None:
        return self._session.saving_problem()  # the answer stays cut off
