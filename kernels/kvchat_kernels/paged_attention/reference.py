"""The reference of paged attention: gather each sequence, then softmax in float32.

The tests compare every faster implementation with it.
"""

import torch

from kvchat_kernels.paged_attention.sequences import PagedSequences, Scoring, Sequences
from kvchat_kernels.slot_positions import EMPTY

# Rows whose scores are there at once.
_ROWS = 128


def paged_attention_reference(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: Sequences,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend every row of `query` to its own sequence; see `paged_attention` for the shapes."""
    assert isinstance(sequences, PagedSequences)
    outputs = []
    start = 0
    for index, query_len in enumerate(sequences.query_lens):
        context_len = sequences.context_lens[index]
        blocks = sequences.blocks_of(index, 0).long()
        key = key_pool[blocks].flatten(0, 1)[:context_len]
        value = value_pool[blocks].flatten(0, 1)[:context_len]
        positions = sequences.positions_of(index)
        if sequences.positions is not None:
            filled = positions != EMPTY
            key, value, positions = key[filled], value[filled], positions[filled]
        visible = scoring.span.mask(positions[len(positions) - query_len :], positions)
        rows = query[start : start + query_len].split(_ROWS)
        for part, seen in zip(rows, visible.split(_ROWS), strict=True):
            outputs.append(_attend(part, key, value, seen, scoring))
        start += query_len
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    group, softcap, sinks = query.shape[1] // key.shape[1], scoring.softcap, scoring.sinks
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scoring.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)
