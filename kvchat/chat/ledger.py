"""Ledger: stores answers as turns of a conversation and lines of its file, while they arrive."""

import time
from dataclasses import replace
from typing import Protocol

from kvchat.chat import session_file
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.tools import ToolCall
from kvchat.core.errors import ContextTooLong
from kvchat.core.events import RequestFailed, SampleFinished
from kvchat.core.types import FinishReason


class KeptConversation(Protocol):
    """The session that a ledger writes to: a conversation with one model, and its file."""

    @property
    def model(self) -> ChatModel:
        """The model that writes the answers."""

    @property
    def conversation(self) -> Conversation:
        """The conversation that receives the turns."""

    def save(self, line: str, durable: bool = False) -> None:
        """Append a line to the file."""

    def saving_problem(self) -> str | None:
        """Return one sentence if lines are not yet in the file, else None."""

    def move_tip(self, turn_id: int) -> None:
        """Make another turn the tip."""


class Ledger:
    """Stores the answers to one user turn in its conversation; an AnswerLedger.

    `before` is the tip before a retry: if no answer begins, the tip moves back to it. None for a
    new question.
    """

    def __init__(
        self, session: KeptConversation, user_turn: Turn, before: int | None = None
    ) -> None:
        self._session = session
        self._user_turn = user_turn
        self._before = before if before != user_turn.turn_id else None
        self._turn_ids: dict[int, int] = {}

    def begin_answer(self, sample: int) -> str | None:
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
        facts: dict[str, object] = {
            "usage": event.usage.as_dict(),
            "timing": event.timing.as_dict(event.usage),
        }
        line = session_file.end_line(turn_id, event.reason, facts, turn.calls, turn.text)
        self._session.save(line, durable=True)
        return turn_id, self._session.saving_problem()

    def abandon(self, failed: RequestFailed) -> str | None:
        """End the begun answers. If the context was too long, move the tip before the user turn."""
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
            self._session.move_tip(self._user_turn.parent_id)
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
        """They stand in the answer's end."""

    def end_answer(self, sample: int, event: SampleFinished) -> tuple[int, str | None]:
        return ROOT, None

    def abandon(self, failed: RequestFailed) -> str | None:
        return None


class ContinuedLedger(Ledger):
    """Appends the continuation of a cut-off answer to that answer's turn."""

    def __init__(self, session: KeptConversation, user_turn: Turn, answer: Turn) -> None:
        super().__init__(session, user_turn)
        self._turn_ids[0] = answer.turn_id
        # Whether the file holds this model's ids of the answer, not another model's or none.
        self._has_line_of_model = not (
            answer.is_adopted or answer.is_imported or not answer.token_ids
        )

    def begin_answer(self, sample: int) -> str | None:
        return None  # it has begun already

    def _line(self, grown: Turn, text: str, token_ids: tuple[int, ...]) -> str:
        if self._has_line_of_model:
            return super()._line(grown, text, token_ids)
        self._has_line_of_model = True
        return session_file.more_line(grown.turn_id, text, grown.token_ids, grown.tokenizer)

    def abandon(self, failed: RequestFailed) -> str | None:
        return self._session.saving_problem()  # the answer stays cut off
