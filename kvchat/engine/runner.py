"""Runner and draws: a step's plan -> one ForwardBatch -> logits -> tokens.

Runner runs the model on pieces of requests and their blocks. `draw` and its helpers assign rows of
logits to requests, drafts and siblings, and draw their tokens. StepThreads chooses the number of
threads of small steps on a CPU by measuring. Appending the tokens to the requests
is the OutputProcessor's work.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

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
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.graphs import GraphRunner
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.launch import begin_reading, on_device
from kvchat_kernels.sampler import RowDraw

T = TypeVar("T")

MOST_ROWS = 16
# A race compares this many steps of each count. They alternate, so that a growing context or a
# change in the machine's speed affects both counts alike.
TRIED = 5
# Steps between races, at first and at most. Two races in a row without a change double them.
SOON, SELDOM = 16, 512
# A rival wins only if its time is below this share of the present one.
_WORTH = 0.95
# A step this many times slower than usual suggests a busy machine. If half of the latest steps are
# that slow, a race begins at once.
_SLOWER, _MANY_SLOWER = 1.5, 6


class StepThreads:
    """Runs small steps, each on the number of threads that was fastest, at most `most`.

    A decode step is about a hundred matrix products of about ten microseconds each, and the threads
    wait for each other after each product. For a small model one thread is faster. For a large one
    several threads are faster, until other programs use their cores: then each product waits for a
    thread that is not running. So from time to time a few steps run on half or twice as many
    threads, alternating with the present count, and the faster count stays. Large steps have long
    products and always use all threads.

    `set_threads` applies to the calling thread; after each step the number is `most` again. Owned
    by the thread that runs the steps.
    """

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most = most
        self._set_threads = set_threads
        self._clock = clock
        self._counts = sorted({most, *(1 << n for n in range(most.bit_length()))})
        self._races: dict[int, _Race] = {}

    def run(self, num_rows: int, step: Callable[[], T]) -> T:
        """Run `step`, which computes `num_rows` tokens, and return its result."""
        if num_rows > MOST_ROWS or self.most == 1:
            return step()
        race = self._races.get(num_rows)
        if race is None:
            race = self._races[num_rows] = _Race(self._counts, self._likely(num_rows))
        count = race.next_count()
        self._set_threads(count)
        start_s = self._clock()
        try:
            result = step()
            race.note(count, self._clock() - start_s)
            return result
        finally:
            self._set_threads(self.most)

    def num_threads(self, num_rows: int = 1) -> int:
        """Return the number of threads such steps use now, outside races."""
        race = self._races.get(num_rows)
        return race.best if race is not None else self.most

    def _likely(self, num_rows: int) -> int:
        """Return the best count for the nearest number of rows; `most` if there is none."""
        nearest = min(self._races, key=lambda rows: abs(rows - num_rows), default=None)
        return self._races[nearest].best if nearest is not None else self.most


class _Race:
    """Races between neighbours in `counts`, for one number of rows.

    `counts` has at least two items. `best` is the winner of the last race.
    """

    def __init__(self, counts: Sequence[int], best: int) -> None:
        self.best = best
        self._counts = counts
        self._is_for_fewer = True
        self._rival: int | None = None
        self._steps_left = TRIED  # the first steps load code and touch memory for the first time
        self._pause = SOON
        self._num_unchanged = 0
        self._seconds: dict[int, list[float]] = {}
        self._usual_s = 0.0
        self._recent: deque[bool] = deque(maxlen=2 * _MANY_SLOWER)

    def next_count(self) -> int:
        """Return the count for the next step."""
        if self._rival is None:
            return self.best
        mine, other = len(self._seconds[self.best]), len(self._seconds[self._rival])
        return self._rival if other <= mine else self.best

    def note(self, count: int, seconds: float) -> None:
        """Record the seconds of a step with that count."""
        if self._rival is not None:
            self._seconds[count].append(seconds)
            if all(len(times) == TRIED for times in self._seconds.values()):
                self._decide(self._rival)
            return
        self._steps_left -= 1
        self._recent.append(seconds > _SLOWER * self._usual_s > 0.0)
        if sum(self._recent) >= _MANY_SLOWER:
            self._steps_left, self._pause, self._is_for_fewer = 0, SOON, True
        if self._steps_left <= 0:
            self._begin()

    def _begin(self) -> None:
        self._rival = self._next_rival()
        self._seconds = {self.best: [], self._rival: []}

    def _next_rival(self) -> int:
        """Return the neighbour in the direction to try; at an end of `counts`, the other one."""
        place = self._counts.index(self.best)
        step = -1 if self._is_for_fewer else 1
        neighbour = place + step if 0 <= place + step < len(self._counts) else place - step
        return self._counts[neighbour]

    def _decide(self, rival: int) -> None:
        """Keep the faster count; next, go on in its direction, or try the other direction."""
        own, self._rival = self.best, None
        own_s, rival_s = (statistics.median(self._seconds[n]) for n in (own, rival))
        self._usual_s = min(own_s, rival_s)
        self._recent.clear()
        self._is_for_fewer = rival < own
        if rival_s < _WORTH * own_s:
            self.best, self._pause, self._num_unchanged = rival, SOON, 0
            self._steps_left = 1 if self._next_rival() != own else SOON
            return
        self._is_for_fewer = not self._is_for_fewer
        self._num_unchanged += 1
        # Both directions are tried before the pause grows.
        if self._num_unchanged % 2 == 0:
            self._pause = min(2 * self._pause, SELDOM)
        self._steps_left = self._pause


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
    number of threads; if it is None, that number stays as it is.
    """

    def __init__(
        self,
        model: PagedModel,
        block_size: int,
        graphs: GraphRunner | None = None,
        threads: StepThreads | None = None,
    ) -> None:
        self._model = model
        self._device = model.device
        self._block_size = block_size
        self._graphs = graphs
        self.has_graphs = graphs is not None  # whether `draw` can ever return tokens
        self._threads = threads

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
        with self.stopping(is_unwanted):
            return self.run_pieces(pieces)

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

    def draw(
        self, plan: Sequence[ScheduledRequest], draws: Sequence[RowDraw | None]
    ) -> torch.Tensor | None:
        """Compute the plan's tokens and draw from their rows in one graph, if there is one.

        `draws` says how each scheduled request draws. Returns one token for each row that `run`
        would return, [num_rows] int64, -1 if a logit is NaN. Returns None if nothing was computed.
        """
        return self.draw_pieces([piece_of(scheduled) for scheduled in plan], draws)

    def draw_pieces(
        self, pieces: Sequence[SequencePiece], draws: Sequence[RowDraw | None]
    ) -> torch.Tensor | None:
        """Do the same as `draw` for pieces."""
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
        """Queue a step in one graph, if there is one, as `draw_pieces`; wait for nothing.

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
        batch = build_batch(pieces, self._block_size, self._device)
        if self._threads is None:
            return self._model.forward(batch)
        return self._threads.run(batch.token_ids.shape[0], lambda: self._model.forward(batch))

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

    `scored` has the logprobs of the next tokens of prompts.
    """

    tokens: dict[ScheduledRequest, list[int]]
    logprobs: dict[ScheduledRequest, list[TokenLogprobs]]
    scored: Mapping[ScheduledRequest, list[TokenLogprobs]]


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
        if request.is_to_be_scored:
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
        num_prompt=request.num_prompt_tokens,
        allowed=request.constraint.allowed() if request.constraint is not None else None,
    )
