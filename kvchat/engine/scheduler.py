"""Scheduler: which requests run in the next step, and how many tokens of each.

Continuous batching: requests join and leave at every step. Prompts are computed in chunks beside
decoding requests, under one token budget. The scheduler reserves blocks through the cache manager
and preempts requests when blocks run out.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.keys import common_tokens, encode_ids
from kvchat.cache.thinned_kv import start_thinned
from kvchat.core.types import CachedTokens, MissReason, TokenIds
from kvchat.engine.request import Request, State, Thinning

# A waiting request's cost falls by this many tokens per step, so that short or cached prompts do
# not delay a long uncached one for ever.
_TOKENS_PER_STEP_WAITED = 64
# At most this many waiting requests, the oldest, are compared: each comparison costs a lookup.
_MAX_COMPARED = 64
# A prompt whose long step was given up for a new request keeps as many tokens as this many such
# steps have: so it loses a fifth of its time at most.
_KEPT_STEPS = 4
# At most so many tokens of a step have their logprobs told: each needs a whole row of logits.
_MAX_SCORED = 128


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_tokens` tokens of a request to compute in this step.

    drafts           guesses of the tokens after its newest one; the same step verifies them
    completes        whether the step computes the request's newest token, so that the next can be
                     sampled
    num_rows         rows of the forward pass: tokens to compute plus drafts to verify
    num_logit_rows   rows of logits, after the last tokens; after each where a prompt is scored
    """

    request: Request
    num_tokens: int
    drafts: tuple[int, ...] = ()
    completes: bool = field(init=False, compare=False)
    num_rows: int = field(init=False, compare=False)
    num_logit_rows: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        request, set_field = self.request, partial(object.__setattr__, self)
        completes = self.num_tokens == len(request.ids) - request.num_computed
        num_logit_rows = 1 + len(self.drafts) if completes else 0
        if request.spec.scores_prompt and request.is_to_be_scored:
            num_logit_rows = self.num_tokens
        set_field("completes", completes)
        set_field("num_rows", self.num_tokens + len(self.drafts))
        set_field("num_logit_rows", num_logit_rows)


class Scheduler:
    """Owns the queues. `max_step_tokens` bounds a step, `max_running` the requests with blocks.

    A step in which no request decodes has up to `max_prefill_tokens`: it keeps no answer waiting.
    Of a request with a long context it has fewer, so that its attention stays short too: tokens
    times context are at most `max_pairs`, as long as that leaves `max_step_tokens`; 0: no limit.
    At most `max_step_tokens` requests run, and all that decode get their token in every step. If
    they leave less than half of a step for prompts, prompts get half of one on top: else those of
    new requests would be read a few tokens at a time. A prompt that needs more than that leaves
    half to those after it, as far as they need it, so a long one keeps a short one waiting for one
    step. Where places or blocks are short, clients share them, and requests of one client.
    `promote` is called before a request starts. It returns true if it began to promote KV for
    the request, which then waits. `drop_kv` is called before tokens of a request with a Thinning
    are scheduled.
    """

    def __init__(
        self,
        cache: CacheManager,
        max_step_tokens: int,
        max_running: int,
        promote: Callable[[Request], bool] = lambda request: False,
        max_prefill_tokens: int = 0,
        max_pairs: int = 0,
        drop_kv: Callable[[Request, Thinning], None] = lambda request, thinning: None,
    ) -> None:
        self._cache = cache
        self._drop_kv = drop_kv
        self._max_pairs = max_pairs
        self._max_prefill_tokens = max(max_prefill_tokens, max_step_tokens)
        self._promote = promote
        self._max_step_tokens = max_step_tokens
        # Each request that decodes has a row in every step: with more of them than a step has
        # tokens, steps would be larger than they may be, or tokens would have to take turns.
        self._max_running = min(max_running, max_step_tokens)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._is_full = False  # a waiting request had no room, and no blocks were released since
        self._is_next_short = False  # a step was given up for a request that comes
        self._num_to_score = 0  # tokens that the step being planned may still score
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def requests(self) -> list[Request]:
        """Return every unfinished request: those running, oldest first, then those waiting."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Queue a waiting request, or add a running sibling that shares another request's blocks.

        A sibling beyond `max_running` goes back to wait; its KV stays in the tree.
        """
        if request.state is State.WAITING:
            self._waiting.append(request)
            return
        self._running.append(request)
        if len(self._running) > self._max_running:
            self._send_back(request)

    def finish(self, request: Request) -> None:
        """Remove a request and release its blocks; their KV stays cached for later requests."""
        self._release(request)
        queue = self._waiting if request.state is State.WAITING else self._running
        queue.remove(request)
        request.state = State.FINISHED
        if request.arrival is not None:
            request.arrival.give_up()

    def drop(self, request: Request) -> None:
        """Remove a request in any state without releasing its blocks."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        request.state = State.FINISHED

    def invalidate(self, token_ids: TokenIds, num_trusted: int) -> None:
        """Send back to wait every running request that uses wrong KV of a context.

        The context's first `num_trusted` tokens are right; requests that share more restart with
        nothing computed.
        """
        encoded = encode_ids(token_ids)
        for request in list(self._running):
            computed = encode_ids(request.ids[: request.num_computed])
            if common_tokens(computed, encoded) <= num_trusted:
                continue
            assert request.table is not None
            self._cache.release(request.table, [])
            request.table, request.num_computed, request.arrival = None, 0, None
            request.num_again = 0
            request.told_miss_reason = MissReason.QUARANTINED
            if not request.num_generated:
                request.cached = None
            self._send_back(request)

    def schedule(self, is_short: bool = False, most_beside: int = 0) -> list[ScheduledRequest]:
        """Choose the requests of the next step and reserve their blocks.

        A short step has at most `max_step_tokens` in any case. It, and one in which a request
        decodes, has at most `most_beside` tokens of prompts; 0: no other limit. The result is empty
        if nothing can run.
        """
        most = self._max_prefill_tokens
        decoding = {request for request in self._running if request.is_decoding}
        if is_short or decoding or self._is_next_short:
            most = self._max_step_tokens
        self._is_next_short = False  # it had room for all of a small request
        self._num_to_score = _MAX_SCORED
        budget = max(most - len(decoding), most // 2, 1)
        if most_beside and (is_short or decoding):
            budget = min(budget, most_beside)
        self._share()
        plan = list(self._continue_running(budget, decoding))
        budget -= sum(item.num_tokens for item in plan if item.request not in decoding)
        plan.extend(self._admit(budget))
        for request in self._waiting:
            request.steps_waited += 1
        return plan

    def _share(self) -> None:
        """Where places or blocks are short, send back a sample of the client that has the most of
        them, or of one client's request, for one that waits and has less. One in a step: that is
        soon enough.
        """
        is_short = len(self._running) >= self._max_running
        ready = [request for request in self._waiting if request.num_due]
        if not (is_short or self._is_full) or not ready or not self._running:
            return
        shares = Shares(self._running)
        waiting = min(ready, key=shares.places)
        needed = 0 if is_short else -(-len(waiting.ids) // self._cache.block_size)
        own = [each for each in self._running if each.spec.client == waiting.spec.client]
        for running in (self._running, own):
            if running and shares.is_due(waiting, shares.largest(running), needed):
                self._send_back(shares.largest(running))
                return

    def may_give_way(self, plan: Sequence[ScheduledRequest]) -> bool:
        """Whether a step may be given up for a new request: it is larger than steps usually are.

        Only if no request decodes in it, and its prompts lost none of their latest long steps.
        """
        is_long = sum(scheduled.num_tokens for scheduled in plan) > self._max_step_tokens
        requests = [scheduled.request for scheduled in plan]
        return is_long and not any(r.is_decoding or r.num_computed < r.kept_until for r in requests)

    def give_way(self, plan: Sequence[ScheduledRequest]) -> None:
        """Note that a step was given up for a new request; the next one is short.

        Its prompts keep some long steps before another may be given up, so that they are read
        however many requests come.
        """
        self._is_next_short = True
        for request in (scheduled.request for scheduled in plan):
            request.kept_until = request.num_computed + _KEPT_STEPS * self._max_prefill_tokens

    def _continue_running(
        self, prefill_budget: int, decoding: Collection[Request]
    ) -> Iterator[ScheduledRequest]:
        """Schedule running requests, oldest first; every `decoding` one gets its token."""
        whole, index = prefill_budget, 0
        while index < len(self._running):
            request = self._running[index]
            if request.arrival is not None and request.is_to_join:
                self._join(request)
            self._thin(request)
            is_decoding = request in decoding
            if is_decoding:
                num_tokens = request.num_due
            else:
                is_long = request.num_due > whole
                most = self._left_for(prefill_budget, index) if is_long else prefill_budget
                num_tokens = self._num_tokens(request, most)
            if num_tokens and not self._reserve_or_preempt(index, num_tokens):
                continue  # this request was preempted; the next one now has its index
            if num_tokens:
                if not is_decoding:
                    prefill_budget -= num_tokens
                    self._note_scored(request, num_tokens)
                yield ScheduledRequest(request, num_tokens)
            index += 1

    def _left_for(self, budget: int, index: int) -> int:
        """Return how much of `budget` the running request `index` may take for a long prompt."""
        half = budget // 2
        wanted = sum(r.num_due for r in self._running[index + 1 :] if not r.is_decoding)
        if wanted < half and len(self._running) < self._max_running and not self._is_full:
            wanted += self._num_wanted_by_waiting()
        return budget - min(half, wanted)

    def _num_wanted_by_waiting(self) -> int:
        """Return how many tokens the waiting request that is next has to compute; 0 for none."""
        request = self._next_waiting()
        if request is None:
            return 0
        return len(request.ids) - self._cache.num_reusable_tokens(self._reusable(request))

    def _num_tokens(self, request: Request, budget: int) -> int:
        """Return how many of `budget` tokens a step computes of a request."""
        if self._max_pairs and budget > self._max_step_tokens:
            few = self._max_pairs // (request.num_computed + 1)
            # A power of two: the processor's library compiles code for each number of rows.
            budget = min(budget, max(self._max_step_tokens, 1 << max(0, few.bit_length() - 1)))
        if request.is_to_be_scored:
            budget = min(budget, self._num_to_score)
        return min(request.num_due, budget)

    def _note_scored(self, request: Request, num_tokens: int) -> None:
        if request.is_to_be_scored:
            self._num_to_score -= num_tokens

    def _join(self, request: Request) -> None:
        """Give a request the KV restored after the front that it has computed."""
        assert request.table is not None
        assert request.arrival is not None
        before, arrival = request.num_computed, request.arrival
        self._cache.release(request.table, request.ids[:before])
        request.table = self._new_table(request)
        request.num_computed = request.table.cached_len
        request.end_fetching()
        if request.cached is not None:
            num_joined = max(0, request.num_computed - before)
            request.cached = request.cached.plus({arrival.last_tier: num_joined})

    def _reserve_or_preempt(self, index: int, num_tokens: int) -> bool:
        """Reserve blocks for the running request `index`; false if it was preempted itself.

        Until they fit, the youngest of those with the most places is preempted, of it and those
        after it: the step is planned for those before.
        """
        request = self._running[index]
        while not self._reserve(request, num_tokens):
            largest = Shares(self._running).largest(self._running[index:])
            self._preempt(largest)
            if largest is request:
                return False
        return True

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        assert request.table is not None
        start = request.num_computed
        return self._cache.reserve(request.table, start, start + num_tokens)

    def _preempt(self, request: Request) -> None:
        self._send_back(request)
        self.num_preempted += 1

    def _send_back(self, request: Request) -> None:
        """Move a running request to the front of the waiting queue; it resumes by prefix match."""
        self._release(request)
        self._running.remove(request)
        request.has_asked_quick = request.is_thinned = False
        request.state = State.WAITING
        self._waiting.insert(0, request)

    def _release(self, request: Request) -> None:
        if request.table is not None:
            self._cache.release(request.table, request.ids[: request.num_computed])
            request.table = None
            request.num_computed = request.num_again = 0
            self._is_full = False

    def _admit(self, budget: int) -> Iterator[ScheduledRequest]:
        """Start waiting requests while the token budget, `max_running` and free blocks allow."""
        while budget > 0 and self._waiting and len(self._running) < self._max_running:
            request = self._next_waiting()
            if request is None or not self._start(request):
                return
            self._thin(request)
            num_tokens = self._num_tokens(request, budget)
            if not num_tokens:
                continue  # other requests have already computed its front
            if not self._reserve(request, num_tokens):
                self._preempt(request)
                return
            request.steps_waited = 0
            budget -= num_tokens
            self._note_scored(request, num_tokens)
            yield ScheduledRequest(request, num_tokens)

    def _next_waiting(self) -> Request | None:
        """Choose the sample with the fewest tokens left to compute, less its bonus for waiting, of
        those whose clients, and then requests, have the fewest samples running.

        A request waits if a running one is computing its next block. It also waits while a slower
        tier delivers its KV, unless a front is left to compute in the meantime.
        """
        shares = Shares(self._running)
        ready = [request for request in self._waiting if request.num_due]
        fewest = min(map(shares.places, ready), default=(0, 0))
        best, best_cost = None, 0.0
        first = (request for request in ready if shares.places(request) == fewest)
        for request in islice(first, _MAX_COMPARED):
            reusable = self._reusable(request)
            cached = self._cache.num_reusable_tokens(reusable)
            if reusable is request.ids and self._is_being_computed(request, cached):
                continue
            cost = len(request.ids) - cached - _TOKENS_PER_STEP_WAITED * request.steps_waited
            if best is None or cost < best_cost:
                best, best_cost = request, cost
        return best

    def _reusable(self, request: Request) -> "array[int]":
        """Return the leading ids whose KV a request may find in the cache and the one after them:
        all, but where a prompt is scored only what it has scored before it was sent back, and where
        KV of its beginning is to be dropped only that.
        """
        ids = request.ids
        if request.is_to_be_scored:
            return ids[: len(request.scored) + 1]
        return ids if request.thins_at is None else ids[: request.thins_at + 1]

    def _is_being_computed(self, request: Request, cached: int) -> bool:
        end = cached + self._cache.block_size
        if end >= len(request.ids):
            return False
        return any(
            other.num_computed < end <= len(other.ids) and other.ids[:end] == request.ids[:end]
            for other in self._running
        )

    def _thin(self, request: Request) -> None:
        if request.spec.thinning is not None:
            self._drop_kv(request, request.spec.thinning)

    def _new_table(self, request: Request) -> BlockTable:
        """Return the table that a request starts from: the longest known prefix."""
        if request.beginning is not None:
            table = start_thinned(self._cache, request.beginning, request.ids)
            if table is not None:
                return table
        return self._cache.start(self._reusable(request), request.moved_under)

    def _start(self, request: Request) -> bool:
        """Match the request's prefix and start it, if its whole context has room now.

        Leaves room for one more block of every running request. Otherwise the new request, as the
        youngest, would soon be preempted.
        """
        table = self._new_table(request)
        has_room = self._cache.has_room(table, len(request.ids), len(self._running))
        needs_no_more = request.is_to_be_scored or table.is_thinned
        is_promoting = has_room and not needs_no_more and self._promote(request)
        self._is_full = not has_room
        if not has_room or is_promoting:
            self._cache.release(table, request.ids[: table.cached_len])
            return False
        request.table = table
        request.is_thinned, request.slot_scores = table.is_thinned, None
        request.num_computed = table.cached_len
        if request.cached is None:
            cached_len, arrival = table.cached_len, request.arrival
            request.cached = (
                CachedTokens(cached_len) if arrival is None else arrival.cached(cached_len)
            )
        request.end_fetching()
        self._waiting.remove(request)
        request.state = State.RUNNING
        self._running.append(request)
        return True


class Shares:
    """How many places and how much KV each client has, and each request; made anew for each
    decision.

    A place is a running sample. Clients share first: a program that opens many requests has no more
    than one that opens a few, if both want more. The requests of one client share what it has.
    """

    def __init__(self, running: Sequence[Request]) -> None:
        self._running = running
        self._places = Counter(owner for request in running for owner in _owners(request))

    def places(self, request: Request) -> tuple[int, int]:
        """Return the places of a request's client, and its own: the fewer, the sooner it runs."""
        client, own = _owners(request)
        return self._places[client], self._places[own]

    def largest(self, running: Sequence[Request]) -> Request:
        """Return the youngest sample of the request with most places of the client with most.

        `running` are one or more samples, the oldest first.
        """
        return max(reversed(running), key=self.places)

    def is_due(self, waiting: Request, running: Request, needed: int = 0) -> bool:
        """Return whether a waiting sample should have the place of a running one.

        So it is if its client, or of one client its request, has two places fewer: then both do not
        take turns. With `needed` blocks it must also have fewer than the other has now.
        """
        owners = zip(_owners(waiting), _owners(running), strict=True)
        ours, theirs = next((each for each in owners if each[0] != each[1]), (None, None))
        if ours == theirs or self._places[theirs] <= self._places[ours] + 1:
            return False
        return not needed or self._num_blocks(ours) + needed < self._num_blocks(theirs)

    def _num_blocks(self, owner: Hashable) -> int:
        """Return how many blocks a client or a request has; samples share some."""
        tables = [each.table for each in self._running if owner in _owners(each)]
        return len({block for table in tables if table is not None for block in table.blocks})


def _owners(request: Request) -> tuple[Hashable, Hashable]:
    """Return what stands for a request's client, and for the request."""
    return request.spec.client, request.request_id
