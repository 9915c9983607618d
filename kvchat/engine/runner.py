"""Runner and draws: a step's plan -> one ForwardBatch -> logits -> tokens.

Runner runs the model on pieces of requests and their blocks. `draw` and its helpers assign rows of
logits to requests, drafts and siblings, and draw their tokens. Appending the tokens to the requests
is the OutputProcessor's work.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from kvchat.core.errors import DeviceLost, GenerationError, KvchatError
from kvchat.core.stats import GraphStatus
from kvchat.core.types import TokenLogprobs
from kvchat.engine.request import Request
from kvchat.engine.sampler import (
    DeviceTokenIds,
    SamplingRow,
    logprobs_of,
    numeric,
    row_draw,
    sample,
    sample_seed,
    valid_tokens,
)
from kvchat.engine.scheduler import ScheduledRequest
from kvchat.engine.step_threads import StepThreads
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.device import is_lost
from kvchat.model.gpu.graphs import GraphRunner
from kvchat.model.last_hidden import LastHidden
from kvchat.model.paged_model import PagedModel
from kvchat.model.slot_scores import SlotScores, score_slots
from kvchat_kernels.launch import begin_reading, on_device
from kvchat_kernels.sampler import RowDraw

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedTokens:
    """What a queued step draws.

    tokens   [num_rows] int64 on the device, -1 where a logit is NaN; only work queued after the
             step sees them
    read     waits for the step, not for later ones, and returns them
    """

    tokens: torch.Tensor
    read: Callable[[], list[int]]


class Runner:
    """Runs steps on one model whose pools have blocks of `block_size` tokens.

    A step runs by one of `graphs` if one fits, otherwise eagerly. On a CPU, `threads` chooses the
    number of threads; if it is None, that number stays as it is. `window_blocks` says which window
    block each block has at the time of a step, as of `build_batch`; the graphs have the same.
    """

    def __init__(
        self,
        model: PagedModel,
        block_size: int,
        graphs: GraphRunner | None = None,
        threads: StepThreads | None = None,
        window_blocks: torch.Tensor | None = None,
    ) -> None:
        self._model = model
        self._window_blocks = window_blocks
        self._device = model.device
        self._block_size = block_size
        self._graphs = graphs
        self.has_graphs = graphs is not None  # whether `draw` can ever return tokens
        self._threads = threads
        # Of the last step of requests, where the model keeps them: [num_rows, hidden] each.
        self.last_hidden: dict[ScheduledRequest, torch.Tensor] = {}
        self._wants_hidden: Callable[[], bool] = lambda: False

    def keep_hidden(self, before: tuple[int, ...], is_wanted: Callable[[], bool]) -> None:
        """From now on, keep the last hidden states of each step of requests in `last_hidden`, or
        the streams before these layers; none of steps before which `is_wanted` is false.
        """
        assert not self.has_graphs
        self._model.keep_hidden(before)
        self._wants_hidden = is_wanted

    @property
    def can_observe(self) -> bool:
        """Whether `score` works: not on the gathered path, nor with recurrent state."""
        spec = self._model.loaded.spec
        return spec.gathered is None and not spec.state

    @property
    def can_embed(self) -> bool:
        """Whether `hidden` works: not with recurrent state."""
        return not self._model.loaded.spec.state

    @property
    def is_on_cpu(self) -> bool:
        """Whether the model computes on the processor."""
        return bool(self._device.type == "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the model computes in."""
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    def run(
        self,
        plan: Sequence[ScheduledRequest],
        checks: Sequence[SequencePiece] = (),
        is_unwanted: Callable[[], bool] | None = None,
    ) -> torch.Tensor:
        """Compute the plan's tokens; return its rows of logits, `num_logit_rows` for each request.

        A request that completes has one row, and one more for each of its drafts: the logits after
        that draft. One whose prompt is scored has a row after each token. `checks` are computed in
        the same batch; their rows come last. Returns [num_rows + num_check_rows, vocab_size]
        float32, in the order of the plan. On a CPU it asks `is_unwanted` before every product, and
        raises StepAbandoned once that is true; the plan can be run again.
        """
        pieces = [*(piece_of(scheduled) for scheduled in plan), *checks]
        if is_unwanted is not None and self._threads is not None:
            is_unwanted = self._threads.watching(is_unwanted)
        self._begin_hidden()
        with self.stopping(is_unwanted):
            logits = self.run_pieces(pieces)
        if (hidden := self._hidden) is not None and plan:
            rows = hidden.take()
            each = rows.split([len(piece.token_ids) for piece in pieces]) if pieces[1:] else [rows]
            self.last_hidden = dict(zip(plan, each, strict=False))
        return logits

    def _begin_hidden(self) -> None:
        """Drop the hidden states of the step before, and keep this one's where they are wanted."""
        self.last_hidden = {}
        if self._model.hidden is not None:
            self._model.hidden.clear()
            self._model.collect_hidden(is_on=self._wants_hidden())

    @property
    def _hidden(self) -> LastHidden | None:
        """The hidden states of the step, None where they are not wanted."""
        hidden = self._model.hidden
        return hidden if hidden is not None and hidden.is_on else None

    def stopping(self, is_unwanted: Callable[[], bool] | None) -> AbstractContextManager[None]:
        """Let the block's steps be abandoned, as `run` says; None lets none be."""
        return nullcontext() if is_unwanted is None else self._model.stopping(is_unwanted)

    def run_pieces(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        """Compute pieces; return the rows of logits they ask for, in order.

        Returns [num_rows, vocab_size] float32. On a GPU the rows may not be computed yet: reading
        them waits. If no rows are asked for, this call waits instead.
        """
        logits = self._graphs.run(pieces) if self._graphs is not None else None
        if logits is None:
            logits = self._run_eagerly(pieces)
        if not len(logits):
            self.wait()
        return logits

    def draw_plan(self, plan: Sequence[ScheduledRequest]) -> "Drawn | None":
        """Compute the plan's tokens and draw in one graph; None if none fits or it cannot draw."""
        draws = draws_of(plan)
        if draws is None:
            return None
        drawn = self.draw([piece_of(scheduled) for scheduled in plan], draws)
        return tokens_of(plan, drawn.tolist()) if drawn is not None else None

    def draw(
        self, pieces: Sequence[SequencePiece], draws: Sequence[RowDraw | None]
    ) -> torch.Tensor | None:
        """Compute pieces and draw from their rows in one graph, if there is one.

        `draws` says how each piece draws. Returns one token for each row that `run_pieces` would
        return, [num_rows] int64, -1 if a logit is NaN. Returns None if nothing was computed.
        """
        tokens = self._graphs.draw(pieces, draws) if self._graphs is not None else None
        if tokens is not None and not len(tokens):
            self.wait()
        return tokens

    def queue(
        self,
        pieces: Sequence[SequencePiece],
        draws: Sequence[RowDraw | None],
        earlier: QueuedTokens | None = None,
        rows: Sequence[int] = (),
    ) -> QueuedTokens | None:
        """Queue a step in one graph, if there is one, as `draw`; wait for nothing.

        With `earlier`, every piece has one token, of whatever id: the step takes the token of row
        `rows[i]` of the earlier one, which the host need not know.
        """
        if self._graphs is None:
            return None
        fed = None
        if earlier is not None:
            fed = earlier.tokens
            if list(rows) != list(range(len(fed))):
                fed = fed[on_device(rows, torch.int64, fed.device)]
        tokens = self._graphs.draw(pieces, draws, fed)
        return QueuedTokens(tokens, begin_reading(tokens)) if tokens is not None else None

    def _run_eagerly(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        batch = build_batch(pieces, self._block_size, self._device, self._window_blocks)
        if self._threads is None:
            return self._model.forward(batch)
        return self._threads.run(batch.token_ids.shape[0], partial(self._model.forward, batch))

    def new_scores(self, num_slots: int) -> SlotScores:
        """Return the scores of so many slots, of no rows yet."""
        return SlotScores(self._model.loaded.spec, num_slots)

    def score(self, piece: SequencePiece, scores: SlotScores, writes: bool) -> None:
        """Compute a piece, and add how much it attends to each slot: `score_slots`."""
        batch = build_batch([piece], self._block_size, self._device, self._window_blocks)
        compute = partial(score_slots, self._model, batch, scores, writes=writes)
        if self._threads is None:
            compute()
        else:
            self._threads.run(batch.token_ids.shape[0], compute)

    def hidden(self, piece: SequencePiece) -> torch.Tensor:
        """Compute a piece by the model's modules; return the hidden states behind the last norm of
        the rows that it asks for, [num_rows, width] float32. Raises UsageError for a model that
        shows none.
        """
        with self._model.head_inputs() as rows:
            self._run_eagerly([piece])
        return torch.cat(rows)

    def wait(self) -> None:
        """Wait until all submitted steps are computed, so that they can be timed."""
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def prepare(self) -> None:
        """Capture wanted graphs; takes the time of a few steps."""
        if self._graphs is not None:
            self._graphs.capture_wanted()

    def graph_status(self) -> GraphStatus | None:
        """Return the counts shown to users; None if there are no graphs."""
        return self._graphs.status() if self._graphs is not None else None

    def step_threads(self) -> tuple[int, int] | None:
        """Return the threads of a one-token step, and the most possible; None without `threads`."""
        threads = self._threads
        return (threads.num_threads(), threads.most) if threads is not None else None


def piece_of(scheduled: ScheduledRequest) -> SequencePiece:
    """Return the part of a forward pass that a scheduled request wants."""
    request = scheduled.request
    assert request.table is not None
    start = request.num_computed
    return SequencePiece(
        token_ids=[*request.ids[start : start + scheduled.num_tokens], *scheduled.drafts],
        start=start,
        blocks=request.table.blocks,
        num_logit_rows=scheduled.num_logit_rows,
        table_positions=request.table.positions,
    )


_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Owner:
    """One draw: row `row` of a scheduled request, for sample `sibling` after the request's own.

    `sibling` 0 is the request itself; the others are about to fork from it.
    """

    scheduled: ScheduledRequest
    row: int
    sibling: int


class Drawn(NamedTuple):
    """The tokens drawn in a step, and the logprobs of those that want them, one for each token.

    `scored` has the logprobs of the next tokens of prompts. `failed` says which requests have none
    of these, and why.
    """

    tokens: dict[ScheduledRequest, list[int]]
    logprobs: dict[ScheduledRequest, list[TokenLogprobs]]
    scored: Mapping[ScheduledRequest, list[TokenLogprobs]]
    failed: Mapping[ScheduledRequest, KvchatError] = MappingProxyType({})


def draw(plan: Sequence[ScheduledRequest], logits: torch.Tensor) -> Drawn:
    """Draw the next token of each completing request, and of the siblings about to fork.

    logits   [num_rows, vocab_size] float32, as a Runner returns them

    A request with drafts gets one token for each of its rows, at consecutive positions.
    """
    owners: list[_Owner] = []
    rows_of_logits: list[int] = []
    start = 0
    tokens: dict[ScheduledRequest, list[int]] = {}
    scored = _scored(plan, logits)
    for scheduled in plan:
        start += scheduled.num_logit_rows
        if not scheduled.completes:
            continue
        tokens[scheduled] = []
        first = start - 1 - len(scheduled.drafts)
        for owner in _owners(scheduled):
            owners.append(owner)
            rows_of_logits.append(first + owner.row)
    if scored or len(owners) > start:
        logits = logits[on_device(rows_of_logits, torch.int64, logits.device)]
    rows = [
        sampling_row(o.scheduled.request, o.scheduled.drafts[: o.row], logits.device, o.sibling)
        for o in owners
    ]
    wanting = [i for i, o in enumerate(owners) if _num_top(o) is not None]
    raw = logits[wanting] if wanting else None  # a copy: drawing changes rows in place
    drawn = sample(logits, rows) if rows else []
    for owner, token in zip(owners, drawn, strict=True):
        tokens[owner.scheduled].append(token)
    if raw is None:
        return Drawn(tokens, {}, scored)
    logprobs = _logprobs([owners[i] for i in wanting], raw, [drawn[i] for i in wanting])
    return Drawn(tokens, logprobs, scored)


def draw_apart(plan: Sequence[ScheduledRequest], logits: torch.Tensor) -> Drawn:
    """Draw as `draw`; where that fails, draw for each request by itself, and name those that fail.

    For a model with recurrent state, whose step cannot run again: the states have read it.
    """
    whole = logits
    with suppress(Exception):  # it is raised again below, for the request whose it is
        whole = logits.clone()  # drawing changes rows in place
        return draw(plan, logits)
    tokens: dict[ScheduledRequest, list[int]] = {}
    logprobs: dict[ScheduledRequest, list[TokenLogprobs]] = {}
    scored: dict[ScheduledRequest, list[TokenLogprobs]] = {}
    failed: dict[ScheduledRequest, KvchatError] = {}
    start = 0
    for scheduled in plan:
        end = start + scheduled.num_logit_rows
        try:
            one = draw([scheduled], whole[start:end])
        except Exception as error:  # a constraint of its own can fail with anything
            _log.error("no token could be drawn", exc_info=error)
            failed[scheduled] = explained(error, logits.device)
        else:
            tokens.update(one.tokens)
            logprobs.update(one.logprobs)
            scored.update(one.scored)
        start = end
    return Drawn(tokens, logprobs, scored, failed)


def _scored(
    plan: Sequence[ScheduledRequest], logits: torch.Tensor
) -> dict[ScheduledRequest, list[TokenLogprobs]]:
    """Return the logprobs of prompts that a step has the rows for; those told before are left out.

    Raises ValueError if a logit is NaN.
    """
    scored: dict[ScheduledRequest, list[TokenLogprobs]] = {}
    start = 0
    for scheduled in plan:
        request = scheduled.request
        if request.spec.scores_prompt and request.is_to_be_scored:
            told, computed = len(request.scored), request.num_computed
            end = min(computed + scheduled.num_tokens, request.num_prompt_tokens - 1)
            rows = logits[start + told - computed : start + end - computed]
            following = request.ids[told + 1 : end + 1]
            num_top = request.spec.num_top_logprobs
            scored[scheduled] = numeric(logprobs_of(rows, following, num_top or 0))
        start += scheduled.num_logit_rows
    return scored


def _logprobs(
    owners: Sequence[_Owner], raw: torch.Tensor, drawn: Sequence[int]
) -> dict[ScheduledRequest, list[TokenLogprobs]]:
    """Return the logprobs of drawn tokens, each with as many others as its request wants.

    raw   [num_owners, vocab_size] float32, the logits before anything changed them
    """
    logprobs: dict[ScheduledRequest, list[TokenLogprobs]] = {}
    most = max(_num_top(owner) or 0 for owner in owners)
    for owner, each in zip(owners, logprobs_of(raw, drawn, most), strict=True):
        cut = replace(each, top=each.top[: _num_top(owner)])
        logprobs.setdefault(owner.scheduled, []).append(cut)
    return logprobs


def _num_top(owner: _Owner) -> int | None:
    return owner.scheduled.request.spec.num_top_logprobs


def draws_of(plan: Sequence[ScheduledRequest]) -> list[RowDraw | None] | None:
    """Return for each request how its rows draw in a graph; None for one that does not complete.

    Returns None for the whole plan if a request needs its logits outside the graph, or has siblings
    to fork, which draw from one row.
    """
    draws: list[RowDraw | None] = []
    for scheduled in plan:
        request = scheduled.request
        if request.is_to_be_scored:
            return None
        if not scheduled.completes:
            draws.append(None)
        elif request.spec.needs_logits or request.num_siblings_to_fork:
            return None
        else:
            draws.append(row_draw(sampling_row(request, (), _HOST)))
    return draws


def tokens_of(plan: Sequence[ScheduledRequest], drawn: list[int]) -> Drawn:
    """Return the tokens of each completing request, as `draw` does; none wants logprobs.

    drawn   one token for each row

    Raises ValueError if a logit was NaN.
    """
    tokens = iter(valid_tokens(drawn))
    return Drawn(
        {w: [next(tokens) for _ in range(1 + len(w.drafts))] for w in plan if w.completes}, {}, {}
    )


def _owners(scheduled: ScheduledRequest) -> Iterator[_Owner]:
    num_siblings = scheduled.request.num_siblings_to_fork
    assert not (scheduled.drafts and num_siblings)
    for row in range(1 + len(scheduled.drafts)):
        for sibling in range(1 + num_siblings):
            yield _Owner(scheduled, row, sibling)


def sampling_row(
    request: Request, drafts: Sequence[int], device: torch.device, sibling: int = 0
) -> SamplingRow:
    """Return how to draw the token after a request's ids and `drafts`; a penalty uses both.

    A request with a constraint has no drafts.
    """
    assert not (drafts and request.constraint is not None)
    params = request.spec.sampling
    context_ids = None
    if params.penalises:
        request.device_ids = request.device_ids or DeviceTokenIds(device)
        context_ids = request.device_ids.of(request.ids, drafts)
    return SamplingRow(
        params=params,
        seed=sample_seed(params.seed, request.sample + sibling),
        position=len(request.ids) + len(drafts),
        context_ids=context_ids,
        num_prompt=len(request.spec.prompt_ids),
        allowed=request.constraint.allowed() if request.constraint is not None else None,
    )


def explained(error: Exception, device: torch.device) -> KvchatError:
    """Return what a failed step is told as; raises DeviceLost if no step can succeed any more."""
    if isinstance(error, KvchatError):
        return error
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return GenerationError(
            "The device ran out of memory while answering.",
            "Lower --device-cache or use a smaller model.",
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")
    if is_lost(device):
        raise DeviceLost(f"The GPU failed: {reason}.", "Start kvchat again.") from error
    return GenerationError(f"The forward pass failed: {reason}.")
