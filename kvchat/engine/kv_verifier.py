"""Probes: tokens of a kept context computed once more, beside whatever else a step computes.

A context about to be kept gets its canary that way, of its last token. A context that came back is
proven by three: its last, and two others, drawn anew for every restore. Each looks back at all that
came before it, and is computed in a block of the probe's own, so that its KV is still there to
compare. Costs rows of a batch that has to run anyway; alone it is a step of three tokens. Where no
block is free the last token is computed alone, in one that is set aside for that. Knows contexts
and rows of logits; knows no request and no tier.

`tests/engine/test_canary_finds.py` has a table of what is found. What cannot be, at a price that
nobody feels: a few wrong values in a token that is not drawn, where what others find in it is less
than rounding; in 16 bits also a change of some percent in weights that make neither keys nor values
themselves (q_proj, o_proj, the MLP). Checksums find what goes wrong on a disk, and a digest of the
weights keeps another model's KV apart: this is for what neither sees.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from kvchat.cache.block_manager import BlockTable, CacheManager
from kvchat.cache.restore import Proof
from kvchat.cache.tier import Canary
from kvchat.engine.logit_fingerprint import canary_of, kv_deviation, logit_deviation, tolerance
from kvchat.model.batch import SequencePiece

if TYPE_CHECKING:
    from kvchat.cache.connector import Persistence

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
class Probe:
    """Tokens of the context `ids` that are computed again: the last first. Their tables are the
    probe's until it ends.

    `kept` is the context to be kept, None where `proof` says what is to be proven; of that `ids`
    are what is left.
    """

    ids: list[int]
    rows: list[_Row]
    kept: _Kept | None = None
    proof: Proof | None = None

    @property
    def canary(self) -> Canary | None:
        """What the logits have to be, None where that is not known of the last token left."""
        is_whole = self.proof is not None and len(self.ids) == len(self.proof.ids)
        return self.proof.canary if self.proof is not None and is_whole else None

    @property
    def pieces(self) -> list[SequencePiece]:
        return [row.piece for row in self.rows]


class Probes:
    """The probes of one engine, which without `persistence` has none.

    `dtype` is what its model computes in. Every `begin` is followed by a step that ends what was
    begun. The engine's thread owns it.
    """

    def __init__(
        self, cache: CacheManager, persistence: "Persistence | None", dtype: torch.dtype
    ) -> None:
        self._cache = cache
        self._persistence = persistence
        self._tolerance = tolerance(dtype, cache.kv_pool.geometry.dtype)
        self._draws = random.Random(0)
        self._to_keep: list[_Kept] = []
        self._open: list[Probe] = []
        if persistence is not None:
            cache.set_aside_a_block()

    @property
    def has_work(self) -> bool:
        if self._persistence is None:
            return False
        return bool(self._to_keep) or self._persistence.restoring.has_proofs

    def save(self, ids: Sequence[int], is_one_shot: bool = False) -> None:
        """Keep a context, with its canary, after the next step."""
        if self._persistence is not None and self._persistence.saver.lacks(ids):
            self._to_keep.append(_Kept(list(ids), is_one_shot))

    def begin(self, run: Run, of_all: bool = False) -> list[Proof]:
        """Hold what is to be computed in the coming step; return what has failed before it.

        `of_all` where others may meet what is still coming up. What there is no room for is
        computed by `run` at once: nobody runs on what is not proven.
        """
        if self._persistence is None:
            return []
        waiting, self._to_keep = self._to_keep, []
        failed: list[Proof] = []
        all_due: list[Proof | _Kept] = [*self._persistence.restoring.proofs(of_all), *waiting]
        for due in all_due:
            try:
                failed.extend(self._begin(due, run))
            except Exception:  # what cannot be looked at is not believed, and not kept
                _log.exception("a probe could not be begun")
                failed.extend([due] if isinstance(due, Proof) else [])
        return failed

    def _begin(self, due: Proof | _Kept, run: Run) -> list[Proof]:
        """Hold a probe, or compute it at once; return what has failed. Raises, and holds nothing
        then.
        """
        if isinstance(due, Proof):
            if not (ids := self._left_of(due)):
                return []
            probe = Probe(ids, [], proof=due)
        else:
            ids = due.ids[: len(due.ids) // self._cache.block_size * self._cache.block_size]
            probe = Probe(ids, [], kept=due)
        try:
            return self._begin_rows(probe, run)
        except Exception:
            self._release(probe)
            raise

    def _begin_rows(self, probe: Probe, run: Run) -> list[Proof]:
        """Hold the rows of a probe that there is room for, or compute the last token at once."""
        if not self._add_row(probe, len(probe.ids)):
            return self._compute_aside(probe, run)
        for length in self._drawn(probe.proof, len(probe.ids)) if probe.proof is not None else ():
            if not self._add_row(probe, length):
                self._cache.release(probe.rows.pop().table, [])  # fewer will have to do
                break
        self._open.append(probe)
        return []

    def _add_row(self, probe: Probe, length: int) -> bool:
        """Have a probe hold the first `length` tokens; whether the last of them can be written."""
        ids = probe.ids[:length]
        row = _Row(ids, self._held(ids))
        probe.rows.append(row)
        return self._is_there(row) and self._cache.reserve(row.table, length - 1, length)

    def _drawn(self, proof: Proof, num_left: int) -> list[int]:
        """Return how many tokens end with each that is drawn, one from each of equal parts of what
        came up.
        """
        num_tokens = num_left - 1 - proof.num_trusted
        edges = [proof.num_trusted + num_tokens * i // _NUM_DRAWN for i in range(_NUM_DRAWN + 1)]
        parts = [range(*ends) for ends in pairwise(edges)]
        return [1 + self._draws.choice(part) for part in parts if part]

    def _left_of(self, proof: Proof) -> list[int]:
        """Return what the device still has of what is to be proven, nothing where that is trusted.

        What has sunk into host memory meanwhile could come up unproven, and is forgotten there.
        """
        num_left = self._cache.measure(proof.ids)
        if num_left < len(proof.ids):
            self._cache.forget(proof.ids, num_left)
        return proof.ids[:num_left] if num_left > proof.num_trusted else []

    def _held(self, ids: list[int]) -> BlockTable:
        """Hold all blocks of a context, the last too: to make room for a copy of that it would
        otherwise be forgotten itself, and there would be nothing to compare.
        """
        return self._cache.match([*ids, _NO_TOKEN])

    def _is_there(self, row: _Row) -> bool:
        return bool(row.ids) and row.table.cached_len == len(row.ids)

    def _release(self, probe: Probe) -> None:
        for row in probe.rows:
            self._cache.release(row.table, [])

    def _compute_aside(self, probe: Probe, run: Run) -> list[Proof]:
        """Compute a probe in the block set aside; return what has failed.

        A device tier of a single block has none: there contexts are kept without a canary, and
        nothing ever comes up. Of a context that is gone meanwhile nothing is kept either.
        """
        [row] = probe.rows
        if self._is_there(row) and self._cache.lend(row.table):
            return self._end_alone([probe], run)
        self._release(probe)
        if probe.kept is not None:
            self._keep(probe.kept, None)
        return [probe.proof] if probe.proof is not None else []

    @property
    def pieces(self) -> list[SequencePiece]:
        """What the coming step is to compute beside its plan: a row of logits each, in order."""
        return [piece for probe in self._open for piece in probe.pieces]

    def end(self, logits: torch.Tensor, run: Run) -> list[Proof]:
        """Take the rows of `pieces`, [num_pieces, vocab_size] float32; return what has failed.

        What fails gets a second look, computed alone by `run`: low bits depend on what else is in
        a batch, and where a model chooses experts by them, more than low bits.
        """
        probes, self._open = self._open, []
        return self._end(probes, list(logits), run)

    def end_alone(self, run: Run) -> list[Proof]:
        """Compute what was begun in a step of its own; return what has failed.

        Where that cannot be, contexts are kept without a canary and what came up is not believed.
        """
        probes, self._open = self._open, []
        return self._end_alone(probes, run) if probes else []

    def _end_alone(self, probes: Sequence[Probe], run: Run) -> list[Proof]:
        pieces = [piece for probe in probes for piece in probe.pieces]
        try:
            logits: list[torch.Tensor | None] = list(run(pieces))
        except Exception:  # a model's own code can fail with anything
            _log.exception("probes failed contexts=%d", len(probes))
            logits = [None] * len(pieces)
        return self._end(probes, logits, run)

    def _end(
        self, probes: Sequence[Probe], logits: Sequence[torch.Tensor | None], run: Run
    ) -> list[Proof]:
        starts = accumulate((len(probe.rows) for probe in probes), initial=0)
        of_last = [logits[start] for _, start in zip(probes, starts, strict=False)]
        failed = [
            probe.proof
            for probe, row in zip(probes, of_last, strict=True)
            if probe.proof is not None and not self._is_proven(probe, row, run)
        ]
        for probe in probes:
            self._release(probe)
        for probe, row in zip(probes, of_last, strict=True):
            if probe.kept is not None:
                self._keep(probe.kept, row)
        return failed

    def _keep(self, kept: _Kept, row: torch.Tensor | None) -> None:
        """Keep a context; one whose KV makes no numbers is better computed again."""
        assert self._persistence is not None
        canary = canary_of(row) if row is not None else None
        if row is None or canary is not None:
            self._persistence.save(kept.ids, canary, kept.is_one_shot)

    def _holds(self, probe: Probe, row: torch.Tensor | None) -> bool:
        if row is None:
            return False
        canary = probe.canary
        off = logit_deviation(canary, row) if canary is not None else 0.0
        drifts = [self._cache.drift(row.table, probe.ids, row.position) for row in probe.rows]
        kv = kv_deviation([drift for drift in drifts if drift is not None])
        is_right = self._tolerance.allows(off, kv)
        level = logging.DEBUG if is_right else logging.WARNING
        _log.log(level, "proof logits=%.2e kv=%s tokens=%d", off, kv, len(probe.ids))
        return is_right

    def _is_proven(self, probe: Probe, row: torch.Tensor | None, run: Run) -> bool:
        """Whether a proof holds, at the first look or at the second; what cannot be looked at, for
        want of memory mostly, does not.
        """
        for look in (lambda: row, lambda: run(probe.pieces)[0]):
            try:
                if self._holds(probe, look()):
                    return True
            except Exception:
                _log.exception("a proof could not be looked at")
        return False
