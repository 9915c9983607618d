"""Few rows of paged attention on a CPU: by torch's operator, by products, and as the reference."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences, paged_attention
from kvchat_kernels.paged_attention.cpu import KernelChoice
from kvchat_kernels.paged_attention.cpu_fused import attend_plainly
from kvchat_kernels.paged_attention.sequences import FULL

BLOCK_SIZE = 8
NUM_HEADS, NUM_KV_HEADS = 6, 2
WINDOW = AttentionSpan(window=20)


@dataclass(frozen=True)
class Case:
    """A sequence's new tokens, and the blocks its context fills but for two slots of the last."""

    num_rows: int
    blocks: list[int]
    span: AttentionSpan = FULL
    dtype: torch.dtype = torch.bfloat16
    value_dim: int = 16

    @property
    def sequences(self) -> PagedSequences:
        end = len(self.blocks) * BLOCK_SIZE - 2
        return PagedSequences(
            (self.num_rows,), (end,), torch.tensor([self.blocks], dtype=torch.int32), BLOCK_SIZE
        )

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        count = max(self.blocks) + 1
        keys, values = (
            torch.randn(count, BLOCK_SIZE, NUM_KV_HEADS, dim, generator=generator).to(self.dtype)
            for dim in (16, self.value_dim)
        )
        return keys, values

    def query(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(self.num_rows, NUM_HEADS, 16, generator=generator)
        return rows.to(self.dtype)


LONG = list(range(1, 200))
TAKEN = {
    "one row in place": Case(1, [1, 2, 3]),
    "two places": Case(1, [7, 8, 1, 2]),
    "a window within one block": Case(1, [9, 1, 5, 3, 4], WINDOW),
    "a verify": Case(5, [7, 8, 1, 2]),
    "a verify with a window": Case(5, [9, 1, 5, 3, 4], WINDOW),
    "many tokens": Case(1, LONG),
    "float32": Case(1, [1, 2, 3], dtype=torch.float32),
    "other dims of values": Case(2, [7, 8, 1, 2], value_dim=24),
}


@pytest.mark.parametrize("name", TAKEN)
def test_few_rows_are_attended_as_the_reference_does(name: str) -> None:
    case = TAKEN[name]
    keys, values = case.pools()

    ours = paged_attention(case.query(), keys, values, case.sequences, span=case.span, scale=0.25)

    exact = exactly(case)
    assert (ours.float() - exact).abs().max() < (1e-5 if case.dtype == torch.float32 else 0.03)


def exactly(case: Case) -> torch.Tensor:
    pools = [pool.float() for pool in case.pools()]
    return paged_attention(
        case.query().float(),
        *pools,
        case.sequences,
        span=case.span,
        scale=0.25,
        impl="reference",
    )


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_torch_without_the_fused_operator_computes_the_same(
    name: str, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = TAKEN[name]
    pools = case.pools()
    sinks = torch.randn(NUM_HEADS) if has_sinks else None

    def attend() -> torch.Tensor:
        return paged_attention(
            case.query(), *pools, case.sequences, span=case.span, scale=0.25, sinks=sinks
        )

    by_operator = attend()
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu_fused._attend_with_lse", attend_plainly)
    plain = attend()

    tolerance = 1e-5 if case.dtype == torch.float32 else 0.03
    assert (plain.float() - by_operator.float()).abs().max() < tolerance


# Two slots of the last block are free: sequences of one run, of two, of many, of a window.
GATHERED = {
    "in place": Case(1, [1, 2, 3, 4]),
    "two places": Case(1, [7, 8, 1, 2]),
    "scattered": Case(1, list(range(35, 1, -2))),
    "a window": Case(1, [9, 1, 5, 3, 4], WINDOW),
    "other dims of values": Case(1, [7, 8, 1, 2], value_dim=24),
}


@pytest.fixture
def long_from_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu._FEW_KEY_BYTES", 0)
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu.multiplies_in", lambda dtype: True)


@pytest.mark.usefixtures("long_from_the_first_key")
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_keys_are_those_that_paged_attention_attends(name: str) -> None:
    """Slots that hold no token may hold anything, not a number too, and stay as they are."""
    case = GATHERED[name]
    sequences, (keys, values) = case.sequences, case.pools()
    exact = exactly(case)
    for pool in (keys, values):
        pool[case.blocks[-1], -2:] = float("nan")
        pool[0] = float("nan")
    before = [pool.clone() for pool in (keys, values)]

    ours = paged_attention(case.query(), keys, values, sequences, span=case.span, scale=0.25)

    assert (ours.float() - exact).abs().max() < 0.03
    for pool, was in zip((keys, values), before, strict=True):
        assert torch.equal(pool.nan_to_num(7.0), was.nan_to_num(7.0))


def test_single_rows_of_heads_that_share_no_keys_are_soon_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu.multiplies_in", lambda dtype: True)
    one_row = PagedSequences((1,), (300,), torch.arange(1, 20, dtype=torch.int32)[None], 16)
    shared = KernelChoice(32, 8, 64, torch.bfloat16, FULL)
    single = KernelChoice(8, 8, 64, torch.bfloat16, FULL)
    assert shared.prefers_fused(one_row, 0)
    assert not single.prefers_fused(one_row, 0)


@pytest.mark.parametrize("span", [FULL, WINDOW])
def test_the_fused_kernel_meets_few_sizes_in_low_precision(
    span: AttentionSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch compiled products for each length, and kept them: 25 MB more in a thousand turns."""
    sizes = set()

    def attend(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        sizes.add((query.shape[2], key.shape[2]))
        return attend_plainly(query, key, *rest)

    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu.multiplies_in", lambda dtype: True)
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu_fused._attend_with_lse", attend)
    pools = torch.randn(2, 30, 16, NUM_KV_HEADS, 16).bfloat16()
    tables = torch.arange(1, 30, dtype=torch.int32)[None]
    for count in range(17, 400):
        rows = min(count, 7 * count % 100 + 1)
        query = torch.randn(rows, NUM_HEADS, 16).bfloat16()
        sequences = PagedSequences((rows,), (count,), tables, 16)
        ours = paged_attention(query, *pools, sequences, span=span, scale=0.25)
        exact = paged_attention(query, *pools, sequences, span=span, scale=0.25, impl="reference")
        assert (ours.float() - exact.float()).abs().max() < 0.05
    assert 1 < len(sizes) < 190
