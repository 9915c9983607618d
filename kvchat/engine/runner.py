"""Runner: a step's work -> one ForwardBatch -> logits, or the tokens a graph has drawn from them.

The place where blocks from the cache meet the model. Knows neither why work was chosen nor what
becomes of the logits.
"""

from collections.abc import Sequence

import torch

from kvchat.core.stats import GraphStatus
from kvchat.engine.rehearsal import Rehearsal
from kvchat.engine.scheduler import Work
from kvchat.engine.step_threads import StepThreads
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.graphs import GraphRunner
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.sampler import RowDraw


class Runner:
    """Runs steps on one model whose pools have blocks of `block_size` tokens.

    By `graphs` where there are some and one fits, otherwise eagerly; on a CPU on as many threads as
    `threads` finds best, on those there are where it is None. `rehearsal` is of the same model.
    """

    def __init__(
        self,
        model: PagedModel,
        block_size: int,
        graphs: GraphRunner | None = None,
        threads: StepThreads | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._graphs = graphs
        self._threads = threads
        self._rehearsal = rehearsal

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

    def run(self, plan: Sequence[Work], probes: Sequence[SequencePiece] = ()) -> torch.Tensor:
        """Compute the plan's tokens; return rows of logits for each work that completes, in order.

        A work has one row, and one more for each of its drafts: what follows where they are right.
        Whatever `probes` ask for is computed beside it, and their rows come last. Returns
        [num_rows + num_probe_rows, vocab_size] float32.
        """
        pieces = [*(_piece(work) for work in plan), *probes]
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

    def draw(self, plan: Sequence[Work], draws: Sequence[RowDraw | None]) -> torch.Tensor | None:
        """Compute the plan's tokens and draw from their rows at once, where a graph does both.

        `draws` say how, work by work. Returns one token for each row that `run` would return,
        [num_rows] int64, -1 where a logit is not a number; None where nothing was computed.
        """
        return self.draw_pieces([_piece(work) for work in plan], draws)

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
        if self._rehearsal is not None:
            self._rehearsal.hold()

    def graph_status(self) -> GraphStatus | None:
        """Return counts for people; None where steps are never captured."""
        return self._graphs.status() if self._graphs is not None else None

    def step_threads(self) -> tuple[int, int] | None:
        """Return on how many threads a step of one token runs, of how many; None on a GPU."""
        threads = self._threads
        return (threads.num_threads(), threads.most) if threads is not None else None


def _piece(work: Work) -> SequencePiece:
    request = work.request
    assert request.table is not None
    start = request.num_computed
    return SequencePiece(
        token_ids=[*request.ids[start : start + work.num_tokens], *work.drafts],
        start=start,
        blocks=request.table.blocks,
        num_logit_rows=1 + len(work.drafts) if work.completes else 0,
    )
