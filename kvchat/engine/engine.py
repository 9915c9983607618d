"""Engine: submit, step, cancel. One thread owns it and everything below it.

It calls the parts that plan a step, compute it and append its tokens to the requests.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.cache.moved_kv import Moving
from kvchat.cache.planner import LEAST_TELLING_TOKENS
from kvchat.cache.thinned_kv import has_thinned
from kvchat.core.errors import ContextTooLong, DeviceLost, GenerationError, UsageError
from kvchat.core.events import RequestEvent
from kvchat.core.stats import EngineStatus, KvPlaces
from kvchat.core.types import CachedTokens, FinishReason, KeptPositions, MissReason, Pooling
from kvchat.engine.embedding import Embedding, begin_embedding
from kvchat.engine.fetch import Fetcher, Locator
from kvchat.engine.kv_mover import KvMover
from kvchat.engine.kv_thinner import KvThinner
from kvchat.engine.kv_verifier import KvVerifier
from kvchat.engine.next_step import NextStep
from kvchat.engine.output_processor import OutputProcessor
from kvchat.engine.request import Request, RequestSpec, State, Thinning
from kvchat.engine.request_trace import RequestTrace
from kvchat.engine.runner import Drawn, Runner, draw, draw_apart, explained
from kvchat.engine.scheduler import ScheduledRequest, Scheduler
from kvchat.engine.speculation import Limits, Mode, Speculation
from kvchat.engine.step_threads import MOST_ROWS
from kvchat.model.batch import StepAbandoned
from kvchat.model.device import is_lost
from kvchat_kernels.key_rotation import KeyRotation

if TYPE_CHECKING:
    from kvchat.cache.arrivals import RestoredContext
    from kvchat.model.batch import SequencePiece

_log = logging.getLogger(__name__)

# How long a step without other work waits for room in the write queue, in seconds.
_ROOM_PATIENCE_S = 0.02
# A step of few tokens after one of so many seconds can be given up, too.
_SLOW_STEP_S = 0.1
# Prompts beside answers, and read ahead, are read in steps of at most about so many seconds.
_BESIDE_S = 0.4
# The tokens that a measurement of the prefill rate computes: about 0.1 s on a CPU.
_MEASURED_TOKENS = 256


class Engine:
    """Runs requests over one model and one cache.

    `max_context` is the longest context of any request, prompt and completion together; prompts
    hold ids below `vocab_size`. `clock` returns seconds. `chain` has the slower tiers: prompts are
    looked up in them, and finished contexts are kept there. `speculation` adds drafts. The engine
    closes both. `key_rotations` returns the ways in which layers may turn their keys, which moving
    KV needs. `queues_next` lets a runner with graphs queue a decode step before the tokens of the
    step before are read.
    """

    idle_s: float | None = None  # without work there is nothing to look after

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        max_context: int,
        max_step_tokens: int,
        max_running: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        chain: KvChain | None = None,
        speculation: Speculation | None = None,
        max_prefill_tokens: int = 0,
        max_pairs: int = 0,
        queues_next: bool = True,
        key_rotations: Callable[[], Sequence[KeyRotation]] = tuple,
        trace: RequestTrace | None = None,
    ) -> None:
        self.cache = cache
        self.chain = chain or KvChain(cache)
        self._kv_verifier = KvVerifier(cache, self.chain, runner.dtype)  # reserves a block
        self.max_context = min(max_context, cache.max_tokens)
        self._is_cache_the_limit = cache.max_tokens < max_context
        self._vocab_size = vocab_size
        self._runner = runner
        self._fetcher = Fetcher(self.chain)
        promote = self._fetcher.promote
        self._kv_thinner = KvThinner(cache, runner, self._kv_verifier)
        drop_kv = self._kv_thinner.consider
        self._scheduler = Scheduler(
            cache, max_step_tokens, max_running, promote, max_prefill_tokens, max_pairs, drop_kv
        )
        self._draw = draw_apart if cache.has_state else draw
        self._max_step_tokens = max_step_tokens
        self._next_step: NextStep | None = None
        if queues_next and runner.has_graphs:
            self._next_step = NextStep(runner, cache, self.max_context)
        self._clock = clock
        self._prefill_rate = self.chain.planner.prefill
        last, token = self.max_context - 1, vocab_size // 2
        self._kv_mover = KvMover(cache, runner, last, token, key_rotations)
        self._output = OutputProcessor(
            self._scheduler,
            cache,
            self.chain,
            self._kv_verifier,
            self.max_context,
            clock,
            self._kv_mover,
            trace,
        )
        self._locator = Locator(cache, self.chain, self._fetcher, self._kv_thinner)
        self._limits = Limits(vocab_size, self.max_context, max_step_tokens)
        self.speculation = speculation or Speculation(mode=Mode.OFF)
        self._request_ids = count(1)
        self._num_steps = 0
        self._num_tokens = 0
        self._ahead_id: int | None = None
        self._is_measuring = False
        self._last_step_s = 0.0
        self._is_unwanted: Callable[[frozenset[int]], bool] = lambda request_ids: False
        self._is_awaited: Callable[[], bool] = lambda: False

    @property
    def has_work(self) -> bool:
        return self._has_answers_due or self.chain.has_backlog or self._kv_mover.has_inexact

    @property
    def _has_answers_due(self) -> bool:
        return self._scheduler.has_work or self._fetcher.is_busy or self._kv_verifier.has_work

    def status(self) -> EngineStatus:
        """Return the counts shown to users; changes nothing."""
        cache = self.cache.status()
        drafting = self.speculation
        return EngineStatus(
            num_steps=self._num_steps,
            num_tokens_computed=self._num_tokens,
            num_preempted=self._scheduler.num_preempted,
            block_size=self.cache.block_size,
            block_bytes=self.cache.kv_pool.geometry.block_bytes - cache.window_block_bytes,
            num_blocks=cache.num_blocks,
            num_free=cache.num_free,
            num_cached=cache.num_cached,
            num_evicted=cache.num_evicted,
            num_copied=cache.num_copied,
            max_context=self.max_context,
            max_step_tokens=self._max_step_tokens,
            tiers=self.chain.status(),
            speculation=drafting.status() if drafting.is_on else drafting.status_when_off,
            graphs=self._runner.graph_status(),
            step_threads=self._runner.step_threads(),
            kv_dtype=self.cache.kv_pool.geometry.dtype_beside(self._runner.dtype),
            num_window_blocks=cache.num_window_blocks,
            num_free_window_blocks=cache.num_free_window_blocks,
            window_block_bytes=cache.window_block_bytes,
        )

    def running(self) -> list[Request]:
        """Return the requests that hold blocks."""
        return [r for r in self._scheduler.requests() if r.table is not None]

    def submit(self, spec: RequestSpec, submitted_s: float | None = None) -> int:
        """Queue a request; return its id. `submitted_s` is the time of submission, if not now.

        Raises ContextTooLong if the prompt leaves no room for a token. Raises GenerationError for
        an id without an embedding: it would fail the other requests of its step too. Raises
        UsageError for a logit bias of a token that the model does not have.
        """
        self._require_answerable(spec)
        spec = self._with_beginning(spec)
        self.end_read_ahead()
        now_s = self._clock() if submitted_s is None else submitted_s
        request = Request.from_spec(next(self._request_ids), spec, now_s)
        if not spec.scores_prompt:
            self._begin_kv(request)
        self._scheduler.add(request)
        return request.request_id

    def _require_answerable(self, spec: RequestSpec) -> None:
        """Raise the error that `submit` promises for a request that cannot be answered."""
        length = len(spec.prompt_ids)
        if length >= self.max_context:
            raise ContextTooLong(
                f"The prompt has {length:,} tokens, and the context holds {self.max_context:,}.",
                "Shorten it or start a new conversation"
                + (", or raise --device-cache." if self._is_cache_the_limit else "."),
                length,
                self.max_context,
            )
        unknown_ids = [token for token in spec.prompt_ids if not 0 <= token < self._vocab_size]
        if unknown_ids:
            raise GenerationError(
                f"The prompt holds token {unknown_ids[0]}, and the model has {self._vocab_size}.",
                "Its tokenizer and its weights do not belong together.",
            )
        biased = max((token for token, _ in spec.sampling.logit_bias), default=-1)
        if biased >= self._vocab_size:
            raise UsageError(f"logit-bias names token {biased}; the model has {self._vocab_size}.")

    def _begin_kv(self, request: Request) -> None:
        """Choose which KV a request begins with, and begin to bring it to the device."""
        if self._takes_moved(request.spec):
            request.moved_under = request.spec.moved_under
            self._fetcher.give_up_prefetch()
            return
        if request.beginning is not None:
            request.told_miss_reason = MissReason.THINNED
            if has_thinned(self.cache, request.beginning, request.spec.prompt_ids):
                return
        self._fetcher.begin(request)
        if not self.cache.reuse:
            request.told_miss_reason = MissReason.OFF

    def _with_beginning(self, spec: RequestSpec) -> RequestSpec:
        """Return a spec with the thinned beginning that its prompt has; raises UsageError for a
        budget that this model's KV cannot be held to.
        """
        thinning = spec.thinning
        if thinning is not None:
            self._kv_thinner.require_possible()
        if not self._kv_thinner.kept or spec.scores_prompt:
            return spec
        beginning = self._kv_thinner.beginning_of(spec.prompt_ids)
        if beginning is None:
            return spec
        return replace(spec, thinning=replace(thinning or Thinning(), beginning=beginning))

    def _takes_moved(self, spec: RequestSpec) -> bool:
        """Whether moved KV serves a request, as more of it is in memory than of its own."""
        ids, name = spec.prompt_ids, spec.moved_under
        num_moved = self.cache.num_cached_tokens(ids, name) if name else 0
        return bool(num_moved) and num_moved > self.cached_tokens(ids).total

    def cached_tokens(self, token_ids: Sequence[int]) -> CachedTokens:
        """Return how many tokens of a context each memory tier has cached; changes nothing."""
        return self._locator.cached_tokens(token_ids)

    def locate(
        self, contexts: Sequence[Sequence[int]], done: Callable[[list[KvPlaces]], None]
    ) -> None:
        """Call `done` with where the KV of each context is, as `Locator.locate` does.

        The first call measures how fast this model computes, if that is not known and no request
        waits.
        """
        if not self._prefill_rate.is_measured and not self._has_answers_due:
            self._measure_prefill()
        self._locator.locate(contexts, done)

    def _measure_prefill(self) -> None:
        """Prefill some tokens that no later request finds; a request that comes ends it."""
        num_tokens = min(_MEASURED_TOKENS, self._max_step_tokens, self.max_context - 1)
        ids = tuple((7 * i + 1) % self._vocab_size for i in range(num_tokens))
        is_short = num_tokens < LEAST_TELLING_TOKENS  # then it tells no more than another prompt
        if is_short and (not num_tokens or self._prefill_rate.tokens_per_s is not None):
            return
        if self.cache.num_cached_tokens(ids):
            return
        self.submit(RequestSpec(ids, max_tokens=1, is_kept=False))
        self._is_measuring = True
        while self._scheduler.has_work:
            self.step()
        self._is_measuring = False
        self.cache.forget(ids, 0)

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Load a context's KV from slower tiers, for a request that will probably follow.

        A new prefetch replaces the one before: the newest context is the most likely one.
        """
        self._fetcher.prefetch(token_ids)

    def read_ahead(self, token_ids: Sequence[int]) -> None:
        """Prefill a context that a request will probably begin with; it replaces the one before.

        It runs only while nothing else does: every `submit` ends it. Its KV is not kept on slower
        tiers. It does nothing where KV is not reused.
        """
        self.end_read_ahead()
        is_useful = self.cache.reuse and 1 < len(token_ids) < self.max_context
        if is_useful and not self._scheduler.has_work:
            self._ahead_id = self.submit(RequestSpec(tuple(token_ids), max_tokens=1, is_kept=False))

    def end_read_ahead(self) -> None:
        """End the read-ahead at the next step; what was computed stays cached."""
        if self._ahead_id is not None:
            self.cancel(self._ahead_id)
        self._ahead_id = None

    def move_kv(
        self, sources: Sequence[int], targets: Sequence[int], num_own: int, name: str
    ) -> int:
        """Move KV of a context to a shorter one with the same end: see `Moving`. Returns how many
        of its tokens requests of that name then find, 0 if none could be moved.
        """
        return self._kv_mover.move(Moving(sources, targets, num_own, name))

    def thin_beginnings(self, kept: Sequence[KeptPositions]) -> None:
        """From now on, let contexts that begin so go on over the KV of these positions alone."""
        size = self.cache.block_size
        if kept:
            self._kv_thinner.require_possible()
        self._kv_thinner.kept = [each for each in kept if not len(each.positions) % size]

    def repeat_scores(self, token_ids: Sequence[int], part: Sequence[int]) -> list[float] | None:
        """Return a text's attention to what it follows: see `KvThinner.repeated`."""
        self._kv_thinner.require_possible()
        return self._kv_thinner.repeated(token_ids, part)

    def embedding(self, token_ids: Sequence[int], pooling: Pooling) -> Embedding:
        """Return a text's embedding, to compute between steps; errors as `begin_embedding`."""
        limits = self.max_context, self._vocab_size
        return begin_embedding(self.cache, self._runner, token_ids, pooling, *limits)

    def pin(
        self,
        token_ids: Sequence[int],
        label: str,
        done: Callable[[int], None],
        ttl_s: float = math.inf,
    ) -> None:
        """Pin a context's KV on the disk tier, so that it is not evicted for `ttl_s` seconds.

        `done` is called with the number of pinned tokens, perhaps on another thread.
        """
        self._keep_waiting()
        self.chain.pin(tuple(token_ids), label, done, ttl_s)

    def share(self, token_ids: Sequence[int], done: Callable[[int], None]) -> None:
        """Let other machines have a context's KV; `done` is called with the number of tokens that
        they find, perhaps on another thread. Raises UsageError where there is no shared cache.
        """
        if not self.chain.shared:
            raise UsageError("There is no shared cache.", "--shared-cache names one.")
        self.chain.share(tuple(token_ids), done)

    def forget(
        self, contexts: Sequence[tuple[Sequence[int], int]], done: Callable[[], None]
    ) -> None:
        """Drop the KV of contexts; each keeps the KV of its given number of leading tokens.

        `done` is called, perhaps on another thread, once no write of these contexts is pending:
        the caller can then remove them from the disk.
        """
        self._keep_waiting()
        self._fetcher.give_up_prefetch()  # it may be loading one of these contexts
        waits = self.speculation.forget(contexts)
        waits.append(self.chain.forget([(tuple(ids), num_kept) for ids, num_kept in contexts]))
        for wait in waits:  # in sequence: each starts the next on its own thread
            done = partial(wait, done)
        done()

    def _keep_waiting(self) -> None:
        """Run the pending checks now, so that all contexts to keep go to the tiers."""
        self._invalidate(self._kv_verifier.begin(self._run_alone))
        self._invalidate(self._kv_verifier.end_alone(self._run_alone))

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End all samples of a request at the next step; generated tokens stay."""
        for request in self._scheduler.requests():
            if request.request_id == request_id:
                request.cancelled_for = reason

    def abandon_steps(
        self,
        is_unwanted: "Callable[[frozenset[int]], bool]",
        is_awaited: "Callable[[], bool]" = lambda: False,
    ) -> None:
        """Give up a step of prefill once `is_unwanted` is true of the ids of its requests.

        One of more than `max_step_tokens` is also given up once `is_awaited` says that a new
        request waits, unless its prompts have lost one not long ago.

        Both are asked before every product, on the thread that steps. Nothing of such a step
        counts: its requests are computed again, unless they have been cancelled by then.
        """
        self._is_unwanted = is_unwanted
        self._is_awaited = is_awaited

    def step(self) -> list[RequestEvent]:
        """Run one forward pass over the scheduled tokens; return the events."""
        events = self._step()
        if self.speculation.is_on:
            self.speculation.update(self._scheduler.requests())
        return events

    def prepare(self) -> None:
        """Do one-time work now instead of in the first decode steps.

        Examples are weight layouts and checks of replacement kernels. Later calls do not repeat it.
        """
        self._runner.prepare()
        if self.speculation.is_on:
            self.speculation.prepare()

    def _step(self) -> list[RequestEvent]:
        if self.chain.has_backlog:  # a step waits for room to write only if there is no other work
            self.chain.go_on(0.0 if self._has_answers_due else _ROOM_PATIENCE_S)
        requests = self._scheduler.requests()
        is_idle = not requests and self._kv_mover.has_inexact
        if is_idle and (inexact := self._kv_mover.to_read()) is not None:
            self._ahead_id = self.submit(inexact)
            requests = self._scheduler.requests()
        if any(request.cancelled_for is not None for request in requests):
            # At once: what is to be kept of them takes a forward pass.
            return self._output.end_cancelled(requests)
        is_fetching = self._fetcher.settle(requests)
        are_decoding = bool(requests) and all(request.is_decoding for request in requests)
        if are_decoding and (self._runner.has_graphs or self.speculation.is_on):
            self.prepare()  # no request waits for its first token, so this delays none
        if queued := self._queued_plan():
            return self._compute(queued)  # a request that has come since waits for this step anyway
        self._begin_checks(requests)
        try:
            plan = self._plan(requests, are_decoding)
        except Exception as error:  # it must not stop the engine for later requests
            _log.exception("no step could be planned")
            self._invalidate(self._kv_verifier.end_alone(self._run_alone))
            return self._output.fail_all(explained(error, self._runner.device))
        if plan:
            # What is told first ends this step; the next one plans anew.
            is_new = any(each.request.clock.started_s is None for each in plan)
            return (self._output.mark_started(plan) if is_new else []) or self._compute(plan)
        if self._kv_verifier.pieces:
            self._invalidate(self._kv_verifier.end_alone(self._run_alone))
            return []
        # Planning may have found a front already computed, or begun a promotion: such requests now
        # wait for KV.
        is_fetching |= any(request.is_fetching for request in self._scheduler.requests())
        is_fetching |= self._fetcher.is_copying
        return [] if is_fetching else self._output.end_stuck()

    def _queued_plan(self) -> list[ScheduledRequest]:
        """Return the plan of the step that is queued already; empty if there is none."""
        if self._next_step is None or self.speculation.is_on:
            return []
        return self._next_step.plan()

    def _begin_checks(self, requests: Sequence[Request]) -> None:
        """Add rows to the next step that verify restored KV and fingerprint contexts to keep."""
        if self._kv_verifier.has_due:
            is_shared = any(not request.is_fetching for request in requests)
            self._invalidate(self._kv_verifier.begin(self._run_alone, of_all=is_shared))

    def _plan(self, requests: Sequence[Request], are_decoding: bool) -> list[ScheduledRequest]:
        """Choose the requests of the next step, with drafts where speculation is on."""
        most_beside = None
        if not are_decoding:
            start = max((r.num_computed for r in requests if not r.is_decoding), default=0)
            most_beside = self._prefill_rate.tokens_within(_BESIDE_S, start)
        if most_beside is not None:
            most_beside = max(1, most_beside // MOST_ROWS) * MOST_ROWS
        # A read-ahead is ended when a request comes, which must not wait for a long step.
        plan = self._scheduler.schedule(self._ahead_id is not None, most_beside or 0)
        if self.speculation.is_on:
            plan = self.speculation.draft(plan, self.cache, self._limits)
        return plan

    def close(self) -> None:
        """Keep the KV of unfinished requests, and finish pending writes within a time limit."""
        self._fetcher.give_up(self._scheduler.requests())
        try:
            if not is_lost(self._runner.device):  # every check would fail, and delete KV
                self._keep_unfinished()
        finally:
            self.chain.begin_closing()  # a store closes in 15 ms, and the draft has one too
            self.speculation.close()
            self.chain.close()

    def _keep_unfinished(self) -> None:
        for request in (r for r in self.running() if r.is_kept):
            computed = request.ids[: request.num_computed]
            self._kv_verifier.save(computed, request.spec.is_one_shot)
        wrong = self._kv_verifier.begin(self._run_alone)
        self._invalidate([*wrong, *self._kv_verifier.end_alone(self._run_alone)])

    def _compute(self, plan: Sequence[ScheduledRequest]) -> list[RequestEvent]:
        """Run the plan as one batch; if that fails, run each request alone.

        So one bad request, or a batch too large for the device's memory, does not fail the others.
        A second run of a request is safe: it writes the same slots. It runs without drafts, because
        the drafts may have caused the failure.
        """
        began_s = self._clock()
        checks = self._kv_verifier.pieces
        is_alone = len(plan) == 1 and not checks and not plan[0].drafts
        try:
            if (drawn := self._draw_at_once(plan)) is None:
                logits = self._runner.run(plan, checks, self._stop_of(plan))
                num_rows = len(logits) - len(checks)
                if checks and self._fails(logits[num_rows:]):
                    return []  # nothing was counted, so the remaining requests are computed again
                drawn = self._draw(plan, logits[:num_rows])
        except StepAbandoned:
            if self._is_measuring:
                plan[0].request.cancelled_for = FinishReason.CANCELLED
            elif self._scheduler.may_give_way(plan):
                self._scheduler.give_way(plan)
            return []
        except Exception as error:  # a model's own code can fail with anything
            _log.error("step failed requests=%d", len(plan), exc_info=error)
            explanation = explained(error, self._runner.device)
        else:
            if settled := [scheduled for scheduled in plan if scheduled not in drawn.failed]:
                self._note_step(settled, drawn.tokens, self._clock() - began_s)
            return self._output.advance(plan, drawn)
        # Outside the handler: the error object keeps the failed step's tensors alive.
        if is_alone:
            return self._output.fail(plan[0].request, explanation)
        self._invalidate(self._kv_verifier.end_alone(self._run_alone))
        events: list[RequestEvent] = []
        for scheduled in plan:
            # An earlier failure of another sample may have ended it.
            if scheduled.request.state is State.RUNNING:
                events.extend(self._compute([replace(scheduled, drafts=())]))
        return events

    def _stop_of(self, plan: Sequence[ScheduledRequest]) -> "Callable[[], bool] | None":
        """Return what says that a step is not wanted any more; None for a step that is short.

        One that only reads ahead gives way to any request. One of few tokens is short, unless the
        last step was slow. Then it is not given up for a cancel of one request among several: the
        others would wait for their tokens once more.
        """
        request_ids = frozenset(scheduled.request.request_id for scheduled in plan)
        if request_ids == {self._ahead_id}:
            return lambda: self._is_unwanted(request_ids) or self._is_awaited()
        has_few = sum(scheduled.num_tokens for scheduled in plan) <= MOST_ROWS
        if has_few and self._last_step_s < _SLOW_STEP_S:
            return None
        if self._is_measuring or self._scheduler.may_give_way(plan):
            return lambda: self._is_unwanted(request_ids) or self._is_awaited()
        if has_few:
            each = [frozenset({request_id}) for request_id in request_ids]
            return lambda: all(self._is_unwanted(request_id) for request_id in each)
        return lambda: self._is_unwanted(request_ids)

    def _fails(self, logits: torch.Tensor) -> bool:
        """Finish a step's checks with their logits rows; return whether any KV was wrong."""
        failed = self._kv_verifier.end(logits, self._run_alone)
        self._invalidate(failed)
        return bool(failed)

    def _draw_at_once(self, plan: Sequence[ScheduledRequest]) -> Drawn | None:
        """Compute the plan and draw in one graph; None if no graph fits or it cannot draw."""
        if not self._runner.has_graphs or self._kv_verifier.pieces:
            return None
        if self._next_step is not None and not self.speculation.is_on:
            return self._next_step.draw(plan, self._goes_on_alike(plan))
        return self._runner.draw_plan(plan)

    def _goes_on_alike(self, plan: Sequence[ScheduledRequest]) -> bool:
        """Whether the next step is one for the same requests, as far as is known before it."""
        return not self._kv_verifier.has_work and len(plan) == len(self._scheduler.requests())

    def _run_alone(self, pieces: "Sequence[SequencePiece]") -> torch.Tensor:
        return self._runner.run((), pieces)

    def _invalidate(self, failed: "Sequence[RestoredContext]") -> None:
        """Quarantine restored KV that failed its check, and restart the requests that use it.

        Raises DeviceLost where every check fails, as the device computes nothing more.
        """
        if failed and is_lost(self._runner.device):
            raise DeviceLost("The GPU failed: no KV can be checked.", "Start kvchat again.")
        for restored in failed:
            num_tokens = len(restored.ids) - restored.num_trusted
            _log.warning("restored KV failed its check tokens=%d", num_tokens)
            self._scheduler.invalidate(restored.ids, restored.num_trusted)
            self.chain.quarantine(restored)

    def _note_step(
        self,
        plan: Sequence[ScheduledRequest],
        tokens: dict[ScheduledRequest, list[int]],
        seconds: float,
    ) -> None:
        """Count a step, and record its cost for decisions about drafts, restores and promotions."""
        num_rows = sum(scheduled.num_rows for scheduled in plan)
        self._last_step_s = seconds
        self._num_steps += 1
        self._num_tokens += num_rows
        if all(scheduled.request.clock.first_token_s is None for scheduled in plan):
            starts = [(each.request.num_computed, each.num_tokens) for each in plan]
            self._prefill_rate.note([(start, start + n) for start, n in starts], seconds)
        if self.speculation.is_on:
            self.speculation.read_hidden(tokens, self._runner.last_hidden)
            self.speculation.note(plan, tokens, seconds)
