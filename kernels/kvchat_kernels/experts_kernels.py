"""A mixture's experts in block weights as Triton kernels: grouping, products, adding up.

A pair is a row and an expert that it chose; pair `p` is of row `p // top_k`. Shapes are those of
`linear/kernel.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch, next_power_of_2
from kvchat_kernels.linear.blocks import BlockWeights
from kvchat_kernels.linear.kernel import (
    ONE_ROW_TILE,
    ROWS_OF_A_TILE,
    few_rows_tile,
    operands,
    outputs_of_row,
    outputs_of_rows,
)

# Elements of the comparisons of all pairs with some: they stay in registers.
_COMPARED = 8192


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs sorted by their experts, in groups of at most 16 pairs of one expert.

    order    int32 [num_pairs]: pairs by expert, and by number
    groups   int32 [3, most]: each group's expert, its first place in `order`, and its size, 0 for
             what is no group
    """

    order: torch.Tensor
    groups: torch.Tensor

    @classmethod
    def empty(cls, chosen: torch.Tensor, num_experts: int) -> "Groups":
        """Return room for the groups of `chosen` [num_rows, top_k]."""
        num_pairs = chosen.numel()
        most = min(num_pairs, num_experts + num_pairs // ROWS_OF_A_TILE)
        kind: Any = {"dtype": torch.int32, "device": chosen.device}
        return cls(torch.empty(num_pairs, **kind), torch.empty(3, most, **kind))


# do_not_specialize: one compilation for all numbers of pairs below a power of two.
@triton.jit(do_not_specialize=["num_pairs", "most"])
def group_kernel(
    chosen_ptr, order_ptr, groups_ptr, num_pairs, most, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: each pair's place is the number of pairs before it, each expert's is a sum."""
    pair = tl.arange(0, PAIRS)
    expert = tl.arange(0, EXPERTS)
    own = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=EXPERTS).to(tl.int32)
    place = tl.zeros((PAIRS,), dtype=tl.int32)
    size = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, num_pairs, TILE):
        other = start + tl.arange(0, TILE)
        theirs = tl.load(chosen_ptr + other, mask=other < num_pairs, other=EXPERTS).to(tl.int32)
        is_before = theirs[None, :] < own[:, None]
        is_before |= (theirs[None, :] == own[:, None]) & (other[None, :] < pair[:, None])
        place += tl.sum(is_before.to(tl.int32), axis=1)
        size += tl.sum((theirs[None, :] == expert[:, None]).to(tl.int32), axis=1)
    tl.store(order_ptr + place, pair, mask=pair < num_pairs)

    num_groups = (size + ROWS - 1) // ROWS
    first = tl.cumsum(size, 0) - size
    group = tl.cumsum(num_groups, 0) - num_groups
    for index in range(tl.max(num_groups, 0)):
        taken = index * ROWS
        target = groups_ptr + group + index
        is_there = taken < size
        tl.store(target, expert, mask=is_there)
        tl.store(target + most, first + taken, mask=is_there)
        tl.store(target + 2 * most, tl.minimum(size - taken, ROWS), mask=is_there)
    unused = tl.sum(num_groups, 0) + pair  # there are no more groups than pairs
    tl.store(groups_ptr + 2 * most + unused, pair * 0, mask=unused < most)


@triton.jit
def one_row_of_experts_kernel(
    rows_ptr, chosen_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr,
    out_ptr, out_size, out_stride,
    PAIRS_OF_A_ROW: tl.constexpr, IN_SIZE: tl.constexpr, FORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile, pair) computes BLOCK_N outputs of a pair's expert."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1)
    first = tl.load(chosen_ptr + pair).to(tl.int32) * out_size
    result = outputs_of_row(
        rows_ptr + pair // PAIRS_OF_A_ROW * IN_SIZE, levels_ptr, scales_ptr, minimums_ptr,
        steps_ptr, codes_ptr,
        first + output, first + out_size, IN_SIZE, FORM, BLOCK_N, BLOCK_B, STAGES,
    )  # fmt: skip
    target = out_ptr + pair * out_stride + output
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=output < out_size)


@triton.jit(do_not_specialize=["most"])
def rows_of_experts_kernel(
    rows_ptr, order_ptr, groups_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr,
    out_ptr, out_size, out_stride, most, PAIRS_OF_A_ROW: tl.constexpr, IN_SIZE: tl.constexpr,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, group) computes BLOCK_N outputs of the pairs of a group."""
    group = tl.program_id(1)
    size = tl.load(groups_ptr + 2 * most + group)
    if size == 0:
        return
    first = tl.load(groups_ptr + group) * out_size
    slot = tl.arange(0, BLOCK_M)
    order = tl.load(groups_ptr + most + group) + slot
    pair = tl.load(order_ptr + order, mask=slot < size, other=0)[:, None]  # [M, 1]
    is_pair = (slot < size)[:, None]
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = outputs_of_rows(
        rows_ptr, levels_ptr, scales_ptr, minimums_ptr, steps_ptr, codes_ptr,
        pair // PAIRS_OF_A_ROW, is_pair, first + output, first + out_size, IN_SIZE, FORM,
        BLOCK_M, BLOCK_N, BLOCK_B, PRECISION,
    )  # fmt: skip
    target = out_ptr + pair * out_stride + output[None, :]
    inside = is_pair & (output < out_size)[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_up_kernel(
    products_ptr, factors_ptr, out_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, part) adds up BLOCK columns of a row's pairs, each times its factor."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        factor = tl.load(factors_ptr + pair).to(tl.float32)
        total += factor * tl.load(products_ptr + pair * size + column, mask=inside, other=0.0)
    target = out_ptr + row * size + column
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


def group_launch(chosen: torch.Tensor, num_experts: int, groups: Groups) -> Launch:
    """Return the launch that fills `groups` from `chosen` [num_rows, top_k], contiguous."""
    assert chosen.is_contiguous()
    pairs, experts = next_power_of_2(chosen.numel()), next_power_of_2(num_experts)
    values = {
        "chosen_ptr": chosen,
        "order_ptr": groups.order,
        "groups_ptr": groups.groups,
        "num_pairs": chosen.numel(),
        "most": groups.groups.shape[1],
        "ROWS": ROWS_OF_A_TILE,
        "PAIRS": pairs,
        "EXPERTS": experts,
        "TILE": min(32, pairs, max(1, _COMPARED // max(pairs, experts))),
    }
    return Launch(group_kernel, (1,), values, num_warps=8)


def product_launch(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    groups: Groups | None,
    weights: BlockWeights,
    num_experts: int,
    out: torch.Tensor,
) -> Launch:
    """Return the launch that multiplies each pair's row with its expert's matrix.

    rows      [num_rows, in] or [num_pairs, in], contiguous
    chosen    [num_rows, top_k], contiguous
    groups    the pairs sorted; None computes each pair by itself
    weights   [num_experts * outputs, in]
    out       [num_pairs, outputs], with any stride of rows
    """
    num_pairs, in_size = chosen.numel(), rows.shape[1]
    assert rows.is_contiguous()
    assert chosen.is_contiguous()
    assert out.stride(1) == 1
    assert in_size == weights.num_in, (in_size, weights.num_in)
    out_size = weights.num_out // num_experts
    values: dict[str, Any] = {
        **operands(weights),
        "rows_ptr": rows,
        "out_ptr": out,
        "out_size": out_size,
        "out_stride": out.stride(0),
        "PAIRS_OF_A_ROW": num_pairs // len(rows),
        "IN_SIZE": in_size,
    }
    if groups is None:
        grid = (triton.cdiv(out_size, ONE_ROW_TILE["BLOCK_N"]), num_pairs)
        return Launch(
            one_row_of_experts_kernel, grid, {"chosen_ptr": chosen, **values, **ONE_ROW_TILE}
        )
    # With 8 blocks a step, as `few_rows_kernel` has, two registers were spilled on sm_90: rows lie
    # anywhere here, and their places are kept.
    tile, most = {**few_rows_tile(rows.dtype), "BLOCK_B": 4}, groups.groups.shape[1]
    values |= {"order_ptr": groups.order, "groups_ptr": groups.groups, "most": most}
    grid = (triton.cdiv(out_size, tile["BLOCK_N"]), most)
    return Launch(rows_of_experts_kernel, grid, {**values, **tile}, num_stages=4)


def add_up_launch(products: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> Launch:
    """Return the launch that fills `out` [num_rows, hidden] from float32 products of pairs."""
    assert products.is_contiguous()
    assert factors.is_contiguous()
    assert out.is_contiguous()
    num_rows, size = out.shape
    block = min(1024, next_power_of_2(size))
    values = {
        "products_ptr": products,
        "factors_ptr": factors,
        "out_ptr": out,
        "size": size,
        "TOP_K": factors.shape[1],
        "BLOCK": block,
    }
    return Launch(add_up_kernel, (num_rows, triton.cdiv(size, block)), values)
