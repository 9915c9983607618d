"""Runner: a step's plan -> one ForwardBatch -> logits -> the tokens drawn from them.

Here blocks from the cache meet the model, and rows of logits meet the requests and drafts they
belong to. Nothing is appended to a request here, and no ending is decided.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvchat.cache.block_manager import SCRATCH_BLOCK
from kvchat.core.stats import GraphStatus
from kvchat.engine.request import Request
from kvchat.engine.sampler import (
    DeviceTokenIds,
    SamplingRow,
    as_tokens,
    row_draw,
    sample,
    sample_seed,
)
from kvchat.engine.scheduler import ScheduledRequest
from kvchat.engine.step_threads import StepThreads
from kvchat.model.batch import ForwardBatch, SequencePiece, build_batch
from kvchat.model.graphs import GraphRunner
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.sampler import RowDraw
from kvchat_kernels.sending import on_device

_log = logging.getLogger(__name__)

_NUM_ROWS = (8, 1)  # a verify and a plain step, which reads what the verify has written
_NUM_TOKENS = sum(_NUM_ROWS)


class WarmupModel(Protocol):
    """A model, as far as the warm-up knows it."""

    @property
    def device(self) -> torch.device:
        """Where its batches lie."""

    @property
    def is_checked(self) -> bool:
        """Whether its steps are computed once, as they always will be from now on."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a step."""


class Warmup:
    """Warm-up: two dummy decode steps of one model, run before steps are timed.

    A model that has yet to prove that it may run as a whole computes its first steps twice: that
    time would be taken for the cost of a step, and drafts be held to be too dear. Tokens are below
    `vocab_size`, in blocks of `block_size`. The steps write to the scratch block, which nobody else
    reads. Where it has not room for them all, the first real steps prove what there is to prove.
    """

    def __init__(self, model: WarmupModel, vocab_size: int, block_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._is_over = block_size < _NUM_TOKENS

    def run(self) -> None:
        """Run the steps, once. A model that fails in them will say so where it is asked."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if not self._model.is_checked:
                self._run()
        except Exception as error:
            _log.warning("the warm-up failed", exc_info=error)

    def _run(self) -> None:
        # Each token is another: equal ones would have equal values, and whatever attention does to
        # those gives the same.
        ids = [(2 * i + 1) * self._vocab_size // (2 * _NUM_TOKENS) for i in range(_NUM_TOKENS)]
        start = 0
        for num_rows in _NUM_ROWS:
            tokens = ids[start : start + num_rows]
            piece = SequencePiece(tokens, start, [SCRATCH_BLOCK], num_logit_rows=num_rows)
            self._model.forward(build_batch([piece], self._block_size, self._model.device))
            start += num_rows


class Runner:
    """Runs steps on one model whose pools have blocks of `block_size` tokens.

    By `graphs` where there are some and one fits, otherwise eagerly; on a CPU on as many threads as
    `threads` finds best, on those there are where it is None. `warmup` is of the same model.
    """

    def __init__(
        self,
        model: PagedModel,
        block_size: int,
        graphs: GraphRunner | None = None,
        threads: StepThreads | None = None,
        warmup: Warmup | None = None,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._graphs = graphs
        self._threads = threads
        self._warmup = warmup

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def has_graphs(self) -> bool:
        """Whether `draw` can ever return tokens."""
        return self._graphs is not None

    def run(
        self, plan: Sequence[ScheduledRequest], checks: Sequence[SequencePiece] = ()
    ) -> torch.Tensor:
        """Compute the plan's tokens; return rows of logits for each scheduled request that
        completes, in order.

        Each has one row, and one more for each of its drafts: what follows where they are right.
        Whatever `checks` ask for is computed beside it, and their rows come last. Returns
        [num_rows + num_check_rows, vocab_size] float32.
        """
        pieces = [*(_piece(scheduled) for scheduled in plan), *checks]
        return self.run_pieces(pieces)

    def run_pieces(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        """Compute pieces; return the rows of logits they ask for, in order, [num_rows, vocab].

        On a GPU rows may still be on their way, and whoever reads them waits. Where none are asked
        for nobody would: then this does.
        """
        logits = self._graphs.run(pieces) if self._graphs is not None else None
        if logits is None:
            logits = self._run_eagerly(pieces)
        if not len(logits):
            self.wait()
        return logits

    def draw(
        self, plan: Sequence[ScheduledRequest], draws: Sequence[RowDraw | None]
    ) -> torch.Tensor | None:
        """Compute the plan's tokens and draw from their rows at once, where a graph does both.

        `draws` say how, request by request. Returns one token for each row that `run` would return,
        [num_rows] int64, -1 where a logit is not a number; None where nothing was computed.
        """
        return self.draw_pieces([_piece(scheduled) for scheduled in plan], draws)

    def draw_pieces(
        self, pieces: Sequence[SequencePiece], draws: Sequence[RowDraw | None]
    ) -> torch.Tensor | None:
        """Do the same for pieces."""
        tokens = self._graphs.draw(pieces, draws) if self._graphs is not None else None
        if tokens is not None and not len(tokens):
            self.wait()
        return tokens

    def _run_eagerly(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        batch = build_batch(pieces, self._block_size, self._model.device)
        if self._threads is None:
            return self._model.forward(batch)
        return self._threads.run(batch.token_ids.shape[0], lambda: self._model.forward(batch))

    def wait(self) -> None:
        """Wait until all that was run has been computed, for whoever takes its time."""
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def prepare(self) -> None:
        """Spend the time of a few steps on making others faster, where that pays."""
        if self._graphs is not None:
            self._graphs.capture_wanted()
        if self._warmup is not None:
            self._warmup.run()

    def graph_status(self) -> GraphStatus | None:
        """Return counts for people; None where steps are never captured."""
        return self._graphs.status() if self._graphs is not None else None

    def step_threads(self) -> tuple[int, int] | None:
        """Return on how many threads a step of one token runs, of how many; None on a GPU."""
        threads = self._threads
        return (threads.num_threads(), threads.most) if threads is not None else None


def _piece(scheduled: ScheduledRequest) -> SequencePiece:
    request = scheduled.request
    assert request.table is not None
    start = request.num_computed
    return SequencePiece(
        token_ids=[*request.ids[start : start + scheduled.num_tokens], *scheduled.drafts],
        start=start,
        blocks=request.table.blocks,
        num_logit_rows=1 + len(scheduled.drafts) if scheduled.completes else 0,
    )


_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose draw it is: row `row` of a scheduled request, for the request or a sibling about to
    fork.
    """

    scheduled: ScheduledRequest
    row: int
    sibling: int


def draw(
    plan: Sequence[ScheduledRequest], logits: torch.Tensor
) -> dict[ScheduledRequest, list[int]]:
    """Draw the next token of each completing request, and of the siblings about to fork.

    logits   [num_rows, vocab_size] float32, as a Runner returns them

    For a request with drafts the tokens are those of consecutive positions, one for each of its
    rows.
    """
    owners: list[_Owner] = []
    rows_of_logits: list[int] = []
    start = 0
    tokens: dict[ScheduledRequest, list[int]] = {}
    for scheduled in plan:
        if not scheduled.completes:
            continue
        tokens[scheduled] = []
        for owner in _owners(scheduled):
            owners.append(owner)
            rows_of_logits.append(start + owner.row)
        start += 1 + len(scheduled.drafts)
    if len(owners) > start:
        logits = logits[on_device(rows_of_logits, torch.int64, logits.device)]
    rows = [
        sampling_row(o.scheduled.request, o.scheduled.drafts[: o.row], logits.device, o.sibling)
        for o in owners
    ]
    drawn = sample(logits, rows) if rows else []
    for owner, token in zip(owners, drawn, strict=True):
        tokens[owner.scheduled].append(token)
    return tokens


def draws_of(plan: Sequence[ScheduledRequest]) -> list[RowDraw | None] | None:
    """Return how the rows of each completing request draw without the host, None for the others;
    None at all where one of them cannot: a penalty sees its context, and siblings draw from one
    row.
    """
    draws: list[RowDraw | None] = []
    for scheduled in plan:
        request = scheduled.request
        if not scheduled.completes:
            draws.append(None)
        elif request.spec.sampling.repetition_penalty != 1.0 or request.num_siblings_to_fork:
            return None
        else:
            draws.append(row_draw(sampling_row(request, (), _HOST)))
    return draws


def tokens_of(
    plan: Sequence[ScheduledRequest], drawn: torch.Tensor
) -> dict[ScheduledRequest, list[int]]:
    """Return the tokens of each completing request, as `draw` does: `drawn` has one for each row.

    Raises ValueError where a logit is not a number.
    """
    tokens = iter(as_tokens(drawn))
    return {w: [next(tokens) for _ in range(1 + len(w.drafts))] for w in plan if w.completes}


def _owners(scheduled: ScheduledRequest) -> Iterator[_Owner]:
    num_siblings = scheduled.request.num_siblings_to_fork
    assert not (scheduled.drafts and num_siblings)
    for row in range(1 + len(scheduled.drafts)):
        for sibling in range(1 + num_siblings):
            yield _Owner(scheduled, row, sibling)


def sampling_row(
    request: Request, drafts: Sequence[int], device: torch.device, sibling: int = 0
) -> SamplingRow:
    """Say how to draw what follows a request's ids and `drafts`; a penalty sees both."""
    params = request.spec.sampling
    context_ids = None
    if params.repetition_penalty != 1.0:
        request.device_ids = request.device_ids or DeviceTokenIds(device)
        context_ids = request.device_ids.of(request.ids, drafts)
    return SamplingRow(
        params=params,
        seed=sample_seed(params.seed, request.sample + sibling),
        position=len(request.ids) + len(drafts),
        context_ids=context_ids,
    )
