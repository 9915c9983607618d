"""Reply: one or more answers to a user turn, while they are generated.

The engine's thread only puts events into a queue. The consumer takes them out, and its thread then
decodes tokens (`decoding.py`). A ledger stores the answers while they arrive (`ledger.py`).
"""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from kvchat.chat.decoding import DecodedAnswer, Decoding
from kvchat.chat.events import (
    AnswerEnded,
    AnswerFailed,
    ChatEvent,
    ContextScored,
    ReadingPrompt,
    SavingFailed,
)
from kvchat.chat.ledger import AnswerLedger
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
        self._answers = [DecodedAnswer(Decoding(*how)) for how in answers]
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
