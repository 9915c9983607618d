"""StatefulDrafter: a ModelDrafter whose model has recurrent layers.

A state cannot take back what it has read. So the state of a request reads its own tokens only, and
a copy of it reads guesses: tokens that were accepted are read again with the next draft.
"""

from collections.abc import Sequence

from kvchat.cache.state_manager import StateCacheManager
from kvchat.engine.draft_model import DraftState, ModelDrafter
from kvchat.engine.drafters import DraftOrder, Offer
from kvchat.engine.request import Request
from kvchat.model.batch import SequencePiece


class StatefulDrafter(ModelDrafter):
    """Drafts as a ModelDrafter does; `cache` is that of the states."""

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
