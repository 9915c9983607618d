"""ModelDrafter: drafts with a small model that has the target's vocabulary.

The draft model has its own paged KV cache, with a radix tree and tiers, so it can draft for a
branch or an older conversation without recomputing it. Missing KV is computed after the answer's
first token, a part in each step.

It draws with the target's noise: if both models give the same distribution, they draw the same
token.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.chain import KvChain
from kvchat.cache.state_manager import StateCacheManager
from kvchat.engine.draft_policy import MAX_DRAFTED
from kvchat.engine.drafters import Drafter, DraftOrder, Offer, WhenWritten
from kvchat.engine.request import Request, State
from kvchat.engine.runner import Runner, sampling_row
from kvchat.engine.sampler import as_tokens, row_draw, sample
from kvchat.model.batch import SequencePiece
from kvchat_kernels.state_buffer import StateBuffer

if TYPE_CHECKING:
    from kvchat.cache.arrivals import Arrival

# At most this many missing tokens are computed before a draft; more take several steps.
_MOST_BEHIND = 64
# At most this many are computed with the first drafted token: a verified draft leaves that many.
_MOST_ALONG = MAX_DRAFTED + 1
# Tokens computed in one step to catch up with a request.
_LEAST_CAUGHT_UP, MOST_CAUGHT_UP = 32, 1024
# The weight of the newest measurement in the average speed.
_NEWEST = 0.3


@dataclass(slots=True)
class DraftState:
    """One request's KV in the draft model's cache. Of recurrent layers `guess_state` reads guesses.

    # [0, num_computed)            KV of the request's own ids
    # then len(tail) tokens        KV of drafts, valid as far as the request accepted them
    """

    table: BlockTable
    num_computed: int
    tail: list[int] = field(default_factory=list)
    is_wanted: bool = False
    guess_state: StateBuffer | None = None


class ModelDrafter(Drafter):
    """Drafts with the model of `runner`, whose pools are those of `cache`.

    `vocab_size` and `max_context` are the draft model's own: it makes no offer for a context beyond
    them. The tiers of `chain` keep its KV and restore it; the drafter closes the chain.
    `piece_rows` is the number of rows in which a few missing tokens are computed, if pieces are
    faster than one step; None for one step. No step has more than MOST_CAUGHT_UP tokens of a
    request.
    """

    name = "draft"

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        vocab_size: int,
        max_context: int,
        chain: KvChain | None = None,
        clock: Callable[[], float] = time.perf_counter,
        piece_rows: int | None = None,
    ) -> None:
        self.cache = cache
        self.chain = chain or KvChain(cache)
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_context = min(max_context, cache.max_tokens)
        self._clock = clock
        self._piece_rows = piece_rows if piece_rows is not None else _MOST_BEHIND
        self._most_along = min(_MOST_ALONG, self._piece_rows - 1)
        self._states: dict[Request, DraftState] = {}
        self._arrivals: dict[Request, Arrival | None] = {}
        self._tokens_per_s = 0.0

    # Drafting

    def offer(self, request: Request, most: int) -> Offer | None:
        state = self._state(request)
        most = min(most, self._max_context - len(request.ids))
        if state is None or most < 1:
            return None
        state.is_wanted = True
        missing = request.ids[self._rewound(state, request) :]
        if len(missing) > _MOST_BEHIND or max(missing) >= self._vocab_size:
            return None
        return Offer(self.name, most, is_free=False)

    def prepare(self) -> None:
        self._runner.prepare()

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        for want in wanted:
            state, request = self._states[want.request], want.request
            start, end = self._rewound(state, request), len(request.ids) - 1
            if end - start > self._most_along and self.cache.reserve(state.table, start, end):
                self._make_up(request, state, start, end)

    def _make_up(self, request: Request, state: DraftState, start: int, end: int) -> None:
        """Compute missing tokens in pieces, except those that the next draft step computes."""
        while end - start > self._most_along:
            stop = min(end, start + self._piece_rows)
            self._compute(request, state, start, stop)
            start = stop

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        drafts: dict[Request, list[int]] = {}
        for want in wanted:
            state, request = self._states[want.request], want.request
            end = len(request.ids) + want.num_tokens - 1
            if self.cache.reserve(state.table, self._rewound(state, request), end):
                drafts[request] = []
        longest = max(want.num_tokens for want in wanted)
        for length in range(longest):
            due = [w.request for w in wanted if w.num_tokens > length and w.request in drafts]
            self._draft_one_more(due, drafts)
        return [drafts.get(want.request, []) for want in wanted]

    def _draft_one_more(self, due: list[Request], drafts: dict[Request, list[int]]) -> None:
        """Compute the missing tokens, the newest draft last, and draw the next token."""
        if not due:
            return
        pieces = []
        for request in due:
            state, drafted = self._states[request], drafts[request]
            start = state.num_computed + len(state.tail)
            missing = [*request.ids[start:], *drafted[max(0, start - len(request.ids)) :]]
            pieces.append(SequencePiece(missing, start, state.table.blocks, num_logit_rows=1))
        tokens = self._drawn(pieces, [(request, drafts[request]) for request in due])
        for request, token in zip(due, tokens, strict=True):
            state, drafted = self._states[request], drafts[request]
            state.num_computed, state.tail = len(request.ids), list(drafted)
            drafted.append(token)

    def _drawn(
        self, pieces: list[SequencePiece], contexts: list[tuple[Request, list[int]]]
    ) -> list[int]:
        device = self._runner.device
        rows = [sampling_row(request, drafted, device) for request, drafted in contexts]
        draws = [row_draw(row) for row in rows]
        if None not in draws and (drawn := self._runner.draw(pieces, draws)) is not None:
            return as_tokens(drawn)
        return sample(self._runner.run_pieces(pieces), rows)

    def _rewound(self, state: DraftState, request: Request) -> int:
        """Keep the KV of accepted drafts, drop the rest; return how many tokens have KV."""
        known = state.num_computed
        for token in state.tail:
            if known >= len(request.ids) or request.ids[known] != token:
                break
            known += 1
        # The newest token is always computed, because its logits are needed.
        state.num_computed, state.tail = min(known, len(request.ids) - 1), []
        self.cache.rewind(state.table, state.num_computed)
        self.cache.commit(state.table, request.ids, state.num_computed)
        return state.num_computed

    # Keeping up with requests

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        running = {request for request in requests if request.state is State.RUNNING}
        for request in [r for r in self._states if r not in running]:
            self._leave(request)
        unfinished = set(requests)
        for request in [r for r in self._arrivals if r not in unfinished]:
            self._give_up(self._arrivals.pop(request))
        for request in requests:
            self._restore(request)
        self.chain.arrivals.settle()
        # Wrong KV only makes wrong drafts, which the target refuses: no check is needed.
        self.chain.arrivals.take_unverified(of_all=True)
        behind = [r for r, state in self._states.items() if state.is_wanted and r.is_decoding]
        for request in behind:
            self._states[request].is_wanted = False
            self._go_on(request, self._states[request], seconds / len(behind))

    def _state(self, request: Request) -> DraftState | None:
        """Return a request's draft state, made on first use.

        Returns None while its KV arrives, or if the context is too long.
        """
        state = self._states.get(request)
        if state is None and self._is_ready(request):
            table = self.cache.start(request.ids)
            state = self._states[request] = DraftState(table, table.cached_len)
        return state

    def _is_ready(self, request: Request) -> bool:
        arrival = self._arrivals.get(request)
        has_room = len(request.ids) < self._max_context
        return has_room and (arrival is None or arrival.is_over)

    def _restore(self, request: Request) -> None:
        """Begin an arrival for a new request."""
        if request not in self._arrivals:
            ids, is_one_shot = list(request.ids), request.spec.is_one_shot
            # As a prefetch: nothing is computed until it is over, so it needs no front.
            self._arrivals[request] = self.chain.arrivals.begin(ids, True, is_one_shot)

    def _give_up(self, arrival: "Arrival | None") -> None:
        if arrival is not None:
            arrival.give_up()

    def _go_on(self, request: Request, state: DraftState, seconds: float) -> None:
        """Compute the missing tokens that fit in `seconds`, but at least `_LEAST_CAUGHT_UP`."""
        start = self._rewound(state, request)
        if len(request.ids) - start <= _MOST_BEHIND:
            return
        affordable = int(self._tokens_per_s * seconds)
        num_tokens = max(_LEAST_CAUGHT_UP, min(affordable, MOST_CAUGHT_UP))
        end = min(start + num_tokens, len(request.ids) - 1)
        if max(request.ids[start:end]) >= self._vocab_size:
            return
        if not self.cache.reserve(state.table, start, end):
            return
        began_s = self._clock()
        self._compute(request, state, start, end)
        elapsed_s = max(self._clock() - began_s, 1e-9)
        self._tokens_per_s += _NEWEST * ((end - start) / elapsed_s - self._tokens_per_s)
        self.chain.planner.prefill.note([(start, end)], elapsed_s)

    def _compute(self, request: Request, state: DraftState, start: int, end: int) -> None:
        """Compute tokens of a request, whose blocks are reserved, and wait for the result."""
        missing = request.ids[start:end]
        self._runner.run_pieces([SequencePiece(missing, start, state.table.blocks, 1)])
        self._runner.wait()
        state.num_computed = end
        self.cache.commit(state.table, request.ids, end)

    def _leave(self, request: Request) -> None:
        """Drop a request's state; its KV stays cached, and is saved if the request finished."""
        state = self._states.pop(request)
        computed = request.ids[: self._rewound(state, request)]
        self.cache.release(state.table, computed)
        is_kept = request.state is State.FINISHED and request.spec.is_kept
        if is_kept:
            self.chain.save(computed, is_one_shot=request.spec.is_one_shot)

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> WhenWritten:
        return self.chain.forget([(tuple(ids), num_kept) for ids, num_kept in contexts])

    def close(self) -> None:
        for arrival in self._arrivals.values():
            self._give_up(arrival)
        self._arrivals.clear()
        for request in list(self._states):
            self._leave(request)
        self.chain.close()


class StatefulDrafter(ModelDrafter):
    """A ModelDrafter whose model has recurrent layers; `cache` is that of the states.

    A state cannot take back what it has read. So the state of a request reads its own tokens only,
    and a copy of it reads guesses: tokens that were accepted are read again with the next draft.
    """

    cache: StateCacheManager

    def offer(self, request: Request, most: int) -> Offer | None:
        state = self._states.get(request)
        if state is not None and state.num_computed >= len(request.ids):
            self._leave(request)  # the step after its drafts failed: it begins at a snapshot
        return super().offer(request, most)

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        """Compute whole blocks that are missing: there is a snapshot after the last one."""
        for want in wanted:
            state, request, size = self._states[want.request], want.request, self.cache.block_size
            start, end = self._rewound(state, request), (len(request.ids) - 1) // size * size
            if end > start and self.cache.reserve(state.table, start, end):
                self._compute(request, state, start, end)

    def _draft_one_more(self, due: list[Request], drafts: dict[Request, list[int]]) -> None:
        if not due:
            return
        pieces = [self._piece(request, self._states[request], drafts[request]) for request in due]
        tokens = self._drawn(pieces, [(request, drafts[request]) for request in due])
        for request, token in zip(due, tokens, strict=True):
            self._states[request].num_computed = len(request.ids)
            drafts[request].append(token)

    def _piece(self, request: Request, state: DraftState, draft: list[int]) -> SequencePiece:
        """Return the missing tokens, or the newest guess."""
        blocks, running = state.table.blocks, self.cache.state_of(state.table)
        if not draft:
            missing = request.ids[state.num_computed :]
            return SequencePiece(missing, state.num_computed, blocks, 1, running)
        if state.guess_state is None:
            state.guess_state = running.copy()
        elif len(draft) == 1:
            state.guess_state.become(running)
        start = len(request.ids) + len(draft) - 1
        return SequencePiece(draft[-1:], start, blocks, 1, state.guess_state)

    def _compute(self, request: Request, state: DraftState, start: int, end: int) -> None:
        table = state.table
        cuts = self.cache.cuts(table, start, end, is_prompt_end=False)
        for stop in sorted({*cuts, end}):
            ids, running = request.ids[start:stop], self.cache.state_of(table)
            self._runner.run_pieces([SequencePiece(ids, start, table.blocks, 0, running)])
            if stop in cuts:
                self.cache.take_snapshot(table)
            start = stop
        state.num_computed = end
        self.cache.commit(table, request.ids, end)
