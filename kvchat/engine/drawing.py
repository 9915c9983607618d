"""A step's logits -> the tokens drawn from them, work by work.

Knows which row belongs to which sample. Appends nothing and decides no ending.
"""

from collections.abc import Sequence

import torch

from kvchat.engine.noise import sample_seed
from kvchat.engine.request import Request
from kvchat.engine.sampler import SamplingRow, sample
from kvchat.engine.scheduler import Work


def draw(plan: Sequence[Work], logits: torch.Tensor) -> dict[Work, list[int]]:
    """Draw the next token of each completing request, and of the siblings about to fork.

    logits   [num_completing, vocab_size] float32, as a Runner returns them
    """
    completing = [work for work in plan if work.completes]
    owners = [
        (work, sibling)
        for work in completing
        for sibling in range(1 + work.request.num_siblings_to_fork)
    ]
    rows = [_sampling_row(work.request, sibling, logits.device) for work, sibling in owners]
    if len(owners) > len(completing):
        logits = logits[[completing.index(work) for work, _ in owners]]
    drawn = sample(logits, rows) if rows else []
    tokens: dict[Work, list[int]] = {work: [] for work in completing}
    for (work, _), token in zip(owners, drawn, strict=True):
        tokens[work].append(token)
    return tokens


def _sampling_row(request: Request, sibling: int, device: torch.device) -> SamplingRow:
    params = request.spec.sampling
    context_ids = None
    if params.repetition_penalty != 1.0:
        context_ids = torch.tensor(request.ids, dtype=torch.int64, device=device)
    return SamplingRow(
        params=params,
        seed=sample_seed(params.seed, request.sample + sibling),
        position=len(request.ids),
        context_ids=context_ids,
    )
