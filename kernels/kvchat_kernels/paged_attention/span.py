"""AttentionSpan: which earlier tokens a query may see, in every form transformers' models use.

Knows positions only; no tensors of a model.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Causal attention, optionally bounded by a sliding window or by fixed chunks.

    window   the query and the `window - 1` tokens before it are visible; None for all
    chunk    only tokens of the query's own chunk of `chunk` positions are visible; None for all
    """

    window: int | None = None
    chunk: int | None = None

    def first_visible(self, position: int) -> int:
        """Return the lowest position a query at `position` sees."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return [num_queries, num_keys] bool, true where a query position sees a key position."""
        query, key = queries[:, None], keys[None, :]
        visible = key <= query
        if self.window is not None:
            visible &= key > query - self.window
        if self.chunk is not None:
            visible &= key // self.chunk == query // self.chunk
        return visible


FULL = AttentionSpan()
