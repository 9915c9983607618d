"""KvVerifier: tokens of a kept context computed once more, beside whatever else a step computes.

A context about to be kept gets its fingerprint that way, of its last token. A restored context is
verified by three: its last, and two others, drawn anew for every restore. Each looks back at all
that came before it, and is computed in a block of its own, so that its KV is still there to
compare. Costs rows of a batch that has to run anyway; alone it is a step of three tokens. Where no
block is free the last token is computed alone, in a spare block. Knows contexts and rows of logits;
knows no request and no tier.

`tests/engine/test_fingerprint_finds.py` has a table of what is found. What cannot be, at a price
that nobody feels: a few wrong values in a token that is not drawn, where what others find in it is
less than rounding; in 16 bits also a change of some percent in weights that make neither keys nor
values themselves (q_proj, o_proj, the MLP). Checksums find what goes wrong on a disk, and a digest
of the weights keeps another model's KV apart: this is for what neither sees.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from kvchat.cache.block_manager import BlockTable, CacheManager
from kvchat.cache.restore import RestoredContext
from kvchat.cache.tier import LogitFingerprint
from kvchat.engine.logit_fingerprint import fingerprint_of, kv_deviation, logit_deviation, tolerance
from kvchat.model.batch import SequencePiece

if TYPE_CHECKING:
    from kvchat.cache.connector import KvConnector

_log = logging.getLogger(__name__)

# Follows no context.
_NO_TOKEN = -1
# Of what came back, beside its last token: so many others are computed again.
_NUM_DRAWN = 2

# Computes pieces, alone, and returns a row of logits for each.
Run = Callable[[Sequence[SequencePiece]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A context to be kept; `is_one_shot` where whoever asked will hardly go on."""

    ids: list[int]
    is_one_shot: bool


@dataclass(frozen=True, slots=True)
class _Row:
    """`ids` end with the token that is computed again, in the last block of `table`, which is the
    row's own.
    """

    ids: list[int]
    table: BlockTable

    @property
    def position(self) -> int:
        return len(self.ids) - 1

    @property
    def piece(self) -> SequencePiece:
        """What is to be computed; the logits of its one token are wanted."""
        return SequencePiece(self.ids[-1:], self.position, self.table.blocks, num_logit_rows=1)


@dataclass(frozen=True, slots=True, eq=False)
class KvCheck:
    """Tokens of the context `ids` that are computed again: the last first. Their tables are the
    check's until it ends.

    `kept` is the context to be kept, None where `restored` says what is to be verified; of that
    `ids` are what is left.
    """

    ids: list[int]
    rows: list[_Row]
    kept: _Kept | None = None
    restored: RestoredContext | None = None

    @property
    def fingerprint(self) -> LogitFingerprint | None:
        """What the logits have to be, None where that is not known of the last token left."""
        is_whole = self.restored is not None and len(self.ids) == len(self.restored.ids)
        return self.restored.fingerprint if self.restored is not None and is_whole else None

    @property
    def pieces(self) -> list[SequencePiece]:
        return [row.piece for row in self.rows]


class KvVerifier:
    """The checks of one engine, which without `connector` has none.

    `dtype` is what its model computes in. Every `begin` is followed by a step that ends what was
    begun. The engine's thread owns it.
    """

    def __init__(
        self, cache: CacheManager, connector: "KvConnector | None", dtype: torch.dtype
    ) -> None:
        self._cache = cache
        self._connector = connector
        self._tolerance = tolerance(dtype, cache.kv_pool.geometry.dtype)
        self._draws = random.Random(0)
        self._to_keep: list[_Kept] = []
        self._open: list[KvCheck] = []
        if connector is not None:
            cache.reserve_spare_block()

    @property
    def has_work(self) -> bool:
        if self._connector is None:
            return False
        return bool(self._to_keep) or self._connector.restorer.has_unverified

    def save(self, ids: Sequence[int], is_one_shot: bool = False) -> None:
        """Keep a context, with its fingerprint, after the next step."""
        if self._connector is not None and self._connector.write_behind.lacks(ids):
            self._to_keep.append(_Kept(list(ids), is_one_shot))

    def begin(self, run: Run, of_all: bool = False) -> list[RestoredContext]:
        """Hold what is to be computed in the coming step; return what has failed before it.

        `of_all` where others may meet what is still coming up. What there is no room for is
        computed by `run` at once: nobody runs on what is not verified.
        """
        if self._connector is None:
            return []
        waiting, self._to_keep = self._to_keep, []
        failed: list[RestoredContext] = []
        all_due: list[RestoredContext | _Kept] = [
            *self._connector.restorer.take_unverified(of_all),
            *waiting,
        ]
        for due in all_due:
            try:
                failed.extend(self._begin(due, run))
            except Exception:  # what cannot be looked at is not believed, and not kept
                _log.exception("a check could not be begun")
                failed.extend([due] if isinstance(due, RestoredContext) else [])
        return failed

    def _begin(self, due: RestoredContext | _Kept, run: Run) -> list[RestoredContext]:
        """Hold a check, or compute it at once; return what has failed. Raises, and holds nothing
        then.
        """
        if isinstance(due, RestoredContext):
            if not (ids := self._left_of(due)):
                return []
            check = KvCheck(ids, [], restored=due)
        else:
            ids = due.ids[: len(due.ids) // self._cache.block_size * self._cache.block_size]
            check = KvCheck(ids, [], kept=due)
        try:
            return self._begin_rows(check, run)
        except Exception:
            self._release(check)
            raise

    def _begin_rows(self, check: KvCheck, run: Run) -> list[RestoredContext]:
        """Hold the rows of a check that there is room for, or compute the last token at once."""
        if not self._add_row(check, len(check.ids)):
            return self._compute_aside(check, run)
        for length in (
            self._drawn(check.restored, len(check.ids)) if check.restored is not None else ()
        ):
            if not self._add_row(check, length):
                self._cache.release(check.rows.pop().table, [])  # fewer will have to do
                break
        self._open.append(check)
        return []

    def _add_row(self, check: KvCheck, length: int) -> bool:
        """Have a check hold the first `length` tokens; whether the last of them can be written."""
        ids = check.ids[:length]
        row = _Row(ids, self._held(ids))
        check.rows.append(row)
        return self._is_there(row) and self._cache.reserve(row.table, length - 1, length)

    def _drawn(self, restored: RestoredContext, num_left: int) -> list[int]:
        """Return how many tokens end with each that is drawn, one from each of equal parts of what
        came up.
        """
        num_tokens = num_left - 1 - restored.num_trusted
        edges = [restored.num_trusted + num_tokens * i // _NUM_DRAWN for i in range(_NUM_DRAWN + 1)]
        parts = [range(*ends) for ends in pairwise(edges)]
        return [1 + self._draws.choice(part) for part in parts if part]

    def _left_of(self, restored: RestoredContext) -> list[int]:
        """Return what the device still has of what is to be verified, nothing where that is
        trusted.

        What was demoted to host memory meanwhile could be promoted unverified, and is forgotten
        there.
        """
        num_left = self._cache.num_cached_tokens(restored.ids)
        if num_left < len(restored.ids):
            self._cache.forget(restored.ids, num_left)
        return restored.ids[:num_left] if num_left > restored.num_trusted else []

    def _held(self, ids: list[int]) -> BlockTable:
        """Hold all blocks of a context, the last too: to make room for a copy of that it would
        otherwise be forgotten itself, and there would be nothing to compare.
        """
        return self._cache.match([*ids, _NO_TOKEN])

    def _is_there(self, row: _Row) -> bool:
        return bool(row.ids) and row.table.cached_len == len(row.ids)

    def _release(self, check: KvCheck) -> None:
        for row in check.rows:
            self._cache.release(row.table, [])

    def _compute_aside(self, check: KvCheck, run: Run) -> list[RestoredContext]:
        """Compute a check in the spare block; return what has failed.

        A device tier of a single block has none: there contexts are kept without a fingerprint, and
        nothing ever comes up. Of a context that is gone meanwhile nothing is kept either.
        """
        [row] = check.rows
        if self._is_there(row) and self._cache.use_spare_block(row.table):
            return self._end_alone([check], run)
        self._release(check)
        if check.kept is not None:
            self._keep(check.kept, None)
        return [check.restored] if check.restored is not None else []

    @property
    def pieces(self) -> list[SequencePiece]:
        """What the coming step is to compute beside its plan: a row of logits each, in order."""
        return [piece for check in self._open for piece in check.pieces]

    def end(self, logits: torch.Tensor, run: Run) -> list[RestoredContext]:
        """Take the rows of `pieces`, [num_pieces, vocab_size] float32; return what has failed.

        What fails gets a second look, computed alone by `run`: low bits depend on what else is in
        a batch, and where a model chooses experts by them, more than low bits.
        """
        checks, self._open = self._open, []
        return self._end(checks, list(logits), run)

    def end_alone(self, run: Run) -> list[RestoredContext]:
        """Compute what was begun in a step of its own; return what has failed.

        Where that cannot be, contexts are kept without a fingerprint and what came up is not
        believed.
        """
        checks, self._open = self._open, []
        return self._end_alone(checks, run) if checks else []

    def _end_alone(self, checks: Sequence[KvCheck], run: Run) -> list[RestoredContext]:
        pieces = [piece for check in checks for piece in check.pieces]
        try:
            logits: list[torch.Tensor | None] = list(run(pieces))
        except Exception:  # a model's own code can fail with anything
            _log.exception("checks failed contexts=%d", len(checks))
            logits = [None] * len(pieces)
        return self._end(checks, logits, run)

    def _end(
        self, checks: Sequence[KvCheck], logits: Sequence[torch.Tensor | None], run: Run
    ) -> list[RestoredContext]:
        starts = accumulate((len(check.rows) for check in checks), initial=0)
        of_last = [logits[start] for _, start in zip(checks, starts, strict=False)]
        failed = [
            check.restored
            for check, row in zip(checks, of_last, strict=True)
            if check.restored is not None and not self._is_verified(check, row, run)
        ]
        for check in checks:
            self._release(check)
        for check, row in zip(checks, of_last, strict=True):
            if check.kept is not None:
                self._keep(check.kept, row)
        return failed

    def _keep(self, kept: _Kept, row: torch.Tensor | None) -> None:
        """Keep a context; one whose KV makes no numbers is better computed again."""
        assert self._connector is not None
        fingerprint = fingerprint_of(row) if row is not None else None
        if row is None or fingerprint is not None:
            self._connector.save(kept.ids, fingerprint, kept.is_one_shot)

    def _holds(self, check: KvCheck, row: torch.Tensor | None) -> bool:
        if row is None:
            return False
        fingerprint = check.fingerprint
        off = logit_deviation(fingerprint, row) if fingerprint is not None else 0.0
        kv_errors = [self._cache.kv_error(row.table, check.ids, row.position) for row in check.rows]
        kv = kv_deviation([kv_error for kv_error in kv_errors if kv_error is not None])
        is_right = self._tolerance.allows(off, kv)
        level = logging.DEBUG if is_right else logging.WARNING
        _log.log(level, "verified logits=%.2e kv=%s tokens=%d", off, kv, len(check.ids))
        return is_right

    def _is_verified(self, check: KvCheck, row: torch.Tensor | None, run: Run) -> bool:
        """Whether restored KV is right, at the first look or at the second; what cannot be looked
        at, for want of memory mostly, does not.
        """
        for look in (lambda: row, lambda: run(check.pieces)[0]):
            try:
                if self._holds(check, look()):
                    return True
            except Exception:
                _log.exception("restored KV could not be looked at")
        return False
