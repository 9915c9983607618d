"""KvThinner: drops the KV of positions that matter least, by how much later tokens attend to them.

Three rules say which. SnapKV (Li et al. 2024): once a prompt is read, those to which its question
attends least. That is right for this question only. H2O (Zhang et al. 2023): while an answer grows,
those to which the tokens since have attended least, all together; they are counted at intervals, by
a pass over these tokens' rows that writes nothing. KVzip (Kim et al. 2025): those that a text which
repeats the context needs least, whatever is asked later. All layers keep the same positions, for a
slot has the KV of all layers: scores of layers and heads are added.
"""

import logging
import math
from collections.abc import Sequence

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.keys import NO_TOKEN
from kvchat.cache.thinned_kv import ThinnedBeginning, thin
from kvchat.core.errors import UsageError
from kvchat.core.types import KeptPositions, KvDropped, TokenIds, digest_of_ids
from kvchat.engine.kv_verifier import KvVerifier
from kvchat.engine.request import Request, Thinning
from kvchat.engine.runner import Runner
from kvchat.model.batch import SequencePiece

_log = logging.getLogger(__name__)

_IMPOSSIBLE = (
    "No KV of this model can be dropped: its attention runs in its own code, or it has recurrent "
    "state."
)
# The first tokens, to which all others attend, always stay.
_NUM_SINKS = 4
# The last tokens stay too, and as many slots of the budget are free after a drop: each is so many,
# or a quarter of the budget.
_NUM_RECENT = 64
# A question is scored by so many rows; the tokens of an answer, at once, by so many at most.
_QUESTION_ROWS, _MOST_ROWS = (16, 64), 256
# Neighbours share their scores: a fact is several tokens.
_POOLED = 5
# A repeated part is computed in steps of so many rows.
_STEP_ROWS = 64


class KvThinner:
    """Drops KV of the requests of one engine. The engine's thread owns it."""

    def __init__(self, cache: CacheManager, runner: Runner, kv_verifier: KvVerifier) -> None:
        self._cache = cache
        self._runner = runner
        self._kv_verifier = kv_verifier
        self.kept: Sequence[KeptPositions] = ()

    def require_possible(self) -> None:
        """Raise UsageError for a model whose attention cannot be observed."""
        if not self._runner.can_observe:
            raise UsageError(_IMPOSSIBLE, "Leave out --kv-budget and --keep.")

    def consider(self, request: Request, thinning: Thinning) -> None:
        """Drop KV of a running request that is due; where that fails, the request goes on with all
        of it.
        """
        if request.is_exact or request.table is None:
            return
        try:
            if request.thins_at is not None:
                if request.num_computed == request.thins_at:
                    self._take_beginning(request, thinning)
            elif thinning.budget is not None:
                self._cache.hold_more_windows(request.table, _QUESTION_ROWS[1])
                if request.is_decoding:
                    self._keep_budget(request, thinning)
        except Exception:  # a model's own code can fail with anything
            _log.exception("KV could not be dropped")
            request.is_exact = True

    def _take_beginning(self, request: Request, thinning: Thinning) -> None:
        beginning = thinning.beginning
        assert beginning is not None
        self._replace(request, beginning.positions, "KVzip", beginning.name)

    def _keep_budget(self, request: Request, thinning: Thinning) -> None:
        table, num_computed = request.table, request.num_computed
        assert table is not None
        num_slots = table.slot_of(num_computed)
        limit = self._limit(thinning, num_computed)
        if num_slots <= limit:
            return
        is_prompt = num_computed == request.num_prompt_tokens
        least, most = _QUESTION_ROWS
        num_rows = min(max(thinning.num_last, least), most) if is_prompt else _MOST_ROWS
        first = table.positions.next_position if table.positions is not None else 0
        if not is_prompt:
            first = max(first, request.num_prompt_tokens - thinning.num_last)
        start = max(first, num_computed - num_rows, self._cache.first_computable(table))
        scores = self._attended(request, start)
        if request.slot_scores is not None:
            scores[: len(request.slot_scores)] += request.slot_scores
        num_recent = min(_NUM_RECENT, limit // 4)
        stays = self._always(request, thinning, num_slots, num_recent)
        slots = scores.masked_fill(stays, math.inf).topk(limit - num_recent).indices.sort().values
        if self._replace(request, slots.tolist(), "SnapKV" if is_prompt else "H2O"):
            request.slot_scores = scores[slots]

    def _limit(self, thinning: Thinning, num_tokens: int) -> int:
        """Return the most slots of a sequence: those of its budget, but more than always stay."""
        budget = thinning.budget
        assert budget is not None
        if budget.share is not None:
            limit = math.ceil(budget.share * num_tokens)
        else:
            limit = (budget.num_bytes or 0) // self._cache.kv_pool.geometry.token_bytes
        num_fixed = max(_NUM_SINKS, thinning.num_leading) + thinning.num_last
        return max(limit, num_fixed + 2 * min(_NUM_RECENT, num_fixed))

    def _always(
        self, request: Request, thinning: Thinning, num_slots: int, num_recent: int
    ) -> torch.Tensor:
        """Return [num_slots] bool: the slots that stay whatever their scores are."""
        assert request.table is not None
        own = request.table.positions
        filled = range(num_slots) if own is None else own.of_slots(num_slots)
        positions = torch.tensor(list(filled))
        question = request.num_prompt_tokens - thinning.num_last, request.num_prompt_tokens
        stays = positions < max(_NUM_SINKS, thinning.num_leading)
        stays |= (positions >= question[0]) & (positions < question[1])
        stays[num_slots - num_recent :] = True
        return stays

    def _attended(self, request: Request, start: int) -> torch.Tensor:
        """Return how much the rows from `start` on attend to each slot and its neighbours,
        [num_slots] float32.

        Their KV is there: the pass over them only reads.
        """
        assert request.table is not None
        table, end = request.table, request.num_computed
        piece = SequencePiece(
            request.ids[start:end], start, table.blocks, 1, table_positions=table.positions
        )
        scores = self._runner.new_scores(piece.num_slots)
        self._runner.score(piece, scores, writes=False)
        return neighbours_mean(scores.sums.mean(dim=0))

    def _replace(self, request: Request, slots: Sequence[int], method: str, name: str = "") -> bool:
        """Let a request go on over some slots of its table; false if there is no room."""
        old, num_computed = request.table, request.num_computed
        assert old is not None
        computed = request.ids[:num_computed]
        self._cache.hold_more_windows(old, 0)
        self._cache.commit(old, computed, num_computed)  # what is let go makes room
        new = thin(self._cache, old, slots, num_computed, name)
        if new is None:
            request.is_exact = True
            return False
        self._cache.release(old, computed)
        request.table = new
        self._cache.commit(new, request.ids, num_computed)
        if request.is_kept:
            self._kv_verifier.save(computed, request.spec.is_one_shot)
        request.is_thinned = True
        request.dropped = KvDropped(method, len(slots), num_computed)
        return True

    def beginning_of(self, token_ids: TokenIds) -> ThinnedBeginning | None:
        """Return the thinned beginning that a context has; None without one."""
        for kept in self.kept:
            beginning = token_ids[: kept.num_tokens]
            if kept.num_tokens < len(token_ids) and digest_of_ids(beginning) == kept.digest:
                return ThinnedBeginning.of(beginning, kept.positions, kept.method)
        return None

    def repeated(self, token_ids: TokenIds, part: Sequence[int]) -> list[float] | None:
        """Return how much a text attends to each position of the context that it follows, at the
        most: KVzip's scores, if it repeats a part of the context.

        None if KV of the context is not on the device, or there is no room. It computes as many
        rows as the part has.
        """
        table = self._cache.match([*token_ids, NO_TOKEN])
        try:
            if table.cached_len < len(token_ids):
                return None
            scores = self._repeated(table, len(token_ids), part)
            return None if scores is None else scores.tolist()
        finally:
            self._cache.release(table, [])

    def _repeated(
        self, table: BlockTable, num_tokens: int, part: Sequence[int]
    ) -> torch.Tensor | None:
        """Return how much each of the first `num_tokens` slots, or a neighbour, is attended to, at
        the most, by the rows of `part`, which follow a context; None if they have no room.
        """
        own, end = self._cache.fork(table, num_tokens), num_tokens + len(part)
        scores = self._runner.new_scores(num_tokens)
        try:
            if not self._cache.reserve(own, num_tokens, end):
                return None
            for start in range(num_tokens, end, _STEP_ROWS):
                rows = part[start - num_tokens : start - num_tokens + _STEP_ROWS]
                self._runner.score(SequencePiece(rows, start, own.blocks, 1), scores, writes=True)
            return neighbours_highest(scores.highest.mean(dim=0))
        finally:
            self._cache.release(own, [])


def neighbours_mean(scores: torch.Tensor) -> torch.Tensor:
    """Return the mean of each score and its neighbours, of [num_slots] float32."""
    pool = torch.nn.functional.avg_pool1d
    return pool(scores[None], _POOLED, 1, _POOLED // 2, count_include_pad=False)[0]


def neighbours_highest(scores: torch.Tensor) -> torch.Tensor:
    """Return the largest of each score and its neighbours, in the same way."""
    return torch.nn.functional.max_pool1d(scores[None], _POOLED, 1, _POOLED // 2)[0]
