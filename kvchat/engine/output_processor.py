"""OutputProcessor: appends drawn tokens to requests, forks and ends requests, makes the events.

It also ends cancelled, stuck and failed requests, and has what they computed kept by slower tiers:
of those that still run too, so that the KV of a long document survives if the process is killed
during its first answer.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.chain import KvChain
from kvchat.core.errors import GenerationError, KvchatError
from kvchat.core.events import (
    PrefillProgress,
    PromptScored,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.types import CachedTokens, FinishReason, TokenLogprobs
from kvchat.engine.kv_mover import KvMover
from kvchat.engine.kv_verifier import KvVerifier
from kvchat.engine.request import Request, State
from kvchat.engine.request_trace import RequestTrace
from kvchat.engine.runner import Drawn
from kvchat.engine.scheduler import ScheduledRequest, Scheduler
from kvchat.engine.speculation import accepted_len

_log = logging.getLogger(__name__)

# A prompt that takes longer than this is told of before its first step, unless it has few tokens:
# then no bar is missed.
_SOON_S, _SOON_TOKENS = 0.3, 64
# Copying snapshots of recurrent state takes time, which must not delay the first token.
_TOKENS_BEFORE_SNAPSHOT = 2
_FORMAT_FAILED = "Following the format of the answer failed."


class OutputProcessor:
    """Appends to the requests of one scheduler, and ends them.

    `max_context` bounds prompt and completion together; `clock` returns seconds. Finished contexts
    go to `kv_verifier`, which has them kept in `chain`, and those over moved KV to `kv_mover`. The
    chain's planner tells how long a prompt takes. `trace` notes the requests that end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        chain: KvChain,
        kv_verifier: KvVerifier,
        max_context: int,
        clock: Callable[[], float],
        kv_mover: KvMover,
        trace: RequestTrace | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._kv_verifier = kv_verifier
        self._max_context = max_context
        self._clock = clock
        self._chain = chain
        self._kv_mover = kv_mover
        self._trace = trace

    def mark_started(self, plan: Sequence[ScheduledRequest]) -> list[RequestEvent]:
        """Note the time of requests that start in a step; return the progress of those whose
        prompts take long, which is told before the step: it may take seconds.
        """
        now_s = self._clock()
        starting = [s.request for s in plan if s.request.clock.started_s is None]
        for request in starting:
            request.clock.started_s = now_s
        prompts = (r for r in starting if not r.num_generated and r.num_uncomputed >= _SOON_TOKENS)
        told = [self._progress(request) for request in prompts]
        return [*(event for event in told if (event.left_s or 0.0) > _SOON_S)]

    def _progress(self, request: Request) -> PrefillProgress:
        return PrefillProgress(
            request.request_id,
            request.cached or CachedTokens(),
            request.num_computed,
            request.num_prompt_tokens,
            self._chain.planner.prefill.seconds_of(request.num_computed, request.num_prompt_tokens),
        )

    def advance(self, plan: Sequence[ScheduledRequest], drawn: Drawn) -> list[RequestEvent]:
        """Count the computed tokens, add full blocks to the tree, and append the drawn tokens."""
        events: list[RequestEvent] = []
        for scheduled in plan:
            request = scheduled.request
            if request.state is State.FINISHED:
                continue  # ended because another of its samples failed
            if (error := drawn.failed.get(scheduled)) is not None:
                events.extend(self.fail(request, error))
                continue
            assert request.table is not None
            tokens = drawn.tokens.get(scheduled, [])
            num_right = accepted_len(scheduled.drafts, tokens) if scheduled.drafts else 0
            self._count_computed(scheduled, num_right)
            self._cache.commit(request.table, request.ids, request.num_computed)
            if request.clock.first_token_s is None:
                events.append(self._progress(request))
            if scored := drawn.scored.get(scheduled):
                request.scored += scored
                events.append(PromptScored(request.request_id, tuple(scored)))
            logprobs = drawn.logprobs.get(scheduled, [])
            if scheduled.drafts:
                events.extend(self._append_verified(request, num_right, tokens, logprobs))
                if request.table is not None:
                    self._cache.rewind(request.table, len(request.ids))
            elif tokens:
                events.extend(self._append_drawn(request, tokens, logprobs))
        self._save([scheduled.request for scheduled in plan])
        return events

    def _save(self, requests: Sequence[Request]) -> None:
        """Have slower tiers keep what the requests of a step have filled with it."""
        if self._chain.has_slow and self._cache.has_state:
            self._save_prompts(requests)
        elif self._chain.has_slow:
            self._save_whole_packs(requests)
        if self._chain.shared:
            self._share_beginnings(requests)

    def _save_whole_packs(self, requests: Sequence[Request]) -> None:
        pack_tokens = self._chain.pack_tokens
        for request in requests:
            request.num_offered = min(request.num_offered, request.num_computed)
            is_due = request.num_computed - request.num_offered >= pack_tokens
            if is_due and request.is_kept and request.state is State.RUNNING:
                request.num_offered = request.num_computed
                computed = request.ids[: request.num_computed]
                self._chain.save_packs(computed, request.spec.is_one_shot)

    def _save_prompts(self, requests: Sequence[Request]) -> None:
        """Save prompts with their snapshots of recurrent state, once the answer has begun.

        Not before: a state that is not finite shows only in the logits.
        """
        for request in requests:
            is_due = request.num_generated >= _TOKENS_BEFORE_SNAPSHOT and not request.num_offered
            if is_due and request.spec.is_kept and request.state is State.RUNNING:
                request.num_offered = request.num_computed
                computed = request.ids[: request.num_computed]
                self._kv_verifier.save(computed, request.spec.is_one_shot)

    def _share_beginnings(self, requests: Sequence[Request]) -> None:
        """Save what other machines may have of prompts that have been computed now."""
        for request in requests:
            if request.spec.num_shared and request.num_generated == 1 and not request.moved_under:
                self._chain.share(request.ids[: request.spec.num_shared])

    def _count_computed(self, scheduled: ScheduledRequest, num_right: int) -> None:
        """Count the tokens of a step, and how many of its right drafts will not count."""
        request = scheduled.request
        assert request.table is not None
        end, num_again = request.num_computed + scheduled.num_tokens, 0
        if scheduled.drafts:
            num_settled = self._cache.settle_drafts(request.table, end, num_right)
            num_again = end + num_right - num_settled
        request.num_computed, request.num_again = end - max(0, num_again - num_right), num_again

    def _append_verified(
        self,
        request: Request,
        num_accepted: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
    ) -> list[RequestEvent]:
        """Append the accepted drafts and the token drawn after them, until one ends the request.

        The step has written the KV of all drafts; that of refused ones is never read. A recurrent
        state may have to read accepted ones again: those do not count as computed.
        """
        start = len(request.ids)
        num_computed = num_accepted - request.num_again
        ending: list[RequestEvent] = []
        for index in range(num_accepted + 1):
            request.drafting.num_accepted += index < num_accepted
            told = logprobs[index] if logprobs else None
            ending = self._append(request, tokens[index], index < num_computed, told)
            if ending:
                break
        return [*_generated(request, start, logprobs), *ending]

    def _append_drawn(
        self, request: Request, tokens: list[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[RequestEvent]:
        """Fork the request's siblings, then append one drawn token to the request and to each."""
        events: list[RequestEvent] = []
        siblings = self._fork(request)
        for index, (sibling, token) in enumerate(zip([request, *siblings], tokens, strict=True)):
            if sibling.state is not State.FINISHED:  # another sample may have failed
                start = len(sibling.ids)
                own = logprobs[index : index + 1]
                ending = self._append(sibling, token, False, own[0] if own else None)
                events.extend([*_generated(sibling, start, own), *ending])
        return events

    def _fork(self, request: Request) -> list[Request]:
        """Make the siblings, which share the prompt's blocks."""
        assert request.table is not None
        siblings = []
        for number in range(1, 1 + request.num_siblings_to_fork):
            table = self._cache.fork(request.table, request.num_computed)
            sibling = request.sibling(number, table)
            self._scheduler.add(sibling)
            siblings.append(sibling)
        request.num_siblings_to_fork = 0
        return siblings

    def _append(
        self, request: Request, token: int, is_computed: bool, logprobs: TokenLogprobs | None
    ) -> list[RequestEvent]:
        """Append a token; return the events that end the request, if it ends.

        `is_computed` says that the token's KV is already written. `logprobs` are the token's, None
        if the request wants none.
        """
        if request.spec.max_tokens == 0:
            return [self._finish(request, FinishReason.LENGTH)]
        now_s = self._clock()
        if request.clock.first_token_s is None:
            request.clock.first_token_s = now_s
        request.clock.last_token_s = now_s
        if token in request.spec.stop_token_ids:
            request.stop_token = token
            return [replace(self._finish(request, FinishReason.STOP), stop_logprobs=logprobs)]
        request.ids.append(token)
        request.num_computed += is_computed
        try:
            is_stopped = request.watcher is not None and request.watcher.feed(token)
        except Exception as error:  # a watcher is the caller's code
            _log.error("a stop watcher failed", exc_info=error)
            failure = GenerationError("Looking for stop strings failed.", "Answer without --stop.")
            return self.fail(request, failure)
        try:
            is_stopped |= request.constraint is not None and request.constraint.accept(token)
        except Exception as error:  # so is a constraint
            _log.error("a constraint failed", exc_info=error)
            if isinstance(error, KvchatError):
                return self.fail(request, error)
            return self.fail(request, GenerationError(_FORMAT_FAILED))
        if is_stopped:
            return [self._finish(request, FinishReason.STOP)]
        if self._is_at_limit(request):
            return [self._finish(request, FinishReason.LENGTH)]
        if request.only_repeats:
            return [self._finish(request, FinishReason.REPETITION)]
        return []

    def _is_at_limit(self, request: Request) -> bool:
        limit = request.spec.max_tokens
        if limit is not None and request.num_generated >= limit:
            return True
        return len(request.ids) >= self._max_context

    def _finish(self, request: Request, reason: FinishReason) -> SampleFinished:
        computed, usage = request.ids[: request.num_computed], request.usage()
        self._scheduler.finish(request)
        if request.is_kept:
            self._kv_verifier.save(computed, request.spec.is_one_shot)
        if request.moved_under:
            self._kv_mover.note_inexact(computed, request.moved_under)
        timing = request.clock.timing(self._clock())
        if self._trace is not None and request.is_kept:
            self._trace.note(computed, usage, timing, request.spec.is_one_shot)
        return SampleFinished(
            request.request_id,
            request.sample,
            reason,
            usage,
            timing,
            request.stop_token,
            request.miss_reason,
        )

    def end_cancelled(self, requests: list[Request]) -> list[RequestEvent]:
        """End the requests cancelled since the last step, and remove them from `requests`.

        What was generated stays.
        """
        events: list[RequestEvent] = []
        for request in list(requests):
            if request.cancelled_for is not None:
                ending = self._finish(request, request.cancelled_for)
                requests.remove(request)
                # Siblings not yet forked end too: every sample gets its end event.
                samples = range(request.sample, request.sample + 1 + request.num_siblings_to_fork)
                events.extend(replace(ending, sample=sample) for sample in samples)
        return events

    def end_stuck(self) -> list[RequestEvent]:
        """Fail all requests; called when none runs and none can start, so waiting is useless."""
        events: list[RequestEvent] = []
        for request in self._scheduler.requests():
            self._scheduler.finish(request)
            error = GenerationError("The cache has no room for this request.")
            events.append(RequestFailed(request.request_id, error))
        return events

    def fail_all(self, error: KvchatError) -> list[RequestEvent]:
        """End every request; one whose release fails is dropped with its blocks held."""
        events: list[RequestEvent] = []
        for request in self._scheduler.requests():
            try:
                self._scheduler.finish(request)
            except Exception:
                _log.exception("a request could not be released")
                self._scheduler.drop(request)
            if all(event.request_id != request.request_id for event in events):
                events.append(RequestFailed(request.request_id, error))
        return events

    def fail(self, failed: Request, error: KvchatError) -> list[RequestEvent]:
        """End all samples of a request; their computed KV stays cached as far as it is finite.

        A chunk with keys or values that are not finite does not fail its own step. It fails every
        later step that attends to it.
        """
        with_nan, has_thinned = [], False
        for request in self._scheduler.requests():
            if request.request_id != failed.request_id:
                continue
            if request.table is not None:
                has_thinned |= request.table.is_thinned
                request.table.is_thinned = False
                self._cache.drop_states(request.table, request.ids)
                num_finite = self._num_finite(request.table, request.num_computed)
                if num_finite < request.num_computed:
                    with_nan.append((request.ids[: request.num_computed], num_finite))
                    request.num_computed = num_finite
            self._scheduler.finish(request)
        if with_nan or has_thinned:
            self._cache.forget_moved()
        for token_ids, num_finite in with_nan:
            self._cache.forget(token_ids, num_finite)
        return [RequestFailed(failed.request_id, error)]

    def _num_finite(self, table: BlockTable, num_computed: int) -> int:
        """Return how many leading tokens have finite KV; 0 if there is no memory to check.

        Also zeroes the slots written after them.
        """
        try:
            self._cache.zero(table, num_computed)
            return self._cache.num_finite(table, num_computed)
        except (RuntimeError, MemoryError):  # torch's out of memory is a RuntimeError
            _log.warning("KV of a failed request could not be checked, dropping it")
            return 0


def _generated(
    request: Request, start: int, logprobs: Sequence[TokenLogprobs]
) -> list[TokensGenerated]:
    """Return the event for the tokens from `start` on; empty if there are none.

    `logprobs` are those of all tokens that were drawn; a token that ended the request is not told.
    """
    token_ids = tuple(request.ids[start:])
    told = tuple(logprobs[: len(token_ids)])
    return (
        [TokensGenerated(request.request_id, request.sample, token_ids, told)] if token_ids else []
    )
