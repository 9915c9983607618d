"""Plans a CPU step of one sequence once, for all layers with equal shapes.

The choice between the fused kernel and gathered keys, and their inputs, are the same in every such
layer, and computing them took longer than the kernel. Makes the same choices as `torch_cpu.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvchat_kernels.paged_attention.cpu_tokens import MOST_RUNS, WORTH_COPYING, gathering, scratch
from kvchat_kernels.paged_attention.sequences import AttentionSpan, PagedSequences, Sequences
from kvchat_kernels.paged_attention.torch_cpu import FEW_ROWS, KernelChoice, additive_mask


@dataclass(frozen=True, slots=True)
class FusedStep:
    """The slots of a sequence's tokens, valid for all pools of equal shape, and its mask.

    For the fused kernel:

    runs               (first slot, slot after the last) of each run, in position order
    mask               see `attend_fused`
    keys, values       [num_tokens, num_kv_heads, dim], buffers to copy the runs to; empty if a
                       single run is read in place. Every layer overwrites them

    For `attend_gathered`, `places`, `num_keys`, `keys` and `values` are those of Gathering.
    Otherwise `places` is None.
    """

    runs: list[tuple[int, int]]
    mask: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor | None = None
    num_keys: int = 0


def columns_of(steps: Sequence[FusedStep]) -> tuple[list[Any], ...]:
    """Return one list per field of FusedStep, over all layers, in the fields' order."""
    return (
        [step.runs for step in steps],
        [step.mask for step in steps],
        [step.keys for step in steps],
        [step.values for step in steps],
        [step.places for step in steps],
        [step.num_keys for step in steps],
    )


def fused_step(
    sequences: Sequences,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    span: AttentionSpan,
) -> FusedStep | None:
    """Return the plan for a layer with such pools; None if neither of the two ways applies.

    `slots` are the slots of the step's new tokens; if one is -1 there is no plan.
    """
    if not isinstance(sequences, PagedSequences):
        return None
    key = (span, num_heads, key_pool.shape[2:], value_pool.shape[3], key_pool.dtype)
    try:
        plan: FusedStep | None = sequences.plans[key]
    except KeyError:
        plan = sequences.plans[key] = None
        if int(slots.min()) >= 0:
            plan = _decide(sequences, key_pool, value_pool, num_heads, span)
            sequences.plans[key] = plan
    return plan


def _decide(
    sequences: PagedSequences,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    num_heads: int,
    span: AttentionSpan,
) -> FusedStep | None:
    dtype = key_pool.dtype
    if len(sequences.query_lens) > 1 or dtype not in (torch.bfloat16, torch.float32):
        return None
    (num_rows,), (end,) = sequences.query_lens, sequences.context_lens
    first = span.first_visible(end - num_rows)
    count, heads = end - first, key_pool.shape[2]
    choice = KernelChoice(num_heads, heads, key_pool.shape[3], dtype, span)
    prefers_fused = choice.prefers_fused(sequences, 0)
    if num_rows == 1 and not prefers_fused:
        found = gathering(sequences, 0, first, key_pool, value_pool)
        return FusedStep([], None, found.keys, found.values, found.places, found.num_keys)
    if num_rows > FEW_ROWS or not prefers_fused or choice.split(sequences) is not sequences:
        return None
    runs = list(sequences.runs(0, first))
    if len(runs) > MOST_RUNS:
        return None
    is_copied = len(runs) > 1 or count >= WORTH_COPYING
    keys, values = (
        scratch(sequences.scratch, name, (count * is_copied, heads, pool.shape[3]), dtype)
        for name, pool in (("keys", key_pool), ("values", value_pool))
    )
    mask = additive_mask(sequences, 0, span, first, num_heads // heads, dtype)
    return FusedStep(runs, mask, keys, values)
