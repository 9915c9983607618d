"""Attention written down from its formula, without pools, spans or blocks: the oracle for kernels.

Shares no line with the code it judges: visibility is spelled out position by position, and the
arithmetic runs in whatever dtype the caller asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionCase:
    """One layer's shape and rules."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5


def sees(case: AttentionCase, query: int, key: int) -> bool:
    """Tell whether the token at `query` sees the one at `key`."""
    if key > query:
        return False
    if case.window is not None and query - key >= case.window:
        return False
    return case.chunk is None or query // case.chunk == key // case.chunk


def plain_attention(
    case: AttentionCase,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    positions: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return [num_rows, num_heads, value_dim] for the last rows of a sequence, all in `dtype`.

    `positions` are those of the keys; without them, key j is at position j.
    """
    num_rows, context_len = query.shape[0], key.shape[0]
    where = range(context_len) if positions is None else positions
    group = case.num_heads // case.num_kv_heads
    hidden = torch.tensor(
        [
            [not sees(case, where[context_len - num_rows + row], at) for at in where]
            for row in range(num_rows)
        ],
        device=query.device,
    )
    heads = []
    for head in range(case.num_heads):
        keys, values = key[:, head // group].to(dtype), value[:, head // group].to(dtype)
        scores = (query[:, head].to(dtype) @ keys.T) * case.scale
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        scores = scores.masked_fill(hidden, float("-inf"))
        top = scores.max(dim=-1, keepdim=True).values
        weights = torch.exp(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[head].to(dtype) - top)
        heads.append((weights / total) @ values)
    return torch.stack(heads, dim=1)
