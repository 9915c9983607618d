"""What a head that drafts has before its layers in a step's program: `Joined` of the decoder."""

import torch

from kvchat.model.cpu.step_operations import StepOperations, floats
from kvchat.model.decoder.decoder import Joined
from kvchat_kernels.cpu.mamba import GroupNormTask, group_norm_kernel
from kvchat_kernels.cpu.task import Numbers


class JoinedRows:
    """Adds the operations, and takes the rows of hidden states of each step.

    rows      float32 [MAX_ROWS, 2 * width], the embedded tokens beside hidden states
    is_fused  whether the hidden states of the step are made of the model's streams
    """

    def __init__(self, part: Joined, operations: StepOperations, stream: torch.Tensor) -> None:
        self._part, self._operations, self._stream = part, operations, stream
        projection, fusing = part.projection, part.fusing
        self.rows = floats(2 * stream.shape[1] if projection is None else projection.num_in)
        self.tokens, self._hidden = self.rows.chunk(2, dim=1)
        self.is_fused = False
        self._streams = None if fusing is None else floats(fusing.matrix.num_in)
        self._of_fusing: dict[int, int] = {}
        self._add()

    def _add(self) -> None:
        operations, part, stream = self._operations, self._part, self._stream
        if part.fusing is not None and self._streams is not None:
            start = len(operations.all)
            source, values = operations.input("streams", self._streams.shape[1]), self._streams
            if part.fusing.norm is not None:
                operations.norm_rows(part.fusing.norm, values, source.floats)
                values = source.floats
            operations.products((part.fusing.matrix,), source, values, stream)
            added = enumerate(operations.all[start:], start)
            self._of_fusing = {index: each.num_units or 0 for index, each in added}
        if part.projection is None:
            operations.copy(stream, self._hidden)
        if part.norm is not None:
            task = GroupNormTask(
                x=self.rows,
                weight=part.norm.weight,
                width=stream.shape[1],
                epsilon=part.norm.epsilon,
                num_groups=2,
            )
            operations.add(group_norm_kernel(), task, None)
        if part.projection is not None:
            source = operations.input("joined", self.rows.shape[1])
            operations.products((part.projection,), source, self.rows, stream)
        if part.of_stream is not None:
            operations.norm_rows(part.of_stream, stream, stream)

    def take(self, num_rows: int) -> None:
        """Write the hidden states of the next rows, or the streams that they are made of."""
        rows = self._part.take(num_rows).float().numpy()
        streams = self._streams
        self.is_fused = streams is not None and rows.shape[1] == streams.shape[1]
        out = self._stream if self._part.projection is None else self._hidden
        (streams if streams is not None and self.is_fused else out).numpy()[:num_rows] = rows

    def prepare(self, units: Numbers) -> None:
        """Write the numbers of units, which are those of the rows so far, for such a step."""
        for index, num_units in self._of_fusing.items():
            if not self.is_fused:
                units[index] = 0
            elif num_units:
                units[index] = num_units
