"""What a network learns from another one: its next-token distribution over replies.

The draft learns from the target, and the target from what it was before, so that it forgets nothing
while it learns what is new. Knows two networks and their rows; knows no dialogue.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from demo_recipe.network import Network, Rows


@dataclass(frozen=True, slots=True)
class Distillation:
    """A loss for `train`: KL divergence from the teacher's distribution, a mean over the replies.

    trusted  a token of the text that the teacher gives less probability than this is learnt from
             the text instead, by cross entropy: there the teacher is wrong, or never knew. None is
             with 0.

    Li and Hoiem, "Learning without forgetting" (2016), for the whole; the threshold is ours.
    """

    teacher: Network
    dtype: torch.dtype
    trusted: float = 0.0

    def __call__(self, pupil: Network, rows: Rows) -> Tensor:
        targets = rows.targets.flatten()
        chosen = (targets != -100).nonzero().squeeze(1)
        with torch.no_grad():
            taught = self._log_probabilities(self.teacher, rows, chosen)
        learnt = self._log_probabilities(pupil, rows, chosen)
        divergence = kl_div(learnt, taught, reduction="none", log_target=True).sum(1)
        said = targets[chosen, None]
        is_trusted = taught.gather(1, said).squeeze(1).exp() >= self.trusted
        surprise = -learnt.gather(1, said).squeeze(1) * rows.weights.flatten()[chosen]
        return torch.where(is_trusted, divergence, surprise).mean()

    def _log_probabilities(self, network: Network, rows: Rows, chosen: Tensor) -> Tensor:
        states = network.hidden(rows, self.dtype).flatten(0, 1)[chosen]
        return log_softmax(network.logits(states), -1)
