"""What the kernels of KV in few bits must do: write to the bit, attend as over plain numbers.

Called where Triton interprets, and on a CUDA device.
"""

from dataclasses import replace

import torch

from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.coded_kv_write import coded_kv_write, turn_queries
from kvchat_kernels.kv_code import INT8, KvCode, group_size
from kvchat_kernels.paged_attention import PagedSequences
from kvchat_kernels.paged_attention.triton_gpu import AttentionCall, paged_attention_coded_triton
from support.attention_checks import assert_exact, scoring_of
from support.attention_kernel_checks import captured
from support.paged_fixture import PagedProblem, paged_problem, with_private_tables
from support.plain_attention import AttentionCase
from support.rounding import assert_same_bits, poisoned_memory

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def coded_problem(
    case: AttentionCase,
    lengths: tuple[tuple[int, int], ...],
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    is_private: bool = False,
    code: KvCode = INT8,
) -> tuple[PagedProblem, Parts]:
    """Return a problem whose oracle has the stored numbers, and the pools; NaN beside sequences.

    Its query is one for turned keys where the code turns them, its result of turned values.
    """
    problem = paged_problem(case, lengths, block_size, torch.float32)
    if is_private:
        problem = with_private_tables(problem)
    parts = (*code.keys.quantised(problem.key_pool), *code.values.quantised(problem.value_pool))
    keys, values = (
        tuple(numbers.restored(*numbers.quantised(own)).to(dtype) for own in side)
        for numbers, side in ((code.keys, problem.keys), (code.values, problem.values))
    )
    sinks = None if problem.sinks is None else problem.sinks.to(dtype)
    query = problem.query.to(dtype)
    return replace(problem, query=query, keys=keys, values=values, sinks=sinks), parts


def check_coded_attention(
    case: AttentionCase,
    lengths: tuple[tuple[int, int], ...],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    is_private: bool = False,
    code: KvCode = INT8,
) -> None:
    """One batch of (new tokens, context) is as exact as arithmetic over the stored numbers."""
    problem, parts = coded_problem(case, lengths, dtype, block_size, is_private, code)
    moved = problem.to(device)
    with poisoned_memory():
        out = paged_attention_coded_triton(
            moved.query,
            tuple(part.to(device) for part in parts),
            code,
            moved.sequences,
            scoring_of(case, moved.sinks),
        )
    assert_exact(out.cpu(), problem, case, device)


def check_coded_replay(
    case: AttentionCase, new: int, contexts: tuple[int, ...], device: str = "cpu"
) -> None:
    """A step planned, or captured, for other contexts is right for these."""
    problem, parts = coded_problem(case, tuple((new, context) for context in contexts))
    moved = problem.to(device)
    keys, key_scales, values, value_scales = (part.to(device) for part in parts)
    planned = PagedSequences(
        problem.sequences.query_lens,
        (new,) * len(contexts),
        torch.zeros_like(moved.sequences.block_tables),
        problem.sequences.block_size,
    )
    out = moved.query.new_full((*moved.query.shape[:2], case.value_dim), float("nan"))
    settings = planned, scoring_of(case, moved.sinks)
    replay = captured(
        AttentionCall(moved.query, keys, values, *settings, out, key_scales, value_scales, INT8)
    )

    planned.context_lens_device.copy_(moved.sequences.context_lens_device)
    planned.block_tables.copy_(moved.sequences.block_tables)
    replay()

    assert_exact(out.cpu(), problem, case, device)


def zeroed_pools(
    num_blocks: int, block: int, heads: int, *dims: int, code: KvCode = INT8
) -> CodedKv:
    made, shape = [], (num_blocks, block, heads)
    for dim, numbers in zip(dims, (code.keys, code.values), strict=True):
        made.append(torch.zeros(*shape, numbers.width(dim), dtype=numbers.dtype))
        made.append(torch.zeros(*shape, dim // group_size(dim), dtype=torch.bfloat16))
    return CodedKv(*made, code)


def hard_numbers(num_rows: int, *shape: int) -> torch.Tensor:
    """Return rows from the smallest floats to the largest, zeros, ties, and what is no number."""
    values = torch.randn(num_rows, *shape)
    flat = values.view(num_rows, -1)
    width = flat.shape[1]
    flat[1] *= 1e-38
    flat[2] *= 1e37
    flat[3] = 0
    flat[4] = torch.arange(width) % 255 - 127.5
    flat[5, ::7] = float("nan")
    flat[6, ::9] = float("inf")
    flat[7, ::5] = -float("inf")
    flat[8] = 1e-30 * torch.rand(width)
    flat[9, ::3] *= 1000
    return values


def check_coded_write(
    dims: tuple[int, int], dtype: torch.dtype, device: str = "cpu", code: KvCode = INT8
) -> None:
    """The kernel stores the bytes of the reference: KV that a CPU kept is read by a GPU.

    Keys and values are parts of one tensor, so they are not contiguous.
    """
    torch.manual_seed(0)
    num_rows, heads = 16, 3
    both = hard_numbers(num_rows, heads, dims[0] + dims[1]).to(dtype)
    slots = torch.tensor([3, 9, 18, 11, 2, 0, 1, 4, 5, 6, -1, 7, 8, 10, 12, 13])
    stored = []
    for impl, place in (("triton", device), ("reference", "cpu")):
        kv = zeroed_pools(5, 4, heads, *dims, code=code)
        pools = tuple(tensor.to(place) for tensor in kv.tensors)
        key, value = both.to(place).split(dims, dim=2)
        coded_kv_write(key, value, pools, code, slots.to(place), impl=impl)
        stored.append([tensor.cpu() for tensor in pools])
    for ours, theirs in zip(*stored, strict=True):
        if ours.is_floating_point():
            assert torch.equal(ours.isnan(), theirs.isnan())
            ours, theirs = ours.nan_to_num(7.0), theirs.nan_to_num(7.0)
        assert_same_bits(ours, theirs, "stored")


def check_turned_queries(dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """The kernel turns queries as the reference does, of any strides."""
    torch.manual_seed(0)
    query = torch.randn(7, 5, dim * 2).to(dtype)[:, 1:4, :dim]

    ours, plain = (
        turn_queries(query.to(place), impl=impl).cpu()
        for impl, place in (("triton", device), ("reference", "cpu"))
    )

    assert torch.allclose(ours.float(), plain.float(), rtol=torch.finfo(dtype).eps, atol=0)
