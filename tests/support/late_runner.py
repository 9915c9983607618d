"""A Runner whose drawn tokens come late, as a GPU's do, and which writes down what it is asked.

A GPU does all work in the order in which it was queued: here it is done at once, which is the same
order. What a step draws is hidden until it is read: to the host the tensor holds numbers that are
no tokens, and only a step that is queued after it gets the right ones.
"""

from collections.abc import Sequence

import torch

from kvchat.engine.runner import QueuedTokens, Runner
from kvchat.model.batch import SequencePiece
from kvchat.model.gpu.graphs import GraphRunner
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.sampler import RowDraw

NOT_THERE_YET = -77


class LateRunner(Runner):
    """`log` has `queue` and `read` with the number of the step, and `run` for other steps."""

    def __init__(
        self,
        model: PagedModel,
        block_size: int,
        graphs: GraphRunner,
        window_blocks: torch.Tensor | None = None,
    ) -> None:
        super().__init__(model, block_size, graphs, window_blocks=window_blocks)
        self.log: list[tuple[str, int]] = []
        self._real: dict[int, QueuedTokens] = {}
        self._not_there_yet: list[torch.Tensor] = []

    def queue(
        self,
        pieces: Sequence[SequencePiece],
        draws: Sequence[RowDraw | None],
        earlier: QueuedTokens | None = None,
        rows: Sequence[int] = (),
    ) -> QueuedTokens | None:
        real = self._real[id(earlier.tokens)] if earlier is not None else None
        step = super().queue(pieces, draws, real, rows)
        if step is None:
            return None
        number = len(self._real) + 1
        hidden = torch.full_like(step.tokens, NOT_THERE_YET)
        self._real[id(hidden)] = step
        self._not_there_yet.append(hidden)  # or another tensor could get its id
        self.log.append(("queue", number))

        def read() -> list[int]:
            self.log.append(("read", number))
            return step.read()

        return QueuedTokens(hidden, read)

    def run_pieces(self, pieces: Sequence[SequencePiece]) -> torch.Tensor:
        self.log.append(("run", 0))
        return super().run_pieces(pieces)
