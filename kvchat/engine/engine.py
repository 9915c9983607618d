"""Engine: submit, step, cancel. One thread owns it and everything below it.

Turns steps into events. Knows when a request is done; knows no text, no files and no threads.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import torch

from kvchat.cache.manager import CacheManager
from kvchat.core.errors import ContextTooLong, GenerationError, KvchatError
from kvchat.core.events import (
    PrefillProgress,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.stats import EngineStatus
from kvchat.core.types import CachedTokens, FinishReason
from kvchat.engine.noise import sample_seed
from kvchat.engine.request import Request, RequestSpec, State
from kvchat.engine.runner import Runner
from kvchat.engine.sampler import SamplingRow, sample
from kvchat.engine.scheduler import Scheduler, Work

if TYPE_CHECKING:
    from kvchat.cache.persistence import Persistence, Restore

_log = logging.getLogger(__name__)


class Engine:
    """Runs requests over one model and one cache.

    `max_context` is the longest context of any request, prompt and completion together; prompts
    hold ids below `vocab_size`. `clock` returns seconds. With `persistence` prompts are looked for
    on a slower tier too, and finished contexts are kept there; the engine closes it.
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        max_context: int,
        max_step_tokens: int,
        max_running: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        persistence: "Persistence | None" = None,
    ) -> None:
        self.cache = cache
        self.max_context = min(max_context, cache.max_tokens)
        self._vocab_size = vocab_size
        self._runner = runner
        self._scheduler = Scheduler(cache, max_step_tokens, max_running)
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._persistence = persistence
        self._prefetch: Restore | None = None
        self._request_ids = count(1)
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._is_prefetching

    @property
    def _is_prefetching(self) -> bool:
        return self._prefetch is not None and not self._prefetch.is_over

    def status(self) -> EngineStatus:
        """Return counts for people; changes nothing."""
        cache = self.cache.status()
        return EngineStatus(
            num_steps=self._num_steps,
            num_tokens_computed=self._num_tokens,
            num_preempted=self._scheduler.num_preempted,
            block_size=self.cache.block_size,
            block_bytes=self.cache.kv_pool.geometry.block_bytes,
            num_blocks=cache.num_blocks,
            num_free=cache.num_free,
            num_cached=cache.num_cached,
            num_evicted=cache.num_evicted,
            num_copied=cache.num_copied,
            max_context=self.max_context,
            max_step_tokens=self._max_step_tokens,
            disk=self._persistence.status() if self._persistence is not None else None,
            read_rate=self._persistence.planner.read_bytes_per_s if self._persistence else None,
        )

    def running(self) -> list[Request]:
        """Return the requests that hold blocks, for those who measure."""
        return [r for r in self._scheduler.requests() if r.table is not None]

    def submit(self, spec: RequestSpec, submitted_s: float | None = None) -> int:
        """Queue a request; return its id. `submitted_s` is when it was asked for, if not now.

        Raises ContextTooLong where the prompt leaves no room for a token, and GenerationError for
        an id the model has no embedding for, which would fail its step's other requests too.
        """
        length = len(spec.prompt_ids)
        if length >= self.max_context:
            raise ContextTooLong(
                f"The prompt has {length} tokens, and the context holds {self.max_context}.",
                "Shorten it, start a new conversation, or raise --device-cache if that is the "
                "limit.",
            )
        strangers = [token for token in spec.prompt_ids if not 0 <= token < self._vocab_size]
        if strangers:
            raise GenerationError(
                f"The prompt holds token {strangers[0]}, and the model has {self._vocab_size}.",
                "Its tokenizer and its weights do not belong together.",
            )
        request_id = next(self._request_ids)
        now_s = self._clock() if submitted_s is None else submitted_s
        request = Request.from_spec(request_id, spec, now_s)
        request.restore = self._restore_of(request.ids)
        self._scheduler.add(request)
        return request_id

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Bring a context's KV up from slower tiers, for a request that will probably follow.

        One at a time: the newest is the likeliest.
        """
        self._give_up_prefetch()
        if self._persistence is not None:
            self._prefetch = self._persistence.begin((*token_ids, 0))

    def _restore_of(self, ids: Sequence[int]) -> "Restore | None":
        """Begin to restore a prompt, or go on with the prefetch that foresaw it."""
        foreseen = self._prefetch
        if foreseen is not None and not foreseen.is_given_up.is_set():
            context = foreseen.ids[:-1]
            if list(context) == list(ids[: len(context)]):
                self._prefetch = None
                return foreseen
        self._give_up_prefetch()
        return self._persistence.begin(ids) if self._persistence is not None else None

    def _give_up_prefetch(self) -> None:
        if self._prefetch is not None:
            self._prefetch.give_up()
        self._prefetch = None

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request at the next step, all its samples; what was generated stays."""
        for request in self._scheduler.requests():
            if request.request_id == request_id:
                request.cancelled_for = reason

    def step(self) -> list[RequestEvent]:
        """Run one forward pass over whatever is due; return what happened."""
        events = self._end_cancelled()
        is_restoring = self._settle_restores()
        plan = self._scheduler.schedule()
        if not plan:
            return events if is_restoring else events + self._end_stuck()
        self._mark_started(plan)
        return events + self._compute(plan)

    def close(self) -> None:
        """Keep what unfinished requests have computed, and finish writing, within bounds."""
        if self._persistence is None:
            return
        self._give_up_prefetch()
        for request in self._scheduler.requests():
            if request.restore is not None:
                request.restore.give_up()  # or its reader would wait for a place to put a piece
        for request in self.running():
            self._persistence.save(request.ids[: request.num_computed])
        self._persistence.close()

    # One step, part by part

    def _end_cancelled(self) -> list[RequestEvent]:
        events: list[RequestEvent] = []
        for request in self._scheduler.requests():
            if request.cancelled_for is not None:
                ending = self._finish(request, request.cancelled_for)
                # Samples that were still to fork end with it: every sample has an end.
                samples = range(request.sample, request.sample + 1 + request.num_siblings_to_fork)
                events.extend(replace(ending, sample=sample) for sample in samples)
        return events

    def _settle_restores(self) -> bool:
        """Take in what slower tiers have delivered; whether a request still waits for more.

        Where all requests wait it waits with them, for the next delivery or a moment.
        """
        if self._persistence is None:
            return False
        requests = self._scheduler.requests()
        restores = [r.restore for r in requests if r.restore is not None and not r.restore.is_over]
        if self._prefetch is not None and self._is_prefetching:
            restores.append(self._prefetch)
        if restores and len(restores) >= len(requests):
            self._persistence.wait_for_news()
        outcomes = [self._persistence.settle(restore) for restore in restores]
        return any(outcomes)

    def _end_stuck(self) -> list[RequestEvent]:
        """With nothing running and nothing admissible, waiting longer would not help."""
        events: list[RequestEvent] = []
        for request in self._scheduler.requests():
            self._scheduler.finish(request)
            error = GenerationError("The cache has no room for this request.")
            events.append(RequestFailed(request.request_id, error))
        return events

    def _mark_started(self, plan: Sequence[Work]) -> None:
        now_s = self._clock()
        for work in plan:
            if work.request.clock.started_s is None:
                work.request.clock.started_s = now_s

    def _compute(self, plan: Sequence[Work]) -> list[RequestEvent]:
        """Run the plan as one batch; where that fails, request by request.

        One request that cannot be answered, or a batch too large for the device's memory, must not
        cost the others their answers. Running work again is harmless: it writes the same slots.
        """
        began_s = self._clock()
        try:
            tokens = self._sample(plan, self._runner.run(plan))
        except Exception as error:  # a model's own code can fail with anything
            _log.error("step failed requests=%d", len(plan), exc_info=error)
            if len(plan) == 1:
                return self._fail(plan[0].request, _explain(error))
        else:
            self._note_speed(plan, self._clock() - began_s)
            return self._advance(plan, tokens)
        # Outside the handler: the error held on to the failed step's tensors.
        events: list[RequestEvent] = []
        for work in plan:
            if work.request.state is State.RUNNING:  # or it has failed with another of its samples
                events.extend(self._compute([work]))
        return events

    def _note_speed(self, plan: Sequence[Work], seconds: float) -> None:
        """Let the planner know what computing costs, and so what restoring is worth."""
        if self._persistence is not None:
            num_tokens = sum(work.num_tokens for work in plan)
            self._persistence.planner.note_prefill(num_tokens, seconds)

    def _sample(self, plan: Sequence[Work], logits: torch.Tensor) -> dict[Work, list[int]]:
        """Draw the next token of each completing request, and of the siblings about to fork."""
        completing = [work for work in plan if work.completes]
        owners = [
            (work, sibling)
            for work in completing
            for sibling in range(1 + work.request.num_siblings_to_fork)
        ]
        rows = [_sampling_row(work.request, sibling, logits.device) for work, sibling in owners]
        if len(owners) > len(completing):
            logits = logits[[completing.index(work) for work, _ in owners]]
        drawn = sample(logits, rows) if rows else []
        tokens: dict[Work, list[int]] = {work: [] for work in completing}
        for (work, _), token in zip(owners, drawn, strict=True):
            tokens[work].append(token)
        return tokens

    def _advance(self, plan: Sequence[Work], tokens: dict[Work, list[int]]) -> list[RequestEvent]:
        """Count what was computed, enter full blocks in the tree, and append what was drawn."""
        events: list[RequestEvent] = []
        self._num_steps += 1
        for work in plan:
            request = work.request
            if request.state is State.FINISHED:
                continue  # it has failed with another of its samples
            assert request.table is not None
            self._num_tokens += work.num_tokens
            request.num_computed += work.num_tokens
            self.cache.commit(request.table, request.ids, request.num_computed)
            if request.num_generated == 0:
                events.append(_progress(request))
            if work in tokens:
                events.extend(self._append(request, tokens[work]))
        return events

    def _append(self, request: Request, tokens: list[int]) -> list[RequestEvent]:
        """Append one drawn token to the request, and one each to the siblings it forks into."""
        events: list[RequestEvent] = []
        siblings = self._fork(request)
        for sibling, token in zip([request, *siblings], tokens, strict=True):
            if sibling.state is not State.FINISHED:  # or it has failed with another sample
                events.extend(self._append_token(sibling, token))
        return events

    def _fork(self, request: Request) -> list[Request]:
        """Make the siblings that share the prompt's blocks from here on."""
        assert request.table is not None
        siblings = []
        for number in range(1, 1 + request.num_siblings_to_fork):
            table = self.cache.fork(request.table, request.num_computed)
            sibling = request.sibling(number, table)
            self._scheduler.add(sibling)
            siblings.append(sibling)
        request.num_siblings_to_fork = 0
        return siblings

    def _append_token(self, request: Request, token: int) -> list[RequestEvent]:
        now_s = self._clock()
        if request.clock.first_token_s is None:
            request.clock.first_token_s = now_s
        request.clock.last_token_s = now_s
        if token in request.spec.stop_token_ids:
            request.stop_token = token
            return [self._finish(request, FinishReason.STOP)]
        request.ids.append(token)
        generated = TokensGenerated(request.request_id, request.sample, (token,))
        try:
            is_stopped = request.watcher is not None and request.watcher.feed(token)
        except Exception as error:  # a watcher reads text, which is not the engine's own work
            _log.error("a stop watcher failed", exc_info=error)
            failure = GenerationError("Looking for stop strings failed.", "Answer without --stop.")
            return [generated, *self._fail(request, failure)]
        if is_stopped:
            return [generated, self._finish(request, FinishReason.STOP)]
        if self._is_at_limit(request):
            return [generated, self._finish(request, FinishReason.LENGTH)]
        return [generated]

    def _is_at_limit(self, request: Request) -> bool:
        limit = request.spec.max_tokens
        if limit is not None and request.num_generated >= limit:
            return True
        return len(request.ids) >= self.max_context

    def _finish(self, request: Request, reason: FinishReason) -> SampleFinished:
        computed = request.ids[: request.num_computed]
        self._scheduler.finish(request)
        if self._persistence is not None:
            self._persistence.save(computed)
        timing = request.clock.timing(self._clock())
        return SampleFinished(
            request.request_id,
            request.sample,
            reason,
            request.usage(),
            timing,
            request.stop_token,
        )

    def _fail(self, failed: Request, error: KvchatError) -> list[RequestEvent]:
        """End a request, all its samples; what they had computed before stays valid."""
        for request in self._scheduler.requests():
            if request.request_id == failed.request_id:
                self._scheduler.finish(request)
        return [RequestFailed(failed.request_id, error)]


def _sampling_row(request: Request, sibling: int, device: torch.device) -> SamplingRow:
    params = request.spec.sampling
    context_ids = None
    if params.repetition_penalty != 1.0:
        context_ids = torch.tensor(request.ids, dtype=torch.int64, device=device)
    return SamplingRow(
        params=params,
        seed=sample_seed(params.seed, request.sample + sibling),
        position=len(request.ids),
        context_ids=context_ids,
    )


def _progress(request: Request) -> PrefillProgress:
    return PrefillProgress(
        request.request_id,
        request.cached or CachedTokens(),
        request.num_computed,
        request.num_prompt_tokens,
    )


def _explain(error: Exception) -> KvchatError:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return GenerationError(
            "The device ran out of memory while answering.",
            "Lower --device-cache or use a smaller model.",
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return GenerationError(f"The forward pass failed: {reason[:200].rstrip('.')}.")
