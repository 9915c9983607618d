"""Reply: one or more answers to a user turn, while they are generated.

The engine's thread only puts events into a queue. The consumer takes them out, and its thread then
decodes tokens (`decoding.py`). A ledger stores the answers in the
conversation and its file while they arrive. `Asking` makes the request and the decoders.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvchat.chat import session_file
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import ROOT, Role, Turn
from kvchat.chat.decoding import AnswerParts, AnswerWatcher, DecodedAnswer, Decoding
from kvchat.chat.events import (
    AnswerEnded,
    AnswerFailed,
    ChatEvent,
    ContextScored,
    LogprobTrack,
    ReadingPrompt,
    SavingFailed,
)
from kvchat.chat.grammar import AtLeast
from kvchat.chat.saved_conversation import SavedConversation
from kvchat.chat.text_stream import TextStream
from kvchat.chat.tool_calls import CallSplitter
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import ContextTooLong
from kvchat.core.events import (
    PrefillProgress,
    PromptScored,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.schemas import schema_of
from kvchat.core.types import FinishReason, TokenConstraint, TokenLogprobs
from kvchat.engine.request import RequestSpec


class AnswerLedger:
    """What is told of answers. This one stores nothing: the answer is no part of a conversation.

    Each call returns None, or one sentence on why lines are not yet in the file.
    """

    def begin_answer(self, sample: int) -> str | None:
        """Create the answer's turn, at its first token. The first sample becomes the tip."""
        return None

    def extend_answer(self, sample: int, text: str, token_ids: list[int]) -> str | None:
        """Append text and ids to the turn."""
        return None

    def add_calls(self, sample: int, calls: tuple[ToolCall, ...], text: str) -> None:
        """Note the calls of an answer that is about to end, and its text without them."""

    def end_answer(self, sample: int, event: SampleFinished) -> tuple[int, str | None]:
        """Close the turn; returns its id as well."""
        return ROOT, None

    def abandon(self, failed: RequestFailed) -> str | None:
        """End the turns that exist, after the request failed."""
        return None


class Ledger(AnswerLedger):
    """Stores the answers to one user turn in its conversation and its file.

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


@dataclass(frozen=True, slots=True)
class Asking:
    """A context that a model is to continue.

    context           all its ids
    starts_thinking   whether the answer begins with thinking; None if there are no marks of it
    tools             those that the answer may call; None for none
    """

    model: ChatModel
    context: tuple[int, ...]
    options: AskOptions
    starts_thinking: bool | None
    tools: ToolSet | None

    def decodings(self) -> list[Decoding]:
        """Return what makes text of each sample's tokens."""
        options, stop_tokens = self.options, self._stop_tokens()
        return [
            Decoding(
                self._new_stream(),
                options.stops,
                self.starts_thinking,
                self._calls(),
                self._track(),
                options.tells_ids,
                stop_tokens,
            )
            for _ in range(options.num_samples)
        ]

    def spec(self, session_id: str, is_kept: bool) -> RequestSpec:
        """Return the engine's request; `session_id` and `is_kept` as there."""
        options = self.options
        return RequestSpec(
            prompt_ids=self.context,
            sampling=options.resolved_sampling(),
            max_tokens=options.max_tokens,
            stop_token_ids=self._stop_ids,
            new_stop_watcher=self._new_watcher() if options.stops else None,
            num_samples=options.num_samples,
            is_one_shot=options.is_one_shot,
            is_kept=is_kept,
            new_constraint=self._new_constraint(),
            num_top_logprobs=options.num_top_logprobs,
            scores_prompt=options.scores_prompt,
            session_id=session_id,
            client=options.client,
            repetition_limit=options.repetition_limit,
            answer_schema=schema_of(options.format),
        )

    @property
    def _stop_ids(self) -> frozenset[int]:
        return self.model.stop_token_ids | self.options.stop_token_ids

    def _new_stream(self) -> TextStream:
        return self.model.tokenizer.new_stream(self.context)

    def _new_watcher(self) -> Callable[[], AnswerWatcher]:
        stop_tokens = self._stop_tokens()

        def new_watcher() -> AnswerWatcher:
            parts = AnswerParts(self.options.stops, self.starts_thinking, self._calls())
            return AnswerWatcher(self._new_stream(), parts, stop_tokens)

        return new_watcher

    def _new_constraint(self) -> Callable[[], TokenConstraint] | None:
        """Return what makes the limit of one answer's tokens; None for any answer."""
        grammar, least = self.options.grammar, self.options.min_tokens

        def by_grammar() -> TokenConstraint | None:
            # The grammar applies after the thinking that an answer begins with.
            stream = self._new_stream() if grammar is not None and self.starts_thinking else None
            return grammar.constraint(stream) if grammar is not None else None

        def new_constraint() -> TokenConstraint:
            limit, vocab_size = by_grammar(), self.model.vocab_size or 0
            if limit is not None and not least:
                return limit
            return AtLeast(least, self._stop_ids, vocab_size, limit)

        return new_constraint if grammar is not None or least else None

    def _stop_tokens(self) -> dict[int, str]:
        """Return the stop texts that are tokens which no text shows, by id."""
        tokenizer = self.model.tokenizer
        ids = ((tokenizer.token_id(stop), stop) for stop in self.options.stops)
        return {i: stop for i, stop in ids if i is not None and tokenizer.is_hidden(i)}

    def _calls(self) -> CallSplitter | None:
        """Return what finds the tool calls in one answer, None if none are looked for."""
        form, most = self.model.format.tools, self.options.max_calls
        if self.tools is None or form is None or most == 0:
            return None
        return CallSplitter(form.calls, self.tools, most)

    def _track(self) -> LogprobTrack | None:
        """Return what finds the logprobs of one answer's text, None if none are told."""
        if self.options.num_top_logprobs is None:
            return None
        return LogprobTrack(self.model.tokenizer)


SAVE_INTERVAL_S = 1.0
# So many events that wait are those of a reader slower than the engine.
_MANY_EVENTS = 64
# A reader looks for events once in so many seconds, from the first token on. Woken for each token,
# it took a core from the step that computed the next one, at a twentieth of a small model's rate.
PAUSE_S = 0.02


class Reply:
    """Events of one request. Iterate to wait for them, or `poll` for those that have arrived.

    `notify` is called on the engine's thread at the first event after a `poll`, and at each end of
    an answer; it must not block.
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
        self._answers = [DecodedAnswer(Decoding(*how)) for how in answers]
        self._notify = notify
        self._clock = clock
        self._queue: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self._is_notified = False  # of events since the last `poll`
        self._has_ended = threading.Event()  # since the reader looked: one of the answers
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
    def has_news_of_end(self) -> bool:
        """Whether an answer has ended since the last `poll`."""
        return self._has_ended.is_set()

    @property
    def num_samples(self) -> int:
        return len(self._answers)

    def listen(self, event: RequestEvent) -> None:
        """Queue an event. Called on the engine's thread."""
        self._queue.put(event)
        is_end = not isinstance(event, PrefillProgress | TokensGenerated)
        if is_end:
            self._has_ended.set()
        if self._notify is not None and (is_end or not self._is_notified):
            self._is_notified = True
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
            if self.num_tokens and not self.is_finished and self._queue.empty():
                self._has_ended.wait(PAUSE_S)
                self._has_ended.clear()

    def wait(self) -> AnswerEnded:
        """Wait until all answers have ended; return the last, or raise the error of the request."""
        *_, last = self
        if isinstance(last, AnswerFailed):
            raise last.error
        assert isinstance(last, AnswerEnded)
        return last

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
        # Before the queue is read: what comes after it is news again.
        self._is_notified = False
        self._has_ended.clear()
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

    def _all_scored(
        self, answer: DecodedAnswer, event: SampleFinished
    ) -> tuple[TokenLogprobs, ...]:
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
