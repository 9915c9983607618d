"""ModelDrafter: a small model of the same vocabulary guesses what the large one will say.

It keeps its own KV, paged, in a tree and on tiers of its own, so that a branch or a conversation of
yesterday is drafted for as well as one it has just read. What of it is missing is computed behind
the answer's first token, a little in each step. Knows requests and their ids; verifies nothing.

It draws with the target's own noise: where both models expect the same, they draw the same.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvchat.cache.block_manager import BlockTable, CacheManager
from kvchat.engine.draft_policy import MAX_DRAFTED
from kvchat.engine.drafters import Offer, Wanted, WhenWritten
from kvchat.engine.request import Request, State
from kvchat.engine.runner import Rehearsal, Runner, sampling_row
from kvchat.engine.sampler import as_tokens, row_draw, sample
from kvchat.engine.step_threads import StepThreads
from kvchat.model.batch import SequencePiece
from kvchat.model.graphs import GraphRunner
from kvchat.model.paged_model import PagedModel

if TYPE_CHECKING:
    from kvchat.cache.connector import Persistence
    from kvchat.cache.restore import Restore

# So many missing tokens are computed at once before a draft; more take their time.
_MOST_BEHIND = 64
# And so many along with the first that is drafted: what a verified draft leaves.
_MOST_ALONG = MAX_DRAFTED + 1
_LEAST_CAUGHT_UP, _MOST_CAUGHT_UP = 32, 1024
_NEWEST = 0.3


@dataclass(slots=True)
class _Seat:
    """One request's KV in the draft's cache.

    # [0, num_computed)            KV of the request's own ids
    # and len(tail) tokens more    KV of drafts, right as far as the request has grown by them
    """

    table: BlockTable
    num_computed: int
    tail: list[int] = field(default_factory=list)
    is_wanted: bool = False


class ModelDrafter:
    """Drafts with `model`, whose pools are those of `cache`.

    `vocab_size` and `max_context` are the draft model's own: it has nothing to offer for a context
    beyond them. With `persistence` its KV is kept, and found again; the drafter closes it. `graphs`
    are those of the draft model's small steps, `threads` what it runs them on, `rehearsal` its.
    `piece_rows` is how many rows at a time the little that is missing is computed in, where that is
    sooner done than at once.
    """

    name = "draft"

    def __init__(
        self,
        model: PagedModel,
        cache: CacheManager,
        vocab_size: int,
        max_context: int,
        persistence: "Persistence | None" = None,
        clock: Callable[[], float] = time.perf_counter,
        graphs: GraphRunner | None = None,
        threads: StepThreads | None = None,
        rehearsal: Rehearsal | None = None,
        piece_rows: int | None = None,
    ) -> None:
        self.cache = cache
        self.persistence = persistence
        self._runner = Runner(model, cache.block_size, graphs, threads, rehearsal)
        self._vocab_size = vocab_size
        self._max_context = min(max_context, cache.max_tokens)
        self._clock = clock
        self._piece_rows = piece_rows if piece_rows is not None else _MOST_BEHIND
        self._most_along = min(_MOST_ALONG, self._piece_rows - 1)
        self._seats: dict[Request, _Seat] = {}
        self._restores: dict[Request, Restore | None] = {}
        self._tokens_per_s = 0.0

    # Drafting

    def offer(self, request: Request, most: int) -> Offer | None:
        seat = self._seat(request)
        most = min(most, self._max_context - len(request.ids))
        if seat is None or most < 1:
            return None
        seat.is_wanted = True
        missing = request.ids[self._rewound(seat, request) :]
        if len(missing) > _MOST_BEHIND or max(missing) >= self._vocab_size:
            return None
        return Offer(self.name, most, is_free=False)

    def prepare(self) -> None:
        self._runner.prepare()

    def catch_up(self, wanted: Sequence[Wanted]) -> None:
        for want in wanted:
            seat, request = self._seats[want.request], want.request
            start, end = self._rewound(seat, request), len(request.ids) - 1
            if end - start > self._most_along and self.cache.reserve(seat.table, start, end):
                self._make_up(request, seat, start, end)

    def _make_up(self, request: Request, seat: _Seat, start: int, end: int) -> None:
        """Compute what is missing in pieces, but for what the next draft computes along with it."""
        while end - start > self._most_along:
            stop = min(end, start + self._piece_rows)
            self._compute(request, seat, start, stop)
            start = stop

    def propose(self, wanted: Sequence[Wanted]) -> list[Sequence[int]]:
        drafts: dict[Request, list[int]] = {}
        for want in wanted:
            seat, request = self._seats[want.request], want.request
            end = len(request.ids) + want.num_tokens - 1
            if self.cache.reserve(seat.table, self._rewound(seat, request), end):
                drafts[request] = []
        longest = max(want.num_tokens for want in wanted)
        for length in range(longest):
            due = [w.request for w in wanted if w.num_tokens > length and w.request in drafts]
            self._draft_one_more(due, drafts)
        return [drafts.get(want.request, []) for want in wanted]

    def _draft_one_more(self, due: list[Request], drafts: dict[Request, list[int]]) -> None:
        """Compute what is missing, the newest draft the last of it, and draw the next."""
        if not due:
            return
        pieces = []
        for request in due:
            seat, drafted = self._seats[request], drafts[request]
            start = seat.num_computed + len(seat.tail)
            missing = [*request.ids[start:], *drafted[max(0, start - len(request.ids)) :]]
            pieces.append(SequencePiece(missing, start, seat.table.blocks, num_logit_rows=1))
        tokens = self._drawn(pieces, [(request, drafts[request]) for request in due])
        for request, token in zip(due, tokens, strict=True):
            seat, drafted = self._seats[request], drafts[request]
            seat.num_computed, seat.tail = len(request.ids), list(drafted)
            drafted.append(token)

    def _drawn(
        self, pieces: list[SequencePiece], contexts: list[tuple[Request, list[int]]]
    ) -> list[int]:
        device = self._runner.device
        rows = [sampling_row(request, drafted, device) for request, drafted in contexts]
        draws = [row_draw(row) for row in rows]
        if None not in draws and (drawn := self._runner.draw_pieces(pieces, draws)) is not None:
            return as_tokens(drawn)
        return sample(self._runner.run_pieces(pieces), rows)

    def _rewound(self, seat: _Seat, request: Request) -> int:
        """Settle which drafts have come true; return how many tokens have their KV."""
        known = seat.num_computed
        for token in seat.tail:
            if known >= len(request.ids) or request.ids[known] != token:
                break
            known += 1
        # The newest token is computed again rather than not at all: its logits are wanted.
        seat.num_computed, seat.tail = min(known, len(request.ids) - 1), []
        self.cache.rewind(seat.table, seat.num_computed)
        self.cache.commit(seat.table, request.ids, seat.num_computed)
        return seat.num_computed

    # Keeping up with requests

    def tend(self, requests: Sequence[Request], seconds: float) -> None:
        running = {request for request in requests if request.state is State.RUNNING}
        for request in [r for r in self._seats if r not in running]:
            self._leave(request)
        unfinished = set(requests)
        for request in [r for r in self._restores if r not in unfinished]:
            self._give_up(self._restores.pop(request))
        for request in requests:
            self._restore(request)
        behind = [r for r, seat in self._seats.items() if seat.is_wanted and r.is_decoding]
        for request in behind:
            self._seats[request].is_wanted = False
            self._go_on(request, self._seats[request], seconds / len(behind))

    def _seat(self, request: Request) -> _Seat | None:
        """Return a request's seat, taken now if need be; None while its KV may be on its way."""
        seat = self._seats.get(request)
        if seat is None and self._is_ready(request):
            table = self.cache.match(request.ids)
            seat = self._seats[request] = _Seat(table, table.cached_len)
        return seat

    def _is_ready(self, request: Request) -> bool:
        restore = self._restores.get(request)
        has_room = len(request.ids) < self._max_context
        return has_room and (restore is None or restore.is_over)

    def _restore(self, request: Request) -> None:
        """Ask for the KV of a request when it comes in, and take what has come of it."""
        if self.persistence is None:
            return
        if request not in self._restores:
            ids, is_one_shot = list(request.ids), request.spec.is_one_shot
            # Nothing is computed before it is there or given up, no front of it either.
            self._restores[request] = self.persistence.begin(ids, True, is_one_shot)
        restore = self._restores[request]
        if restore is not None and not restore.is_over:
            self.persistence.settle(restore)
        # Wrong KV would make wrong drafts, and those are refused: no proof is needed.
        self.persistence.restoring.proofs(of_all=True)

    def _give_up(self, restore: "Restore | None") -> None:
        if restore is not None:
            restore.give_up()

    def _go_on(self, request: Request, seat: _Seat, seconds: float) -> None:
        """Compute a part of what is missing, as much as fits in `seconds`, but some of it."""
        start = self._rewound(seat, request)
        if len(request.ids) - start <= _MOST_BEHIND:
            return
        affordable = int(self._tokens_per_s * seconds)
        num_tokens = max(_LEAST_CAUGHT_UP, min(affordable, _MOST_CAUGHT_UP))
        end = min(start + num_tokens, len(request.ids) - 1)
        if max(request.ids[start:end]) >= self._vocab_size:
            return
        if not self.cache.reserve(seat.table, start, end):
            return
        began_s = self._clock()
        self._compute(request, seat, start, end)
        elapsed_s = max(self._clock() - began_s, 1e-9)
        self._tokens_per_s += _NEWEST * ((end - start) / elapsed_s - self._tokens_per_s)
        if self.persistence is not None:
            self.persistence.planner.note_prefill(end - start, elapsed_s)

    def _compute(self, request: Request, seat: _Seat, start: int, end: int) -> None:
        """Compute tokens of a request whose blocks are reserved, and wait for it."""
        missing = request.ids[start:end]
        self._runner.run_pieces([SequencePiece(missing, start, seat.table.blocks, 1)])
        self._runner.wait()
        seat.num_computed = end
        self.cache.commit(seat.table, request.ids, end)

    def _leave(self, request: Request) -> None:
        """Give a seat up, and keep its KV for whoever asks next."""
        seat = self._seats.pop(request)
        computed = request.ids[: self._rewound(seat, request)]
        self.cache.release(seat.table, computed)
        if self.persistence is not None and request.state is State.FINISHED:
            self.persistence.save(computed, is_one_shot=request.spec.is_one_shot)

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """What a model has not been asked about it need not read."""

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> WhenWritten | None:
        for token_ids, num_kept in contexts:
            self.cache.forget(tuple(token_ids), num_kept)
            if self.persistence is not None:
                self.persistence.forget(tuple(token_ids))
        return self.persistence.when_written if self.persistence is not None else None

    def close(self) -> None:
        for restore in self._restores.values():
            self._give_up(restore)
        self._restores.clear()
        for request in list(self._seats):
            self._leave(request)
        if self.persistence is not None:
            self.persistence.close()
