"""What a network learns from another one: its distribution over the next token of a reply.

The draft learns from the target, and the target from what it was, so that it forgets little while
it learns what is new. Knows two networks and their rows; knows no dialogue.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from demo_recipe.network import Network, Rows


@dataclass(frozen=True, slots=True)
class Distillation:
    """A loss for `train`: mean KL divergence from the teacher over the tokens of replies.

    trusted  a token of the text that the teacher gives less probability than this is learnt from
             the text, by cross entropy: there the teacher is wrong, or never knew

    Li and Hoiem, "Learning without forgetting" (2016), for the whole; the threshold is ours.
    """

    teacher: Network
    dtype: torch.dtype
    trusted: float = 0.0

    def __call__(self, pupil: Network, rows: Rows) -> Tensor:
        with torch.no_grad():
            expected = log_softmax(self.teacher.learnt_logits(rows, self.dtype), -1)
        learnt = log_softmax(pupil.learnt_logits(rows, self.dtype), -1)
        divergence = kl_div(learnt, expected, reduction="none", log_target=True).sum(1)
        is_learnt = rows.targets != -100
        said = rows.targets[is_learnt][:, None]
        surprise = -learnt.gather(1, said).squeeze(1) * rows.weights[is_learnt]
        is_text = expected.gather(1, said).squeeze(1).exp() < self.trusted
        return torch.where(is_text, surprise, divergence).mean()
