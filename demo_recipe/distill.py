"""What the draft learns from the target: its distribution over the next token of a reply.

Knows two networks and their rows; knows no dialogue.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from demo_recipe.network import Network, Rows


@dataclass(frozen=True, slots=True)
class Distillation:
    """A loss for `train`: mean KL divergence from the teacher over the tokens of replies."""

    teacher: Network
    dtype: torch.dtype

    def __call__(self, pupil: Network, rows: Rows) -> Tensor:
        chosen = (rows.targets.flatten() != -100).nonzero().squeeze(1)
        with torch.no_grad():
            expected = self._log_probabilities(self.teacher, rows, chosen)
        learnt = self._log_probabilities(pupil, rows, chosen)
        return kl_div(learnt, expected, reduction="batchmean", log_target=True)

    def _log_probabilities(self, network: Network, rows: Rows, chosen: Tensor) -> Tensor:
        states = network.hidden(rows, self.dtype).flatten(0, 1)[chosen]
        return log_softmax(network.logits(states), -1)
