"""Attention on a CPU: by compiled kernels, by torch in 16 bits, and by the reference."""

import pytest
import torch

from kvchat_kernels.cpu import calls as calls_of_kernels
from kvchat_kernels.cpu.step import MAX_ROWS
from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences, Scoring, paged_attention
from kvchat_kernels.paged_attention import cpu as by_cpu

BLOCK_SIZE, HEADS, KV_HEADS, DIM = 8, 6, 2, 32
# New tokens and slots of each sequence: decodes, a verification, a prompt beside them.
LENGTHS = ((1, 22), (5, 30), (40, 70), (1, 1), (200, 333))
SPANS = [AttentionSpan(), AttentionSpan(window=20), AttentionSpan(chunk=32)]


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedSequences]:
    """Return queries, pools with NaN in all slots that hold no token, and the sequences."""
    generator = torch.Generator().manual_seed(0)
    counts, ends = zip(*LENGTHS, strict=True)
    num_blocks = [-(-end // BLOCK_SIZE) for end in ends]
    order = torch.randperm(sum(num_blocks), generator=generator).int() + 1
    tables = torch.zeros(len(ends), max(num_blocks), dtype=torch.int32)
    pool = torch.full((sum(num_blocks) + 1, BLOCK_SIZE, KV_HEADS, DIM), float("nan"))
    pools = [pool.clone(), pool.clone()]
    for row, (end, own) in enumerate(zip(ends, order.split(num_blocks), strict=True)):
        tables[row, : len(own)] = own
        for part in pools:
            numbers = torch.randn(end, KV_HEADS, DIM, generator=generator)
            slots = own.long()[torch.arange(end) // BLOCK_SIZE]
            part[slots, torch.arange(end) % BLOCK_SIZE] = numbers
    query = torch.randn(sum(counts), HEADS, DIM, generator=generator)
    keys, values = (part.to(dtype) for part in pools)
    return query.to(dtype), keys, values, PagedSequences(counts, ends, tables, BLOCK_SIZE)


@pytest.fixture
def multiplies_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_cpu, "multiplies_in", lambda dtype: True)


@pytest.mark.usefixtures("multiplies_in_16_bits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_a_step_of_all_kinds_of_rows_is_attended_as_the_reference_does(span, dtype):
    query, *pools, sequences = problem(dtype)
    assert sequences.num_tokens > MAX_ROWS, "rows are computed in one group"

    ours = paged_attention(query, *pools, sequences, Scoring(0.25, span))

    exact = [x.float() for x in (query, *pools)]
    expected = paged_attention(*exact, sequences, Scoring(0.25, span), "reference")
    assert ours.dtype == dtype
    assert (ours.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.usefixtures("multiplies_in_16_bits")
@pytest.mark.parametrize("is_slower", [True, False])
def test_torch_attends_many_rows_in_16_bits_and_no_softcap_where_it_is_faster(
    is_slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, *pools, sequences = problem(torch.bfloat16)
    monkeypatch.setattr(calls_of_kernels, "attends_faster_than_torch", lambda form: is_slower)
    calls = []
    own = by_cpu.scaled_dot_product_attention
    monkeypatch.setattr(
        by_cpu,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs),
    )

    paged_attention(query, *pools, sequences, Scoring(0.25, softcap=9.0))
    few, _ = sequences.part(0, 6)
    paged_attention(query[:6], *pools, few, Scoring(0.25))
    assert not calls
    paged_attention(query, *pools, sequences, Scoring(0.25))
    assert len(calls) == (0 if is_slower else len(LENGTHS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_beside_others(dtype, monkeypatch):
    monkeypatch.setattr(by_cpu, "multiplies_in", lambda dtype: False)
    query, *pools, sequences = problem(dtype)
    together = paged_attention(query, *pools, sequences, Scoring(0.25))

    for row in (0, 3, 30, 100, 246):
        alone, _ = sequences.part(row, row + 1)
        own = paged_attention(query[row : row + 1], *pools, alone, Scoring(0.25))
        assert torch.equal(own[0], together[row])


def test_without_a_compiler_the_reference_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    query, *pools, sequences = problem(torch.float32)
    expected = paged_attention(query, *pools, sequences, Scoring(0.25), "reference")
    monkeypatch.setattr(by_cpu, "compiled_calls", lambda: None)

    assert torch.equal(paged_attention(query, *pools, sequences, Scoring(0.25)), expected)
