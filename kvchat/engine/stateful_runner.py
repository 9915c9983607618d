"""StatefulRunner: a Runner for models with recurrent layers, one sequence after another.

Each request's state is in its block table. The runner stops at the ends of blocks where the cache
wants a snapshot of it.
"""

from collections.abc import Callable, Sequence

import torch

from kvchat.cache.state_manager import StateCacheManager
from kvchat.engine.runner import Runner
from kvchat.engine.scheduler import ScheduledRequest
from kvchat.engine.step_threads import StepThreads
from kvchat.model.batch import SequencePiece
from kvchat.model.paged_model import StatefulModel
from kvchat_kernels.state_buffer import StateBuffer


class StatefulRunner(Runner):
    """Runs steps over `cache`, the manager of the states. It has no graphs and no warm-up."""

    def __init__(
        self, model: StatefulModel, cache: StateCacheManager, threads: StepThreads | None = None
    ) -> None:
        super().__init__(model, cache.block_size, threads=threads)
        self._stateful_model = model
        self._cache = cache

    def run(
        self,
        plan: Sequence[ScheduledRequest],
        checks: Sequence[SequencePiece] = (),
        is_unwanted: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Compute the plan's tokens; the result is that of `Runner.run`, without checks.

        If it raises, the states are those before the step, so that each request can run again
        alone. Only the state of a request that runs alone and cannot be abandoned is then
        undefined, and the request has failed.
        """
        assert not checks, "restored state is verified by its checksums"
        states = [self._state_of(scheduled) for scheduled in plan]
        is_copied = len(states) > 1 or is_unwanted is not None
        before = [state.copy() for state in states] if is_copied else []
        try:
            with self.stopping(is_unwanted):
                rows = [self._advance(*pair) for pair in zip(plan, states, strict=True)]
        except Exception:
            for state, old in zip(states, before, strict=False):
                state.become(old)
            raise
        logits = torch.cat(rows)
        if not len(logits):
            self.wait()
        return logits

    def _state_of(self, scheduled: ScheduledRequest) -> StateBuffer:
        assert scheduled.request.table is not None
        assert not scheduled.drafts, "a rejected draft cannot be taken out of a state"
        return self._cache.state_of(scheduled.request.table)

    def _advance(self, scheduled: ScheduledRequest, state: StateBuffer) -> torch.Tensor:
        """Run one request's tokens; return its rows of logits, of which there may be none."""
        request = scheduled.request
        table = request.table
        assert table is not None
        start, end = request.num_computed, request.num_computed + scheduled.num_tokens
        is_prompt_end = scheduled.completes and not request.num_generated
        rows = []
        cuts = self._cache.cuts(table, start, end, is_prompt_end)
        for stop in sorted({*cuts, end}):
            of_all = scheduled.request.is_to_be_scored
            num_rows = stop - start if of_all else int(scheduled.completes and stop == end)
            ids = request.ids[start:stop]
            piece = SequencePiece(ids, start, table.blocks, num_rows, state)
            rows.append(self._run_piece(piece))
            if stop in cuts:
                self._cache.take_snapshot(table)
            start = stop
        return torch.cat(rows)

    def _run_piece(self, piece: SequencePiece) -> torch.Tensor:
        def forward() -> torch.Tensor:
            return self._stateful_model.forward_piece(piece, self._block_size)

        if self._threads is None:
            return forward()
        return self._threads.run(len(piece.token_ids), forward)
