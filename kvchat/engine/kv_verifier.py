"""KvVerifier: recomputes a few tokens of a context in the next batch, to verify its KV.

A context to be kept gets a fingerprint: the top logits of its last token, recomputed. A restored
context is verified by three tokens: its last, and two others drawn at random for every restore.
Each token attends to all tokens before it. It is computed in a block of its own, so that the old KV
is still there to compare. The check adds rows to a batch that runs anyway; alone it is a step of
three tokens. If no block is free, only the last token is computed, in a spare block.

Checksums detect damage on the disk, and a digest of the weights separates the KV of different
models. This check is for errors that neither detects; a table of those it finds is in
`tests/unit/engine/test_kv_verifier_finds.py`. It cannot find, at this low cost, a few wrong values
in a token that was not drawn, if their effect on other tokens is below rounding. In 16 bits it also
cannot find a change of a few percent in weights that do not make keys or values themselves (q_proj,
o_proj, the MLP).

Three things are compared:

- The top logits of the last token with the stored ones, its *fingerprint*. They miss many errors:
  wrong keys in a middle layer hardly change the logits of one token among a thousand.
- The recomputed keys and values of each token with the restored ones: their distance.
- The lengths of these vectors: an error of scale shows in the sum of many numbers long before it
  shows in a single number.

Contexts of a model with recurrent state are not recomputed: a token in their middle has no state to
start from. Their checksums and their identity have to do.
"""

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from kvchat.cache.arrivals import RestoredContext
from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.keys import NO_TOKEN
from kvchat.cache.tier import LogitFingerprint
from kvchat.model.batch import SequencePiece

if TYPE_CHECKING:
    from kvchat.cache.chain import KvChain

_log = logging.getLogger(__name__)

# How many tokens of a restored context are recomputed, besides its last.
_NUM_DRAWN = 2

# Computes pieces in a step of their own; returns a row of logits for each.
Run = Callable[[Sequence[SequencePiece]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _ToKeep:
    """A context to keep; `is_one_shot` if a later request is unlikely to continue it."""

    ids: list[int]
    is_one_shot: bool


@dataclass(frozen=True, slots=True)
class _Row:
    """A token to recompute: the last of `ids`, in the last block of `table`.

    No other table uses that block.
    """

    ids: list[int]
    table: BlockTable

    @property
    def position(self) -> int:
        return len(self.ids) - 1

    @property
    def piece(self) -> SequencePiece:
        """The piece that computes the token and returns its row of logits."""
        return SequencePiece(self.ids[-1:], self.position, self.table.blocks, num_logit_rows=1)


@dataclass(frozen=True, slots=True, eq=False)
class KvCheck:
    """The tokens of the context `ids` to recompute; the last token is the first row.

    The check holds the rows' tables until it ends. Exactly one of `kept`, a context to keep, and
    `restored`, a context to verify, is set. For a restored context, `ids` are the leading tokens
    that the device still has.
    """

    ids: list[int]
    rows: list[_Row]
    kept: _ToKeep | None = None
    restored: RestoredContext | None = None

    @property
    def fingerprint(self) -> LogitFingerprint | None:
        """The expected logits of the last token of `ids`; None if they are not known."""
        is_whole = self.restored is not None and len(self.ids) == len(self.restored.ids)
        return self.restored.fingerprint if self.restored is not None and is_whole else None

    @property
    def pieces(self) -> list[SequencePiece]:
        return [row.piece for row in self.rows]


class KvVerifier:
    """The checks of one engine; without a slow tier in `chain` there are none.

    `dtype` is the dtype the model computes in. After every `begin`, the step calls `end` or
    `end_alone`. The engine's thread owns it.
    """

    def __init__(self, cache: CacheManager, chain: "KvChain", dtype: torch.dtype) -> None:
        self._cache = cache
        self._chain = chain
        geometry = cache.kv_pool.geometry
        self._tolerance = tolerance(dtype, geometry.format.precision(geometry))
        self._draws = random.Random(0)
        self._to_keep: list[_ToKeep] = []
        self._open: list[KvCheck] = []
        # Pieces the next step computes after its plan; each gives a row of logits, in this order.
        self.pieces: list[SequencePiece] = []
        if chain.has_slow:
            cache.reserve_spare_block()

    @property
    def has_work(self) -> bool:
        return bool(self._to_keep) or self._chain.arrivals.has_unverified

    @property
    def has_due(self) -> bool:
        """Whether `begin` has anything to take: of arrivals under way too, unlike `has_work`."""
        return bool(self._to_keep or self._chain.arrivals.unverified)

    def save(self, ids: Sequence[int], is_one_shot: bool = False) -> None:
        """Queue a context: the next step computes its fingerprint, then the tiers keep it."""
        if self._cache.has_state:
            for context in self._cache.contexts_to_keep(ids) if self._chain.has_slow else ():
                self._chain.save(context, None, is_one_shot)
        elif self._chain.lacks(ids):
            self._to_keep.append(_ToKeep(list(ids), is_one_shot))

    def begin(self, run: Run, of_all: bool = False) -> list[RestoredContext]:
        """Hold the tokens to recompute in the next step; return contexts that have failed already.

        `of_all` also takes restores that are not over, for when other requests may use their KV.
        Checks without room in the cache are computed by `run` at once, so that no request uses KV
        that is not verified.
        """
        if not self.has_due:
            return []
        if self._cache.has_state:
            self._chain.arrivals.take_unverified(of_all)  # their checksums have to do
            return []
        waiting, self._to_keep = self._to_keep, []
        failed: list[RestoredContext] = []
        all_due: list[RestoredContext | _ToKeep] = [
            *self._chain.arrivals.take_unverified(of_all),
            *waiting,
        ]
        for due in all_due:
            try:
                failed.extend(self._begin(due, run))
            except Exception:  # without a check, restored KV has failed and a context is not kept
                _log.exception("a KV check could not start")
                failed.extend([due] if isinstance(due, RestoredContext) else [])
        self.pieces = [piece for check in self._open for piece in check.pieces]
        return failed

    def _begin(self, due: RestoredContext | _ToKeep, run: Run) -> list[RestoredContext]:
        """Hold a check, or compute it at once; return the contexts that failed.

        If it raises, it holds no blocks.
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
        """Hold the rows that have room; if the last token has none, compute it at once."""
        if not self._add_row(check, len(check.ids)):
            return self._compute_aside(check, run)
        for length in (
            self._drawn(check.restored, len(check.ids)) if check.restored is not None else ()
        ):
            if not self._add_row(check, length):
                self._cache.release(check.rows.pop().table, [])  # check fewer tokens
                break
        self._open.append(check)
        return []

    def _add_row(self, check: KvCheck, length: int) -> bool:
        """Hold the first `length` tokens for a check; return whether the last is writable."""
        ids = check.ids[:length]
        row = _Row(ids, self._held(ids))
        check.rows.append(row)
        return self._is_there(row) and self._cache.reserve(row.table, length - 1, length)

    def _drawn(self, restored: RestoredContext, num_left: int) -> list[int]:
        """Draw one token from each of `_NUM_DRAWN` equal parts of the restored tokens.

        Returns for each the length of the context that ends with it.
        """
        num_tokens = num_left - 1 - restored.num_trusted
        edges = [restored.num_trusted + num_tokens * i // _NUM_DRAWN for i in range(_NUM_DRAWN + 1)]
        parts = [range(*ends) for ends in pairwise(edges)]
        return [1 + self._draws.choice(part) for part in parts if part]

    def _left_of(self, restored: RestoredContext) -> list[int]:
        """Return the leading tokens the device still has, or [] if all of those are trusted.

        Tokens that have left the device may be in host memory. They are forgotten there, because
        they could be promoted without a check.
        """
        num_left = self._cache.num_cached_tokens(restored.ids)
        if num_left < len(restored.ids):
            self._cache.forget(restored.ids, num_left)
        return restored.ids[:num_left] if num_left > restored.num_trusted else []

    def _held(self, ids: list[int]) -> BlockTable:
        """Hold all blocks of a context, the last included.

        Otherwise making room for a copy of the last block could evict it, and there would be
        nothing to compare.
        """
        return self._cache.match([*ids, NO_TOKEN])

    def _is_there(self, row: _Row) -> bool:
        return bool(row.ids) and row.table.cached_len == len(row.ids)

    def _release(self, check: KvCheck) -> None:
        for row in check.rows:
            self._cache.release(row.table, [])

    def _compute_aside(self, check: KvCheck, run: Run) -> list[RestoredContext]:
        """Compute a check in the spare block; return the contexts that failed.

        A device tier of a single block has no spare: there contexts are kept without a
        fingerprint, and nothing is ever restored. Nothing is kept of a context that was evicted
        meanwhile.
        """
        [row] = check.rows
        if self._is_there(row) and self._cache.use_spare_block(row.table):
            return self._end_alone([check], run)
        self._release(check)
        if check.kept is not None:
            self._keep(check.kept, None)
        return [check.restored] if check.restored is not None else []

    def end(self, logits: torch.Tensor, run: Run) -> list[RestoredContext]:
        """Take the rows of `pieces`, [num_pieces, vocab_size] float32; return the failed contexts.

        A check that fails is repeated alone by `run`. The low bits of a row depend on the rest of
        the batch, and in a model that routes to experts by them, so do more than the low bits.
        """
        return self._end(self._taken(), list(logits), run)

    def end_alone(self, run: Run) -> list[RestoredContext]:
        """Compute the held checks in a step of their own; return the failed contexts.

        If that step fails, contexts are kept without a fingerprint, and restored ones have failed.
        """
        checks = self._taken()
        return self._end_alone(checks, run) if checks else []

    def _taken(self) -> list[KvCheck]:
        checks, self._open, self.pieces = self._open, [], []
        return checks

    def _end_alone(self, checks: Sequence[KvCheck], run: Run) -> list[RestoredContext]:
        pieces = [piece for check in checks for piece in check.pieces]
        try:
            logits: list[torch.Tensor | None] = list(run(pieces))
        except Exception:  # a model's own code can fail with anything
            _log.exception("KV checks could not run contexts=%d", len(checks))
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

    def _keep(self, kept: _ToKeep, row: torch.Tensor | None) -> None:
        """Keep a context, unless its logits are not finite: then its KV is computed anew."""
        fingerprint = fingerprint_of(row) if row is not None else None
        if row is None or fingerprint is not None:
            self._chain.save(kept.ids, fingerprint, kept.is_one_shot)

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
        """Whether restored KV is right, by `row` or by a second computation.

        A check that raises, mostly for lack of memory, does not verify it.
        """
        for look in (lambda: row, lambda: run(check.pieces)[0]):
            try:
                if self._holds(check, look()):
                    return True
            except Exception:
                _log.exception("restored KV could not be checked")
        return False


_NUM_LOGITS = 8
# With fewer tokens, the median may be the token with the largest rounding error.
_FEWEST_FOR_A_MIDDLE = 3


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the recomputed KV of a few tokens is off; infinite if a value is not finite.

    Distances are relative to the usual length of a key or value. `typical` is the median distance
    over three or more tokens, in the tensor where it is largest. One of three tokens may be far off
    in right KV: where two experts score alike, rounding chooses between them (a distance of 0.7,
    once in 400 right restores). With fewer tokens, `most` is the largest distance instead. `scale`
    is the median relative difference of length.
    """

    most: float = 0.0
    typical: float = 0.0
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a right forward pass may be off: its logits, and its keys and values."""

    logits: float
    kv: Deviation

    def allows(self, logits: float, kv: Deviation) -> bool:
        """Whether these deviations can be rounding; NaN and infinity cannot."""
        is_near = kv.most <= self.kv.most and kv.typical <= self.kv.typical
        return logits <= self.logits and is_near and kv.scale <= self.kv.scale


# Several times the largest deviations of right KV. Those were measured alone and beside 5, 21 and
# 100 other rows, after prefill and after decoding, three tokens at a time. The models were the demo
# model (8 layers) and random weights in the shapes of llama, qwen3 and gemma3, `--weights` as they
# are:
#
#     .             logits    farthest token   middle token   scale, of one token
#     float32       1.4e-6    5.7e-6           1.9e-6         1.7e-7
#     float16       -         4.7e-3           1.9e-3         4.0e-4
#     bfloat16      6.8e-3    8.1e-2           1.8e-2         5.2e-3
#
# KV of 8 bits counts as bfloat16, in any dtype of the model. Where a number lies at the middle of
# two levels, rounding error decides the level: a middle token of 1.5e-2, a scale of 3.6e-3 at most.
#
# KV in few bits may be converted from more: it was computed over KV without that rounding. After
# 900 tokens a middle token of SmolLM2 is off by 1.2e-2 in 8 bits, 0.13 with values and 0.18 with
# keys of 4 too, of Gemma-3-270M by 0.3, its scale by 6.2e-2. KV of another text is off by 1.4.
_TOLERANCES = {
    torch.float32: Tolerance(1e-4, Deviation(1e-4, 4e-5, 1e-5)),
    torch.float16: Tolerance(8e-3, Deviation(2e-2, 8e-3, 2e-3)),
    torch.bfloat16: Tolerance(6e-2, Deviation(0.2, 6e-2, 1.5e-2)),
    torch.uint8: Tolerance(0.2, Deviation(0.8, 0.5, 0.15)),  # two numbers of 4 bits, or e4m3
}


def tolerance(*dtypes: torch.dtype) -> Tolerance:
    """Return the tolerance of the coarsest of `dtypes`; others count as bfloat16."""
    coarsest = _TOLERANCES[torch.bfloat16]
    found = [_TOLERANCES.get(dtype, coarsest) for dtype in dtypes]
    return max(found, key=lambda each: each.kv.most)


def fingerprint_of(logits: torch.Tensor) -> LogitFingerprint | None:
    """Return the fingerprint of a token's logits, [vocab_size] float32.

    Returns None if one of its top logits is not finite.
    """
    values, token_ids = logits.topk(min(_NUM_LOGITS, len(logits)))
    found = [float(value) for value in values.tolist()]
    if not all(math.isfinite(value) for value in found):
        return None
    return LogitFingerprint(tuple(token_ids.tolist()), tuple(found))


def logit_deviation(fingerprint: LogitFingerprint, logits: torch.Tensor) -> float:
    """Return how far logits, [vocab_size] float32, are from a fingerprint.

    The result is the largest difference over the fingerprint's largest absolute logit. It is
    infinite if a value is not finite, or a token id is not in the vocabulary.
    """
    if max(fingerprint.token_ids) >= len(logits):
        return math.inf
    found = logits[list(fingerprint.token_ids)].tolist()
    distances = [abs(new - old) for new, old in zip(found, fingerprint.values, strict=True)]
    if not all(math.isfinite(distance) for distance in distances):
        return math.inf
    largest = max(abs(value) for value in fingerprint.values)
    return max(distances) / max(largest, 1e-6)


def kv_deviation(kv_errors: Sequence[torch.Tensor]) -> Deviation:
    """Return how far tokens are off; `kv_errors` has one `CacheManager.kv_error` for each.

    The window blocks of some may have left the cache since: only tokens with the most tensors tell.
    """
    num_tensors = max(map(len, kv_errors), default=0)
    if not num_tensors:
        return Deviation()
    kv_errors = [kv_error for kv_error in kv_errors if len(kv_error) == num_tensors]
    squares, products, own = torch.stack(kv_errors).unbind(dim=2)  # [num_tokens, num_tensors]
    distances = squares.sqrt()
    if not bool(distances.isfinite().all() and products.isfinite().all()):
        return Deviation(math.inf, math.inf, math.inf)
    is_enough = len(kv_errors) >= _FEWEST_FOR_A_MIDDLE
    # Without the bound, rounding of a token with tiny values would look like an error of scale.
    scales = products / own.clamp_min(0.5)
    return Deviation(
        most=float(distances.max()) if not is_enough else 0.0,
        typical=float(distances.median(dim=0).values.max()) if is_enough else 0.0,
        scale=float(scales.median(dim=0).values.abs().max()),
    )
