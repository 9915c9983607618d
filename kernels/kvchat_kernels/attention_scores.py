"""How much rows of a step attend to each slot of their sequence, for what drops KV.

Plain torch on every device: a product of a few rows with all keys, once an answer, or once in many
tokens of it. Attention never has these weights whole, so none of its kernels could return them.
"""

import torch

from kvchat_kernels.paged_attention.sequences import PagedSequences, Scoring
from kvchat_kernels.slot_positions import EMPTY

# Numbers of weights that are there at once.
_MOST_WEIGHTS = 1 << 24


def attention_scores(
    query: torch.Tensor, keys: torch.Tensor, sequences: PagedSequences, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and the maximum of the weights that each slot gets from a sequence's rows.

    query   [num_rows, num_heads, key_dim], the rows of the only sequence
    keys    [num_slots, num_kv_heads, key_dim] float32, its keys in slot order

    Both are [num_kv_heads, num_slots] float32: the mean, or the maximum, over the heads of a group;
    zero in a slot without a token.
    """
    assert len(sequences.query_lens) == 1
    num_rows, num_heads = query.shape[:2]
    num_slots, num_kv_heads = keys.shape[:2]
    positions = sequences.positions_of(0)
    rows = positions[num_slots - num_rows :]
    total = keys.new_zeros(num_kv_heads, num_slots)
    highest = torch.zeros_like(total)
    by_head = keys.permute(1, 2, 0)
    each = max(1, _MOST_WEIGHTS // (num_heads * num_slots))
    for start in range(0, num_rows, each):
        part = query[start : start + each].float()
        grouped = part.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        visible = scoring.span.mask(rows[start : start + each], positions) & (positions != EMPTY)
        weights = _weights(grouped.flatten(1, 2) @ by_head, visible, num_heads, scoring)
        total += weights.sum(dim=2).mean(dim=1)
        highest = torch.maximum(highest, weights.amax(dim=(1, 2)))
    return total, highest


def _weights(
    products: torch.Tensor, visible: torch.Tensor, num_heads: int, scoring: Scoring
) -> torch.Tensor:
    """Return weights [num_kv_heads, group, num_rows, num_slots] from products of queries and keys.

    products   [num_kv_heads, group * num_rows, num_slots]
    visible    [num_rows, num_slots]
    """
    group = num_heads // len(products)
    scores = products.unflatten(1, (group, -1)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = scoring.sinks.float().view(len(products), group, 1, 1)
    column = sinks.expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
