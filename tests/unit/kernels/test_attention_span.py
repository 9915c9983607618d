"""AttentionSpan: its mask, its first visible position and the plain rule say the same."""

import pytest
import torch

from kvchat_kernels.paged_attention import FULL, AttentionSpan
from support.plain_attention import AttentionCase, sees

SPANS = [
    FULL,
    AttentionSpan(window=1),
    AttentionSpan(window=7),
    AttentionSpan(window=500),
    AttentionSpan(chunk=1),
    AttentionSpan(chunk=16),
    AttentionSpan(window=5, chunk=12),
]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_the_mask_is_the_rule_at_every_pair_of_positions(span: AttentionSpan) -> None:
    positions = torch.arange(60)
    case = AttentionCase(window=span.window, chunk=span.chunk)
    expected = torch.tensor([[sees(case, q, k) for k in range(60)] for q in range(60)])

    assert torch.equal(span.mask(positions, positions), expected)


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_first_visible_is_the_first_true_of_each_row_of_the_mask(span: AttentionSpan) -> None:
    positions = torch.arange(60)
    first_true = span.mask(positions, positions).int().argmax(dim=1).tolist()

    assert [span.first_visible(position) for position in range(60)] == first_true
