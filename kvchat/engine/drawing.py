"""A step's logits -> the tokens drawn from them, work by work.

Knows which row belongs to which sample and which draft. Appends nothing and decides no ending.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvchat.engine.noise import sample_seed
from kvchat.engine.request import Request
from kvchat.engine.sampler import SamplingRow, as_tokens, row_draw, sample
from kvchat.engine.scheduler import Work
from kvchat.engine.sent_ids import SentIds
from kvchat_kernels.sampler import RowDraw
from kvchat_kernels.sending import on_device

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose draw it is: row `row` of a work, for the request or a sibling about to fork."""

    work: Work
    row: int
    sibling: int


def draw(plan: Sequence[Work], logits: torch.Tensor) -> dict[Work, list[int]]:
    """Draw the next token of each completing request, and of the siblings about to fork.

    logits   [num_rows, vocab_size] float32, as a Runner returns them

    For a work with drafts the tokens are those of consecutive positions, one for each of its rows.
    """
    owners: list[_Owner] = []
    rows_of_logits: list[int] = []
    start = 0
    tokens: dict[Work, list[int]] = {}
    for work in plan:
        if not work.completes:
            continue
        tokens[work] = []
        for owner in _owners(work):
            owners.append(owner)
            rows_of_logits.append(start + owner.row)
        start += 1 + len(work.drafts)
    if len(owners) > start:
        logits = logits[on_device(rows_of_logits, torch.int64, logits.device)]
    rows = [
        sampling_row(o.work.request, o.work.drafts[: o.row], logits.device, o.sibling)
        for o in owners
    ]
    drawn = sample(logits, rows) if rows else []
    for owner, token in zip(owners, drawn, strict=True):
        tokens[owner.work].append(token)
    return tokens


def draws_of(plan: Sequence[Work]) -> list[RowDraw | None] | None:
    """Return how each completing work's rows draw without the host, None for the others; None at
    all where one of them cannot: a penalty sees its context, and siblings draw from one row.
    """
    draws: list[RowDraw | None] = []
    for work in plan:
        request = work.request
        if not work.completes:
            draws.append(None)
        elif request.spec.sampling.repetition_penalty != 1.0 or request.num_siblings_to_fork:
            return None
        else:
            draws.append(row_draw(sampling_row(request, (), _HOST)))
    return draws


def tokens_of(plan: Sequence[Work], drawn: torch.Tensor) -> dict[Work, list[int]]:
    """Return the tokens of each completing work, as `draw` does: `drawn` has one for each row.

    Raises ValueError where a logit is not a number.
    """
    tokens = iter(as_tokens(drawn))
    return {w: [next(tokens) for _ in range(1 + len(w.drafts))] for w in plan if w.completes}


def _owners(work: Work) -> Iterator[_Owner]:
    num_siblings = work.request.num_siblings_to_fork
    assert not (work.drafts and num_siblings)
    for row in range(1 + len(work.drafts)):
        for sibling in range(1 + num_siblings):
            yield _Owner(work, row, sibling)


def sampling_row(
    request: Request, drafts: Sequence[int], device: torch.device, sibling: int = 0
) -> SamplingRow:
    """Say how to draw what follows a request's ids and `drafts`; a penalty sees both."""
    params = request.spec.sampling
    context_ids = None
    if params.repetition_penalty != 1.0:
        request.sent_ids = request.sent_ids or SentIds(device)
        context_ids = request.sent_ids.of(request.ids, drafts)
    return SamplingRow(
        params=params,
        seed=sample_seed(params.seed, request.sample + sibling),
        position=len(request.ids) + len(drafts),
        context_ids=context_ids,
    )
