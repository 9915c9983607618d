"""Spans are read from mask functions by evaluating them; every other shape is refused."""

from collections.abc import Callable

import pytest
import torch

from kvchat.model.hf.probe import UnknownMask, read_span
from kvchat_kernels.paged_attention import FULL, AttentionSpan

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mask(rule: Rule):  # type: ignore[no-untyped-def]
    """Make a mask function of transformers' signature from a rule over (query, key)."""
    return lambda batch, head, query, key: rule(query, key)


@pytest.mark.parametrize(
    "span",
    [
        FULL,
        *(AttentionSpan(window=w) for w in (1, 2, 3, 7, 64, 512, 1023, 4096, 131_072)),
        *(AttentionSpan(chunk=c) for c in (1, 2, 5, 16, 100, 8192, 1_000_000)),
    ],
    ids=str,
)
def test_windows_and_chunks_of_any_size_are_read_exactly(span: AttentionSpan) -> None:
    window, chunk = span.window, span.chunk

    def rule(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        visible = key <= query
        if window is not None:
            visible = visible & (key > query - window)
        if chunk is not None:
            visible = visible & (key // chunk == query // chunk)
        return visible

    found = read_span(mask(rule))

    if chunk == 1:  # each token alone is a window of one as well
        assert found in (AttentionSpan(window=1), span)
    else:
        assert found == span


STRANGE: dict[str, Rule] = {
    "bidirectional": lambda q, k: k >= 0,
    "strictly before": lambda q, k: k < q,
    "nothing": lambda q, k: k < 0,
    "the future": lambda q, k: k >= q,
    "one ahead": lambda q, k: k <= q + 1,
    "a prefix seen by all": lambda q, k: (k <= q) | (k < 5),
    "a window and the first tokens": lambda q, k: (k <= q) & ((k > q - 64) | (k < 4)),
    "a window and the very first token": lambda q, k: (k <= q) & ((k > q - 64) | (k == 0)),
    "every second token": lambda q, k: (k <= q) & ((q - k) % 2 == 0),
    "every second token of a window": lambda q, k: (k <= q) & (k > q - 64) & ((q - k) % 2 == 0),
    "all but the one before": lambda q, k: (k <= q) & (k != q - 1),
    "a window without its own token": lambda q, k: (k < q) & (k > q - 9),
    "a window that grows": lambda q, k: (k <= q) & (k > q - 8 - q // 1000),
    "chunks from the third position": lambda q, k: (k <= q) & ((k + 2) // 64 == (q + 2) // 64),
    "blocks without causality": lambda q, k: k // 64 == q // 64,
    "two documents": lambda q, k: (k <= q) & ((k < 1000) == (q < 1000)),
    "all but the first token": lambda q, k: (k <= q) & ((k > 0) | (q == 0)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_any_other_mask_is_refused(name: str) -> None:
    """A window that also shows the first tokens was once read as the window alone."""
    with pytest.raises(UnknownMask):
        read_span(mask(STRANGE[name]))
