"""StepScores: the operations of a step that say how much its rows attend to each slot."""

from collections.abc import Mapping

import numpy as np

from kvchat.model.cpu.step_operations import StepOperations
from kvchat_kernels.cpu import attention_kernels
from kvchat_kernels.cpu.attention_task import (
    AttentionForm,
    AttentionTask,
    ScoresRecord,
    SlotScoresTask,
)


class StepScores:
    """Owns the record of the layers that are scored: `first_heads` has the place of each among the
    heads of all, by the name of its module.
    """

    def __init__(self, operations: StepOperations, first_heads: Mapping[str, int]) -> None:
        self.record = np.zeros(len(ScoresRecord), np.int64)
        self._operations = operations
        self._first_heads = first_heads

    def add(self, name: str, form: AttentionForm, task: AttentionTask) -> int | None:
        """Score a layer whose parts are attended: return the number of the operation that has as
        many units as attention; None for a layer that is not scored.
        """
        first_head = self._first_heads.get(name)
        if first_head is None:
            return None
        scored = SlotScoresTask(
            **dict(task.items()),
            slot_scores=self.record,
            first_head=first_head,
            totals=self._operations.output("totals of weights", 2 * form.num_heads),
        )
        self._operations.add(attention_kernels.totals_kernel(form), scored, None)
        self._operations.add(attention_kernels.slot_scores_kernel(form), scored, 0)
        return len(self._operations.all) - 1
