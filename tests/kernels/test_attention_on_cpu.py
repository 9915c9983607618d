"""The plan made once per step gives the same tokens as each layer would find by itself."""

from dataclasses import dataclass

import pytest
import torch

from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences, paged_attention
from kvchat_kernels.paged_attention.cpu import (
    MOST_RUNS,
    WORTH_COPYING,
    FusedStep,
    KernelChoice,
    attend_gathered,
    fused_step,
)
from kvchat_kernels.paged_attention.cpu_fused import attend_fused, attend_plainly
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


LONG = list(range(1, 2 + WORTH_COPYING // BLOCK_SIZE))
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
LEFT = {
    "scattered": Case(1, list(range(2 * MOST_RUNS + 3, 1, -2))),
    "a chunk": Case(17, [1, 2, 3]),
    "float16": Case(1, [1, 2, 3], dtype=torch.float16),
}


def decide(case: Case, sequences: PagedSequences, slot: int = 5) -> FusedStep | None:
    slots = torch.full((case.num_rows,), slot)
    return fused_step(sequences, *case.pools(), slots, NUM_HEADS, case.span)


def joined(pool: torch.Tensor, step: FusedStep, room: torch.Tensor) -> torch.Tensor:
    tokens = pool.flatten(0, 1)
    if len(room) == 0:
        [(start, end)] = step.runs
        return tokens[start:end]
    return room.copy_(torch.cat([tokens[start:end] for start, end in step.runs]))


@pytest.mark.parametrize("name", TAKEN)
def test_a_step_reaches_what_paged_attention_attends(name: str) -> None:
    case = TAKEN[name]
    sequences, (keys, values) = case.sequences, case.pools()

    step = decide(case, sequences)

    assert step is not None
    assert decide(case, sequences) is step
    ours = attend_fused(
        case.query(),
        joined(keys, step, step.keys),
        joined(values, step, step.values),
        step.mask,
        0.25,
        None,
    )
    plain = paged_attention(case.query(), keys, values, case.sequences, span=case.span, scale=0.25)
    assert torch.equal(ours, plain)
    exact = paged_attention(
        case.query().float(),
        keys.float(),
        values.float(),
        case.sequences,
        span=case.span,
        scale=0.25,
        impl="reference",
    )
    assert (ours.float() - exact).abs().max() < (1e-5 if case.dtype == torch.float32 else 0.03)


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


@pytest.mark.parametrize("name", LEFT)
def test_what_the_fused_kernel_does_not_take_is_left_alone(name: str) -> None:
    assert decide(LEFT[name], LEFT[name].sequences) is None


def test_a_step_with_a_token_that_is_not_written_is_left_alone() -> None:
    case = TAKEN["one row in place"]
    assert decide(case, case.sequences, slot=-1) is None


def test_a_step_of_several_sequences_is_left_alone() -> None:
    case = TAKEN["one row in place"]
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert decide(case, PagedSequences((1, 1), (9, 12), tables, BLOCK_SIZE)) is None


def test_layers_of_other_spans_and_pools_are_decided_by_themselves() -> None:
    case = TAKEN["a window within one block"]
    sequences = case.sequences
    slots = torch.tensor([5])
    wide, windowed = (
        fused_step(sequences, *case.pools(), slots, NUM_HEADS, span) for span in (FULL, WINDOW)
    )
    assert wide is not None
    assert windowed is not None
    assert wide.runs != windowed.runs
    with_wide_values = Case(1, case.blocks, value_dim=32).pools()
    other = fused_step(sequences, *with_wide_values, slots, NUM_HEADS, FULL)
    assert other is not None
    assert other.values.shape[2] == 32


# Two slots of the last block are free: sequences of one run, of two, of many, of a window.
GATHERED = {
    "in place": Case(1, [1, 2, 3, 4]),
    "two places": Case(1, [7, 8, 1, 2]),
    "scattered": Case(1, list(range(2 * MOST_RUNS + 3, 1, -2))),
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
    exact = paged_attention(
        case.query().float(),
        keys.float(),
        values.float(),
        sequences,
        span=case.span,
        scale=0.25,
        impl="reference",
    )
    for pool in (keys, values):
        pool[case.blocks[-1], -2:] = float("nan")
        pool[0] = float("nan")
    before = [pool.clone() for pool in (keys, values)]

    step = decide(case, sequences)

    assert step is not None
    assert step.places is not None
    pools = keys.flatten(0, 1), values.flatten(0, 1)
    where = step.places, step.num_keys, step.keys, step.values
    ours = attend_gathered(case.query(), *pools, *where, 0.25, None)
    assert (ours.float() - exact).abs().max() < 0.03
    other = PagedSequences((1,), sequences.context_lens, sequences.block_tables, BLOCK_SIZE)
    plain = paged_attention(case.query(), keys, values, other, span=case.span, scale=0.25)
    assert torch.equal(ours, plain)
    for pool, was in zip((keys, values), before, strict=True):
        assert torch.equal(pool.nan_to_num(7.0), was.nan_to_num(7.0))


@pytest.mark.usefixtures("long_from_the_first_key")
def test_what_gathering_does_not_pay_for_goes_to_the_kernel() -> None:
    case = Case(1, [1, 2, 3], dtype=torch.float32)
    step = decide(case, case.sequences)
    assert step is not None
    assert step.places is None


@pytest.mark.usefixtures("long_from_the_first_key")
def test_a_verify_over_many_keys_goes_the_way_of_the_single_rows_it_stands_for() -> None:
    """By two products, which no script runs."""
    case = Case(5, [7, 8, 1, 2])
    assert decide(case, case.sequences) is None


def test_single_rows_of_heads_that_share_no_keys_are_soon_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu.multiplies_in", lambda dtype: True)
    one_row = PagedSequences((1,), (300,), torch.arange(1, 20, dtype=torch.int32)[None], 16)
    shared = KernelChoice(32, 8, 64, torch.bfloat16, FULL)
    single = KernelChoice(8, 8, 64, torch.bfloat16, FULL)
    assert shared.prefers_fused(one_row, 0)
    assert not single.prefers_fused(one_row, 0)
