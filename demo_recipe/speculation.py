"""How many drafted tokens the target accepts, greedy, exactly as an engine would count them.

Greedy speculation only ever keeps tokens the target itself would have chosen, so the rounds can be
replayed on finished replies: while drafts are right, the draft has seen the target's own tokens.
Knows models of transformers and replies; knows no dialogue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_DRAFT_TOKENS = 4


@dataclass(slots=True)
class Acceptance:
    """Counts over rounds of `NUM_DRAFT_TOKENS` drafted tokens."""

    num_rounds: int = 0
    num_accepted: int = 0

    @property
    def mean_length(self) -> float:
        """Mean acceptance length, the bonus token included."""
        return 1 + self.num_accepted / self.num_rounds

    @property
    def rate(self) -> float:
        """Accepted tokens per drafted token."""
        return self.num_accepted / (self.num_rounds * NUM_DRAFT_TOKENS)


def replay(draft: Any, prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> Acceptance:
    """Count the rounds speculation takes to write these replies, end tokens included."""
    counts = Acceptance()
    for prompt, reply in zip(prompts, replies, strict=True):
        _count_rounds(_is_right(draft, prompt, reply), counts)
    return counts


@torch.inference_mode()
def _is_right(draft: Any, prompt: list[int], reply: list[int]) -> list[bool]:
    """Whether the draft, after everything before it, proposes each token of the reply."""
    ids = torch.tensor([[*prompt, *reply]], device=draft.device)
    proposed = draft(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
    return [bool(right) for right in proposed == ids[0, len(prompt) :]]


def _count_rounds(is_right: list[bool], counts: Acceptance) -> None:
    at = 0
    while at < len(is_right):
        drafted = is_right[at : at + NUM_DRAFT_TOKENS]
        accepted = drafted.index(False) if False in drafted else len(drafted)
        counts.num_rounds += 1
        counts.num_accepted += accepted
        at += accepted + 1
