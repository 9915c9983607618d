"""How many drafted tokens the target accepts, greedy, exactly as an engine would count them.

Greedy speculation only ever keeps tokens the target itself would have chosen, so the rounds can be
replayed on finished replies: while drafts are right, the draft has seen the target's own tokens.
Knows networks and replies; knows no dialogue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from demo_recipe.network import Network, Rows

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


def replay(
    draft: Network, prompts: Sequence[list[int]], replies: Sequence[list[int]]
) -> Acceptance:
    """Count the rounds speculation takes to write these replies, end tokens included."""
    counts = Acceptance()
    for prompt, reply in zip(prompts, replies, strict=True):
        _count_rounds(_is_right(draft, prompt, reply), counts)
    return counts


@torch.inference_mode()
def _is_right(draft: Network, prompt: list[int], reply: list[int]) -> list[bool]:
    """Whether the draft, after everything before it, proposes each token of the reply."""
    device = draft.model.embed_tokens.weight.device
    ids = torch.tensor([[*prompt, *reply]], device=device)
    places = torch.arange(ids.shape[1], device=device)[None]
    rows = Rows(ids, places, torch.ones_like(ids), ids, torch.ones(ids.shape, device=device))
    states = draft.hidden(rows, draft.model.embed_tokens.weight.dtype)
    proposed = draft.logits(states[0, len(prompt) - 1 : -1]).argmax(-1)
    return [bool(right) for right in proposed == ids[0, len(prompt) :]]


def _count_rounds(is_right: list[bool], counts: Acceptance) -> None:
    at = 0
    while at < len(is_right):
        accepted = 0
        while (
            accepted < NUM_DRAFT_TOKENS
            and at + accepted < len(is_right)
            and is_right[at + accepted]
        ):
            accepted += 1
        counts.num_rounds += 1
        counts.num_accepted += accepted
        at += accepted + 1
