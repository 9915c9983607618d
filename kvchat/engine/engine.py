"""Engine: submit, step, cancel. One thread owns it and everything below it.

The door to the parts that plan, compute and append. Knows no text, no files and no threads.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.core.errors import ContextTooLong, GenerationError, KvchatError
from kvchat.core.events import RequestEvent
from kvchat.core.stats import EngineStatus
from kvchat.core.types import CachedTokens, FinishReason
from kvchat.engine.fetch import Fetcher
from kvchat.engine.kv_verifier import KvVerifier
from kvchat.engine.output_processor import OutputProcessor
from kvchat.engine.request import Request, RequestSpec, State
from kvchat.engine.runner import Runner, draw, draws_of, tokens_of
from kvchat.engine.scheduler import ScheduledRequest, Scheduler
from kvchat.engine.speculation import Limits, Mode, Speculation

if TYPE_CHECKING:
    from kvchat.cache.connector import KvConnector
    from kvchat.cache.host_offload import HostOffload
    from kvchat.cache.restore import RestoredContext
    from kvchat.model.batch import SequencePiece

_log = logging.getLogger(__name__)

# How long a step without other work waits for room for KV that is to be kept.
_ROOM_PATIENCE_S = 0.02


class Engine:
    """Runs requests over one model and one cache.

    `max_context` is the longest context of any request, prompt and completion together; prompts
    hold ids below `vocab_size`. `clock` returns seconds. With `connector` prompts are looked for
    on a slower tier too, and finished contexts are kept there; the engine closes it. `speculation`
    is what drafts; the engine closes it too.
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
        connector: "KvConnector | None" = None,
        speculation: Speculation | None = None,
        offload: "HostOffload | None" = None,
    ) -> None:
        self.cache = cache
        self._kv_verifier = KvVerifier(cache, connector, runner.dtype)  # takes a block for its own
        self.max_context = min(max_context, cache.max_tokens)
        self._is_cache_the_limit = cache.max_tokens < max_context
        self._vocab_size = vocab_size
        self._runner = runner
        self._fetcher = Fetcher(connector, offload)
        promote = self._fetcher.promote
        self._scheduler = Scheduler(cache, max_step_tokens, max_running, promote)
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._connector = connector
        self._offload = offload
        self._output = OutputProcessor(
            self._scheduler, cache, self._kv_verifier, self.max_context, clock
        )
        self._limits = Limits(vocab_size, self.max_context, max_step_tokens)
        self.speculation = speculation or Speculation(mode=Mode.OFF)
        self._request_ids = count(1)
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._has_answers_due or (
            self._connector is not None and self._connector.write_behind.has_backlog
        )

    @property
    def _has_answers_due(self) -> bool:
        is_fetching = self._fetcher.is_prefetching or self._fetcher.is_under_way
        return self._scheduler.has_work or is_fetching or self._kv_verifier.has_work

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
            host=self._offload.status() if self._offload is not None else None,
            disk=self._connector.status() if self._connector is not None else None,
            disk_read_s=self._connector.planner.read_s if self._connector is not None else 0.0,
            speculation=self.speculation.status(),
            graphs=self._runner.graph_status(),
            step_threads=self._runner.step_threads(),
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
                "Shorten it or start a new conversation"
                + (", or raise --device-cache." if self._is_cache_the_limit else "."),
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
        self._fetcher.begin(request)
        self._scheduler.add(request)
        return request_id

    def cached_tokens(self, token_ids: Sequence[int]) -> CachedTokens:
        """Return how much of a context needs no computing, by tier in memory; changes nothing."""
        device = self.cache.num_cached_tokens(token_ids)
        host = (
            self._offload.num_cached_tokens(token_ids, device) if self._offload is not None else 0
        )
        return CachedTokens(device=device, host=host)

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Bring a context's KV up from slower tiers, for a request that will probably follow.

        One at a time: the newest is the likeliest.
        """
        self._fetcher.prefetch(token_ids)

    def pin(self, token_ids: Sequence[int], label: str, done: Callable[[int], None]) -> None:
        """Never forget a context's KV; `done` hears how many tokens, perhaps on another thread."""
        if self._connector is None:
            done(0)
            return
        self._keep_waiting()
        self._connector.pin(tuple(token_ids), label, done)

    def forget(
        self, contexts: Sequence[tuple[Sequence[int], int]], done: Callable[[], None]
    ) -> None:
        """Drop the KV of contexts behind so many tokens of each.

        `done` is called, perhaps on another thread, when nothing of theirs is still to be written:
        what a slower tier has of them can then be removed.
        """
        self._keep_waiting()
        self._fetcher.give_up_prefetch()  # it may be bringing up what is to go
        waits = self.speculation.forget(contexts)
        for token_ids, num_kept in contexts:
            self.cache.forget(tuple(token_ids), num_kept)
            if self._connector is not None:
                self._connector.forget(tuple(token_ids))
        if self._connector is not None:
            waits.append(self._connector.when_written)
        for wait in waits:  # one after another, each on the thread of the one before
            done = partial(wait, done)
        done()

    def _keep_waiting(self) -> None:
        """Have everything written that waits for a step to go with."""
        self._invalidate(self._kv_verifier.begin(self._run_alone))
        self._invalidate(self._kv_verifier.end_alone(self._run_alone))

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request at the next step, all its samples; what was generated stays."""
        for request in self._scheduler.requests():
            if request.request_id == request_id:
                request.cancelled_for = reason

    def step(self) -> list[RequestEvent]:
        """Run one forward pass over whatever is due; return what happened."""
        events = self._step()
        if self.speculation.is_on:
            self.speculation.update(self._scheduler.requests())
        return events

    def prepare(self) -> None:
        """Do now what the first decode steps would wait for: weights laid out, replacements proven.

        What is done is not done again.
        """
        self._runner.prepare()
        if self.speculation.is_on:
            self.speculation.prepare()

    def _keep_backlog(self) -> None:
        """Have written what there was no room for; with nothing else to do, wait for room."""
        if self._connector is not None:
            patience_s = 0.0 if self._has_answers_due else _ROOM_PATIENCE_S
            self._connector.write_behind.go_on(patience_s)

    def _step(self) -> list[RequestEvent]:
        self._keep_backlog()
        events = self._output.end_cancelled()
        requests = self._scheduler.requests()
        is_fetching = self._fetcher.settle(requests)
        if requests and all(request.is_decoding for request in requests):
            self.prepare()  # nobody waits for a first token
        is_met = any(not request.is_fetching for request in requests)
        self._invalidate(self._kv_verifier.begin(self._run_alone, of_all=is_met))
        try:
            plan = self._plan()
        except Exception as error:  # one request too odd to plan must not end all that follow
            _log.exception("no step could be planned")
            self._invalidate(self._kv_verifier.end_alone(self._run_alone))
            return events + self._output.fail_all(_explain(error))
        if plan:
            self._output.mark_started(plan)
            return events + self._compute(plan)
        if self._kv_verifier.pieces:
            self._invalidate(self._kv_verifier.end_alone(self._run_alone))
            return events
        # Those that have just met the front they waited for are waiting for KV only now.
        is_fetching |= any(request.is_fetching for request in self._scheduler.requests())
        is_fetching |= self._fetcher.is_under_way
        return events if is_fetching else events + self._output.end_stuck()

    def _plan(self) -> list[ScheduledRequest]:
        """Choose the requests of the next step, with drafts where speculation is on."""
        plan = self._scheduler.schedule()
        if self.speculation.is_on:
            plan = self.speculation.draft(plan, self.cache, self._limits)
        return plan

    def close(self) -> None:
        """Keep what unfinished requests have computed, and finish writing, within bounds."""
        self.speculation.close()
        self._fetcher.give_up(self._scheduler.requests())
        if self._connector is not None:
            for request in self.running():
                computed = request.ids[: request.num_computed]
                self._kv_verifier.save(computed, request.spec.is_one_shot)
            wrong = self._kv_verifier.begin(self._run_alone)
            for restored in (*wrong, *self._kv_verifier.end_alone(self._run_alone)):
                self._connector.quarantine(restored)
            self._connector.close()
        if self._offload is not None:  # last: both may share a thread
            self._offload.close()

    def _compute(self, plan: Sequence[ScheduledRequest]) -> list[RequestEvent]:
        """Run the plan as one batch; where that fails, request by request.

        One request that cannot be answered, or a batch too large for the device's memory, must not
        cost the others their answers. Running a request again is harmless: it writes the same
        slots. Drafts are left out then, for the failure may be theirs.
        """
        began_s = self._clock()
        is_alone = len(plan) == 1 and not self._kv_verifier.pieces and not plan[0].drafts
        try:
            if (tokens := self._draw_at_once(plan)) is None:
                logits = self._runner.run(plan, self._kv_verifier.pieces)
                num_rows = len(logits) - len(self._kv_verifier.pieces)
                if failed := self._kv_verifier.end(logits[num_rows:], self._run_alone):
                    self._invalidate(failed)
                    return []  # nothing was counted: what still runs is computed again
                tokens = draw(plan, logits[:num_rows])
        except Exception as error:  # a model's own code can fail with anything
            _log.error("step failed requests=%d", len(plan), exc_info=error)
            explanation = _explain(error)
        else:
            self._note_step(plan, tokens, self._clock() - began_s)
            return self._advance(plan, tokens)
        # Outside the handler: the error held on to the failed step's tensors.
        if is_alone:
            return self._output.fail(plan[0].request, explanation)
        self._invalidate(self._kv_verifier.end_alone(self._run_alone))
        events: list[RequestEvent] = []
        for scheduled in plan:
            if (
                scheduled.request.state is State.RUNNING
            ):  # or it has failed with another of its samples
                events.extend(self._compute([replace(scheduled, drafts=())]))
        return events

    def _draw_at_once(
        self, plan: Sequence[ScheduledRequest]
    ) -> dict[ScheduledRequest, list[int]] | None:
        """Compute the plan and draw by one graph; None where there is none, or it cannot draw."""
        if not self._runner.has_graphs or self._kv_verifier.pieces:
            return None
        draws = draws_of(plan)
        drawn = self._runner.draw(plan, draws) if draws is not None else None
        return tokens_of(plan, drawn) if drawn is not None else None

    def _advance(
        self, plan: Sequence[ScheduledRequest], tokens: dict[ScheduledRequest, list[int]]
    ) -> list[RequestEvent]:
        events = self._output.advance(plan, tokens)
        self._keep_whole_packs(plan)
        return events

    def _keep_whole_packs(self, plan: Sequence[ScheduledRequest]) -> None:
        """Have the KV of what still grows written behind, as far as it fills packs.

        A process that is killed within its first answer has then not lost a long document's.
        """
        if self._connector is None:
            return
        write_behind = self._connector.write_behind
        for request in (scheduled.request for scheduled in plan):
            request.num_offered = min(request.num_offered, request.num_computed)
            is_due = request.num_computed - request.num_offered >= write_behind.pack_tokens
            if is_due and request.state is State.RUNNING:
                request.num_offered = request.num_computed
                computed = request.ids[: request.num_computed]
                write_behind.save_packs(computed, request.spec.is_one_shot)

    def _run_alone(self, pieces: "Sequence[SequencePiece]") -> torch.Tensor:
        return self._runner.run((), pieces)

    def _invalidate(self, failed: "Sequence[RestoredContext]") -> None:
        """What came up is not this model's: have it forgotten, and begin again whoever uses it."""
        for restored in failed:
            _log.warning("restored KV is wrong tokens=%d", len(restored.ids) - restored.num_trusted)
            self._scheduler.invalidate(restored.ids, restored.num_trusted)
            assert self._connector is not None
            self._connector.quarantine(restored)

    def _note_step(
        self,
        plan: Sequence[ScheduledRequest],
        tokens: dict[ScheduledRequest, list[int]],
        seconds: float,
    ) -> None:
        """Count a step, and note its cost where restoring and drafting are weighed."""
        num_rows = sum(scheduled.num_rows for scheduled in plan)
        self._num_steps += 1
        self._num_tokens += num_rows
        if self.speculation.is_on:
            self.speculation.note(plan, tokens, seconds)
        if self._connector is not None:
            self._connector.planner.note_prefill(num_rows, seconds)
        if self._offload is not None:
            self._offload.rates.note_prefill(num_rows, seconds)


def _explain(error: Exception) -> KvchatError:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return GenerationError(
            "The device ran out of memory while answering.",
            "Lower --device-cache or use a smaller model.",
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return GenerationError(f"The forward pass failed: {reason[:200].rstrip('.')}.")
