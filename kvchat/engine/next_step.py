"""NextStep: queues a decode step on a GPU before the tokens of the step before it are read.

A step draws its tokens on the device, and all that the next one misses is these tokens: it takes
them there. So the device computes while the host reads the tokens, appends and tells them. What the
host learns only then, such as a stop token, comes one step late: the tokens that the queued step
draws for such a request are dropped. The KV that it writes for it is beyond every known context, in
slots that the request had reserved. The device does all work in the order in which it was queued,
so whatever uses these slots next overwrites that KV. Plain twin: the step is queued when its tokens
are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.engine.request import Request
from kvchat.engine.runner import Drawn, QueuedTokens, Runner, draws_of, piece_of, tokens_of
from kvchat.engine.scheduler import ScheduledRequest
from kvchat.model.batch import SequencePiece
from kvchat_kernels.sampler import RowDraw


class _Row(NamedTuple):
    """A request in a queued step, and what has to hold of it when the step counts."""

    request: Request
    table: BlockTable
    num_computed: int
    draw: RowDraw

    @property
    def is_as_assumed(self) -> bool:
        """Whether the request went on, as one whose only uncomputed token is that of this row."""
        request = self.request
        return (
            request.table is self.table  # None once it ended or waits again
            and request.num_computed == self.num_computed
            and request.is_decoding
        )


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step under way, with one row of tokens for each row here."""

    rows: list[_Row]
    tokens: QueuedTokens


class NextStep:
    """The queued step of one engine, at most one. The thread that steps owns it.

    Requests end before `max_context` tokens.
    """

    def __init__(self, runner: Runner, cache: CacheManager, max_context: int) -> None:
        self._runner = runner
        self._cache = cache
        self._max_context = max_context
        self._queued: _Queued | None = None

    def plan(self) -> list[ScheduledRequest]:
        """Return what the queued step computes for the requests that went on as it assumes.

        Empty if no step is queued, or if none of its requests went on; the step is dropped then.
        """
        if self._queued is None:
            return []
        plan = [ScheduledRequest(row.request, 1) for row in self._queued.rows if row.is_as_assumed]
        if not plan:
            self.drop()
        return plan

    def drop(self) -> None:
        """Forget the queued step: its requests are computed again, into the same slots."""
        self._queued = None

    def draw(self, plan: Sequence[ScheduledRequest], goes_on: bool) -> Drawn | None:
        """Return the tokens of the plan's step; of the queued one if the plan is that of `plan()`.

        Before it reads them it queues the step after, if `goes_on` and every request can be in it.
        Returns None if no graph fits; then nothing is queued. Raises ValueError if a logit was NaN.
        """
        present, rows = self._take(plan)
        if present is None:
            draws = draws_of(plan)
            pieces = [piece_of(scheduled) for scheduled in plan]
            present = self._runner.queue(pieces, draws) if draws is not None else None
            if present is None:
                return None
            rows = list(range(len(present.tokens)))
        if goes_on:
            self._queue_after(plan, present, rows)
        try:
            drawn = present.read()
            return tokens_of(plan, [drawn[row] for row in rows])
        except Exception:  # the step after took its tokens from one that failed
            self.drop()
            raise

    def _take(self, plan: Sequence[ScheduledRequest]) -> tuple[QueuedTokens | None, list[int]]:
        """Return the tokens of the queued step, and the plan's rows of them, if it is that step."""
        is_own = self.plan() == list(plan)
        queued, self._queued = self._queued, None
        if queued is None or not is_own:
            return None, []
        return queued.tokens, [i for i, row in enumerate(queued.rows) if row.is_as_assumed]

    def _queue_after(
        self, plan: Sequence[ScheduledRequest], present: QueuedTokens, rows: Sequence[int]
    ) -> None:
        """Queue the step after the present one, whose tokens stand in `rows`, if all can be in it.

        A request that is sure to end leaves a smaller step, which is planned when it has ended.
        """
        draws = draws_of(plan)
        if draws is None or not all(self._goes_on(scheduled) for scheduled in plan):
            return
        if not all(self._reserve(scheduled) for scheduled in plan):
            return
        coming = [_row_after(*pair) for pair in zip(plan, draws, strict=True)]
        pieces = [
            SequencePiece(
                [0], row.num_computed, row.table.blocks, 1, table_positions=row.table.positions
            )
            for row in coming
        ]
        tokens = self._runner.queue(pieces, [row.draw for row in coming], present, rows)
        if tokens is not None:
            self._queued = _Queued(coming, tokens)

    def _goes_on(self, scheduled: ScheduledRequest) -> bool:
        """Whether a request needs another token after the one that this step draws for it."""
        request = scheduled.request
        if not scheduled.completes or scheduled.drafts or request.cancelled_for is not None:
            return False
        if request.spec.thinning is not None:  # its KV may be dropped before the next token
            return False
        limit = request.spec.max_tokens
        is_last = limit is not None and request.num_generated + 1 >= limit
        return not is_last and len(request.ids) + 1 < self._max_context

    def _reserve(self, scheduled: ScheduledRequest) -> bool:
        """Reserve the slot of the token that this step draws; what is not used is given back."""
        request = scheduled.request
        assert request.table is not None
        start = request.num_computed + scheduled.num_tokens
        return self._cache.reserve(request.table, start, start + 1)


def _row_after(scheduled: ScheduledRequest, draw: RowDraw | None) -> _Row:
    request = scheduled.request
    assert request.table is not None
    assert draw is not None, "a request that completes draws"
    return _Row(request, request.table, request.num_computed + scheduled.num_tokens, draw)
