"""Reply: one or more answers to a user turn, while they are generated.

The engine's thread only puts events into a queue. The consumer takes them out, and its thread then
decodes tokens. A ledger stores answers as turns of the conversation and lines of its file, while
they arrive.
"""

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvchat.chat import session_file
from kvchat.chat.answer_parts import AnswerPart, AnswerParts
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.detokenizer import TextStream
from kvchat.chat.events import (
    AnswerCall,
    AnswerEnded,
    AnswerFailed,
    AnswerText,
    ChatEvent,
    ContextScored,
    ReadingPrompt,
    SavingFailed,
)
from kvchat.chat.shown_logprobs import LogprobTrack, ShownToken
from kvchat.chat.thinking import joined
from kvchat.chat.tool_calls import CallSplitter
from kvchat.chat.tools import ToolCall
from kvchat.core.errors import ContextTooLong
from kvchat.core.events import (
    PrefillProgress,
    PromptScored,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.types import FinishReason, TokenLogprobs

SAVE_INTERVAL_S = 1.0
# So many events that wait are those of a reader slower than the engine.
_MANY_EVENTS = 64


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


class Decoding(NamedTuple):
    """How the tokens of one sample become text, thinking and calls; one answer owns its parts.

    `starts_thinking` is None where no thinking is separated. `track` is for answers whose logprobs
    are told. Those whose calls are channels have none. `tells_ids` if events have the tokens' ids.
    `stop_tokens` are the stop texts that are tokens without a text of their own, by id.
    """

    stream: TextStream
    stops: tuple[str, ...]
    starts_thinking: bool | None
    calls: CallSplitter | None = None
    track: LogprobTrack | None = None
    tells_ids: bool = False
    stop_tokens: Mapping[int, str] = MappingProxyType({})


class _Answer:
    """The text of one sample while it is generated."""

    def __init__(self, how: Decoding) -> None:
        assert how.track is None or how.calls is None or not how.calls.is_channel
        self._track = how.track
        self._tells_ids = how.tells_ids
        self.scored: list[TokenLogprobs] = []
        self.told_ids: list[int] = []
        self.logprobs: dict[bool, list[ShownToken]] = {False: [], True: []}  # by is_thinking
        self._stream = how.stream
        self._parts = AnswerParts(how.stops, how.starts_thinking, how.calls)
        self._stop_tokens = how.stop_tokens
        self._last_token: int | None = None
        self.calls: list[ToolCall] = []
        self._whole = ""
        self._num_saved = 0  # characters of it
        self.text = ""
        self.thinking = ""
        self.num_thinking_tokens = 0
        self.has_begun = False
        self.unsaved_text = ""
        self.unsaved_ids: list[int] = []
        self.saved_s = float("-inf")

    def feed(self, sample: int, generated: TokensGenerated) -> list[ChatEvent]:
        self.unsaved_ids.extend(generated.token_ids)
        told: list[ChatEvent] = []
        if self._tells_ids:
            self.told_ids.extend(generated.token_ids)
            told.append(AnswerText(sample, "", token_ids=generated.token_ids))
        pieces = [self._stream.feed(token) for token in generated.token_ids]
        if self._track is not None:
            for token, piece in zip(generated.logprobs, pieces, strict=True):
                self._track.add(token, piece)
        self._last_token = generated.token_ids[-1] if generated.token_ids else self._last_token
        # Thinking is fed by tokens, so that they can be counted; the rest is fed at once.
        for fed in pieces if self._parts.is_thinking else ["".join(pieces)]:
            was_thinking = self._parts.is_thinking
            self._whole += fed
            told += self._events(sample, self._parts.feed(fed))
            if was_thinking or self._parts.is_thinking:
                self.num_thinking_tokens += 1 if was_thinking else len(pieces)
        return told

    def flush(self, sample: int) -> list[ChatEvent]:
        end = self._stream.flush()
        if self._track is not None:
            self._track.complete(end)
        self._whole += end
        events = self._events(sample, self._parts.feed(end))
        return events + self._events(sample, self._parts.flush())

    @property
    def text_without_calls(self) -> str:
        """The text to save: thinking with its marks, and the answer."""
        if not self.thinking:
            return self.text
        return joined(self.thinking, self.text, self._whole)

    @property
    def num_dropped_calls(self) -> int:
        return self._parts.num_dropped_calls

    @property
    def is_thinking(self) -> bool:
        """Whether it has not come to the end of its thinking."""
        return self._parts.is_thinking

    @property
    def stop_text(self) -> str | None:
        """The stop text that it ended with, None if it goes on or ended otherwise."""
        if self._parts.stop is not None or self.is_thinking or self._last_token is None:
            return self._parts.stop
        return self._stop_tokens.get(self._last_token)

    def _events(self, sample: int, parts: list[AnswerPart]) -> list[ChatEvent]:
        """Return the events for parts; note what is to be saved of the whole text."""
        self.unsaved_text += self._whole[self._num_saved : self._parts.num_certain]
        self._num_saved = max(self._num_saved, self._parts.num_certain)
        return [self._event(sample, part) for part in parts]

    def _event(self, sample: int, part: AnswerPart) -> ChatEvent:
        if isinstance(part, ToolCall):
            self.calls.append(part)
            return AnswerCall(sample, part)
        if part.is_thinking:
            self.thinking += part.text
        else:
            self.text += part.text
        if self._track is None:
            return AnswerText(sample, part.text, part.is_thinking)
        tokens = self._track.take(part.start, part.end)
        self.logprobs[part.is_thinking] += tokens
        return AnswerText(sample, part.text, part.is_thinking, tokens)


class Reply:
    """Events of one request. Iterate to wait for them, or `poll` for those that have arrived.

    `notify` is called on the engine's thread when there are events to poll; it must not block.
    One consumer only; `cancel` may be called from any thread. `scored_context` is the context if
    the logprobs of its tokens are told too: before the first text, and with all others at the end.
    """

    def __init__(
        self,
        ledger: AnswerLedger,
        answers: Sequence[Decoding],
        notify: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        scored_context: tuple[int, ...] = (),
    ) -> None:
        self._ledger = ledger
        self._answers = [_Answer(Decoding(*how)) for how in answers]
        self._notify = notify
        self._clock = clock
        self._queue: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self._num_open = len(answers)
        self._scored_context = scored_context
        self._scored: list[TokenLogprobs] = []  # of the context, from its second token on
        self._is_context_told = not scored_context
        self.num_tokens = 0  # generated so far, over all samples
        self._cancel: Callable[[FinishReason], None] | None = None

    @property
    def is_finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_samples(self) -> int:
        return len(self._answers)

    def listen(self, event: RequestEvent) -> None:
        """Queue an event. Called on the engine's thread."""
        self._queue.put(event)
        if self._notify is not None:
            self._notify()

    def on_cancel(self, cancel: Callable[[FinishReason], None]) -> None:
        """Set the function that cancels the request, after it was submitted."""
        self._cancel = cancel

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ask the engine to end the answers; the text generated so far is kept."""
        if self._cancel is not None:
            self._cancel(reason)

    def __iter__(self) -> Iterator[ChatEvent]:
        while not self.is_finished:
            try:
                event = self._queue.get(timeout=SAVE_INTERVAL_S)
            except queue.Empty:
                yield from self._save_due()
                continue
            for each in self._with_waiting(event):
                yield from self._take(each)

    def _with_waiting(self, event: RequestEvent) -> list[RequestEvent]:
        """Return an event, and if many wait all that do: tokens that follow tokens are joined.

        One at a time they would be shown long after an answer has ended that was too fast.
        """
        if self._queue.qsize() < _MANY_EVENTS:
            return [event]
        waiting = [event, *(self._queue.get_nowait() for _ in range(self._queue.qsize()))]
        joined: list[RequestEvent] = []
        for sample, group in groupby(waiting, _sample_of_tokens):
            events = list(group)
            joined += events if sample is None else [_joined_tokens(events)]
        return joined

    def poll(self) -> list[ChatEvent]:
        """Return the events since the last call, without waiting."""
        events: list[ChatEvent] = []
        while not self.is_finished and not self._queue.empty():
            for each in self._with_waiting(self._queue.get_nowait()):
                events.extend(self._take(each))
        return events + self._save_due()

    def _take(self, event: RequestEvent) -> list[ChatEvent]:
        if isinstance(event, PrefillProgress):
            return [ReadingPrompt(event.cached, event.done, event.total, event.left_s)]
        if isinstance(event, TokensGenerated):
            return self._context() + self._extend(event)
        if isinstance(event, SampleFinished):
            return self._context() + self._end(event)
        if isinstance(event, PromptScored):
            self._scored.extend(event.logprobs)
            return []
        return self._fail(event)

    def _context(self) -> list[ChatEvent]:
        """Return the logprobs of the context, once all are known, for the first time only."""
        if self._is_context_told:
            return []
        self._is_context_told = True
        return [ContextScored(self._scored_context, tuple(self._scored))]

    def _extend(self, event: TokensGenerated) -> list[ChatEvent]:
        answer = self._answers[event.sample]
        self.num_tokens += len(event.token_ids)
        if self._scored_context:
            answer.scored.extend(event.logprobs)
        events: list[ChatEvent] = self._begin(event.sample)
        events += answer.feed(event.sample, event)
        if self._clock() - answer.saved_s >= SAVE_INTERVAL_S:
            events += self._save(event.sample)
        return events

    def _end(self, event: SampleFinished) -> list[ChatEvent]:
        answer = self._answers[event.sample]
        events: list[ChatEvent] = []
        if event.reason is FinishReason.STOP or answer.unsaved_ids or answer.has_begun:
            events += self._begin(event.sample)
        events += answer.flush(event.sample)
        if answer.has_begun:
            events += self._save(event.sample)
        if answer.calls:
            self._ledger.add_calls(event.sample, tuple(answer.calls), answer.text_without_calls)
        turn_id, problem = self._ledger.end_answer(event.sample, event)
        self._num_open -= 1
        ended = AnswerEnded(
            sample=event.sample,
            turn_id=turn_id,
            text=answer.text,
            thinking=answer.thinking,
            reason=event.reason,
            usage=event.usage,
            timing=event.timing,
            miss_reason=event.miss_reason,
            calls=tuple(answer.calls),
            num_dropped_calls=answer.num_dropped_calls,
            logprobs=tuple(answer.logprobs[False]),
            thinking_logprobs=tuple(answer.logprobs[True]),
            token_ids=tuple(answer.told_ids),
            scored_context=self._scored_context,
            scored=self._all_scored(answer, event),
            stop_text=answer.stop_text,
            ends_in_thinking=answer.is_thinking,
            num_thinking_tokens=answer.num_thinking_tokens,
        )
        return [*events, *_complaint(problem), ended]

    def _all_scored(self, answer: _Answer, event: SampleFinished) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the context and of the answer; none without a scored context."""
        if not self._scored_context:
            return ()
        stop = () if event.stop_logprobs is None else (event.stop_logprobs,)
        return (*self._scored, *answer.scored, *stop)

    def _fail(self, event: RequestFailed) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for sample, answer in enumerate(self._answers):
            if answer.has_begun:
                events += answer.flush(sample) + self._save(sample)
        self._num_open = 0
        return [*events, *_complaint(self._ledger.abandon(event)), AnswerFailed(event.error)]

    def _begin(self, sample: int) -> list[ChatEvent]:
        answer = self._answers[sample]
        if answer.has_begun:
            return []
        answer.has_begun = True
        return _complaint(self._ledger.begin_answer(sample))

    def _save_due(self) -> list[ChatEvent]:
        now_s = self._clock()
        return [
            event
            for sample, answer in enumerate(self._answers)
            if answer.unsaved_ids and now_s - answer.saved_s >= SAVE_INTERVAL_S
            for event in self._save(sample)
        ]

    def _save(self, sample: int) -> list[ChatEvent]:
        answer = self._answers[sample]
        if not answer.unsaved_ids and not answer.unsaved_text:
            return []
        text, ids = answer.unsaved_text, answer.unsaved_ids
        answer.unsaved_text, answer.unsaved_ids = "", []
        answer.saved_s = self._clock()
        return _complaint(self._ledger.extend_answer(sample, text, ids))


def _sample_of_tokens(event: RequestEvent) -> int | None:
    return event.sample if isinstance(event, TokensGenerated) else None


def _joined_tokens(events: list[RequestEvent]) -> RequestEvent:
    """Return one event with the tokens of several of one sample."""
    generated = [event for event in events if isinstance(event, TokensGenerated)]
    return replace(
        generated[0],
        token_ids=tuple(token for event in generated for token in event.token_ids),
        logprobs=tuple(each for event in generated for each in event.logprobs),
    )


def _complaint(problem: str | None) -> list[ChatEvent]:
    return [SavingFailed(problem)] if problem is not None else []


class KeptConversation(Protocol):
    """The session that a ledger writes to: a conversation with one model, and its file."""

    @property
    def model(self) -> ChatModel:
        """The model that writes the answers."""

    @property
    def conversation(self) -> Conversation:
        """The conversation that receives the turns."""

    @property
    def is_saved(self) -> bool:
        """Whether it has a file."""

    def note_answering(self) -> None:
        """An answer of the model begins: its file has the name of the model that answered last."""

    def save(self, line: str, durable: bool = False) -> None:
        """Append a line to the file."""

    def saving_problem(self) -> str | None:
        """Return one sentence if lines are not yet in the file, else None."""

    def move_tip(self, turn_id: int) -> None:
        """Make another turn the tip."""


class Ledger:
    """Stores the answers to one user turn in its conversation; an AnswerLedger.

    before       the tip before a retry: if no answer begins, the tip moves back to it. None for a
                 new question
    refused_to   the tip to move back to if the context is too long; None for the turn before
    """

    def __init__(
        self,
        session: KeptConversation,
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

    def __init__(self, session: KeptConversation, user_turn: Turn, answer: Turn) -> None:
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
