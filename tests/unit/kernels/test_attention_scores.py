"""Scores of slots are the weights of plain softmax attention, added over rows and the largest."""

import pytest
import torch

from kvchat_kernels.attention_scores import attention_scores
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.kv_code import K8V4
from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences, Scoring
from kvchat_kernels.slot_positions import EMPTY

BLOCK, NUM_HEADS, NUM_KV_HEADS, DIM = 4, 6, 2, 32


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(DIM**-0.5),
        Scoring(DIM**-0.5, softcap=2.0, sinks=torch.linspace(-1, 1, NUM_HEADS)),
        Scoring(DIM**-0.5, AttentionSpan(window=9)),
    ],
    ids=["plain", "softcap and sinks", "window"],
)
@pytest.mark.parametrize("is_private", [False, True])
def test_scores_are_sums_and_maxima_of_attention_weights(scoring, is_private, monkeypatch):
    """One row and one head at a time, also where the rows are computed in several parts."""
    monkeypatch.setattr("kvchat_kernels.attention_scores._MOST_WEIGHTS", 2 * NUM_HEADS * 14)
    torch.manual_seed(1)
    positions = [0, 1, 5, 6, EMPTY, 9, 11, 12, 13, 20, 21, 22, 23, 24]
    if not is_private:
        positions = list(range(14))
    query, keys = torch.randn(5, NUM_HEADS, DIM), torch.randn(14, NUM_KV_HEADS, DIM)
    of_slots = torch.tensor([positions], dtype=torch.int32) if is_private else None
    sequences = PagedSequences((5,), (14,), torch.ones(1, 4, dtype=torch.int32), BLOCK, of_slots)

    total, highest = attention_scores(query, keys, sequences, scoring)

    weights = torch.zeros(NUM_KV_HEADS, 3, 5, 14)
    for head in range(NUM_HEADS):
        for row in range(5):
            position = positions[14 - 5 + row]
            seen = [
                slot
                for slot, each in enumerate(positions)
                if each != EMPTY and scoring.span.first_visible(position) <= each <= position
            ]
            scores = keys[seen, head // 3] @ query[row, head] * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            rest = scoring.sinks[head].exp() if scoring.sinks is not None else 0.0
            weights[head // 3, head % 3, row, seen] = scores.exp() / (scores.exp().sum() + rest)
    assert torch.allclose(total, weights.mean(dim=1).sum(dim=1), atol=1e-5)
    assert torch.allclose(highest, weights.amax(dim=(1, 2)), atol=1e-5)


def test_coded_keys_are_scored_as_they_were_before_they_were_turned() -> None:
    torch.manual_seed(1)
    keys, values = torch.randn(8, 2, 64), torch.randn(8, 2, 64)
    numbers = [torch.zeros(3, BLOCK, 2, width, dtype=torch.int8) for width in (64, 32)]
    scales = [torch.zeros(3, BLOCK, 2, 2, dtype=torch.bfloat16) for _ in range(2)]
    kv = CodedKv(numbers[0], scales[0], numbers[1].view(K8V4.values.dtype), scales[1], K8V4)
    kv.write(keys, values, torch.arange(4, 12))
    found = kv.keys_of(torch.arange(11, 3, -1)).flip(0)
    assert (found - keys).norm() < 0.02 * keys.norm()
