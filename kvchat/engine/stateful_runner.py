"""StatefulRunner: a Runner for models with recurrent layers.

Each request's state is in its block table. The runner stops at the ends of blocks where the cache
wants a snapshot of it. Requests with few tokens and no such stop run together, the others one after
another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvchat.cache.block_table import BlockTable
from kvchat.cache.state_manager import StateCacheManager
from kvchat.engine.runner import Runner
from kvchat.engine.scheduler import ScheduledRequest
from kvchat.engine.step_threads import MOST_ROWS, StepThreads
from kvchat.model.batch import SequencePiece
from kvchat.model.paged_model import StatefulModel
from kvchat_kernels.state_buffer import StateBuffer


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of request `index` of a plan, and whether a snapshot follows it."""

    index: int
    piece: SequencePiece
    table: BlockTable
    is_cut: bool


class StatefulRunner(Runner):
    """Runs steps over `cache`, the manager of the states. It has no graphs and no warm-up."""

    def __init__(
        self, model: StatefulModel, cache: StateCacheManager, threads: StepThreads | None = None
    ) -> None:
        super().__init__(model, cache.block_size, threads=threads)
        self._stateful_model = model
        self._cache = cache
        cache.reads_again = model.compiled is None

    def run(
        self,
        plan: Sequence[ScheduledRequest],
        checks: Sequence[SequencePiece] = (),
        is_unwanted: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Compute the plan's tokens; the result is that of `Runner.run`, without checks.

        If it raises, the states are those before the step, so that each request can run again
        alone. Only the state of a request that runs alone and cannot be abandoned is then
        undefined, unless states read its drafts: there is no copy, and the request has failed.
        """
        assert not checks, "restored state is verified by its checksums"
        tables = [_table_of(scheduled) for scheduled in plan]
        states = [self._cache.state_of(table) for table in tables]
        requests = enumerate(zip(plan, states, strict=True))
        groups = _grouped([self._parts_of(index, *each) for index, each in requests])
        is_copied = is_unwanted is not None or len(groups) > 1
        before = [state.copy() for state in states] if is_copied else []
        for scheduled, table in zip(plan, tables, strict=True):
            if scheduled.drafts and self._cache.reads_again:
                self._cache.save_state(table)
        rows: list[list[torch.Tensor]] = [[] for _ in plan]
        hidden: list[list[torch.Tensor]] = [[] for _ in plan]
        self._begin_hidden()
        try:
            with self.stopping(is_unwanted):
                for group in groups:
                    for part, found in zip(group, self._run_group(group), strict=True):
                        rows[part.index].append(found)
                    for part, found in zip(group, self._hidden_of(group), strict=False):
                        hidden[part.index].append(found)
        except Exception:
            for state, old in zip(states, before, strict=False):
                state.become(old)
            for table in tables:
                self._cache.restore_state(table)
            raise
        if self._hidden is not None:
            self.last_hidden = {s: torch.cat(found) for s, found in zip(plan, hidden, strict=True)}
        logits = torch.cat([part for of_request in rows for part in of_request])
        if not len(logits):
            self.wait()
        return logits

    def _hidden_of(self, group: Sequence[_Part]) -> Sequence[torch.Tensor]:
        """Return the last hidden states of the parts that have just run; none if none are kept."""
        if self._hidden is None:
            return ()
        return self._hidden.take().split([len(part.piece.token_ids) for part in group])

    def _parts_of(self, index: int, scheduled: ScheduledRequest, state: StateBuffer) -> list[_Part]:
        """Return one request's tokens and drafts, divided where a snapshot is wanted."""
        request, table = scheduled.request, _table_of(scheduled)
        start, end = request.num_computed, request.num_computed + scheduled.num_tokens
        is_prompt_end = scheduled.completes and not request.num_generated
        parts = []
        cuts = self._cache.cuts(table, start, end, is_prompt_end)
        if self._cache.reads_again:
            assert not (scheduled.drafts and end in cuts), "a snapshot of a state that read drafts"
        for stop in sorted({*cuts, end}):
            is_last, of_all = stop == end, request.is_to_be_scored
            num_rows = stop - start if of_all else scheduled.num_logit_rows * is_last
            drafts = scheduled.drafts if is_last else ()
            num_guesses = 0 if self._cache.reads_again else len(drafts)
            ids = [*request.ids[start:stop], *drafts]
            piece = SequencePiece(
                ids, start, table.blocks, num_rows, state, table.positions, num_guesses
            )
            parts.append(_Part(index, piece, table, stop in cuts))
            start = stop
        return parts

    def _run_eagerly(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        def forward() -> torch.Tensor:
            return self._stateful_model.forward_pieces(pieces, self._block_size)

        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        return forward() if self._threads is None else self._threads.run(num_tokens, forward)

    def _run_group(self, group: Sequence[_Part]) -> Sequence[torch.Tensor]:
        """Run parts of different requests in one step; return the rows of logits of each."""
        pieces = [part.piece for part in group]
        logits = self._run_eagerly(pieces)
        for part in group:
            if part.is_cut:
                self._cache.take_snapshot(part.table)
        return logits.split([piece.num_logit_rows for piece in pieces])


def _table_of(scheduled: ScheduledRequest) -> BlockTable:
    assert scheduled.request.table is not None
    return scheduled.request.table


def _grouped(parts: Sequence[Sequence[_Part]]) -> list[list[_Part]]:
    """Return which parts run together: of small requests as many as a small step takes.

    All parts of the other requests run alone, in order.
    """
    groups: list[list[_Part]] = []
    room = 0
    for of_request in parts:
        num_tokens = len(of_request[0].piece.token_ids)
        if len(of_request) > 1 or num_tokens > MOST_ROWS:
            continue
        if num_tokens > room:
            groups.append([])
            room = MOST_ROWS
        groups[-1] += of_request
        room -= num_tokens
    taken = {part.index for group in groups for part in group}
    alone = (part for of_request in parts for part in of_request if part.index not in taken)
    return [*groups, *([part] for part in alone)]
