"""What only the Triton kernels of paged attention must do: they read lengths on the device.

Called where Triton interprets, with tensors on the CPU, and on a CUDA device.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from kvchat_kernels.paged_attention import DeviceSequences, PagedSequences
from kvchat_kernels.paged_attention.tiles import Card, Tile
from kvchat_kernels.paged_attention.triton_gpu import (
    AttentionCall,
    card_of,
    plan_launches,
    split_launches,
)
from support.attention_checks import assert_exact, attend, by_formula, scoring_of
from support.paged_fixture import PagedProblem, paged_problem
from support.plain_attention import AttentionCase
from support.rounding import sparse_memory


def check_replay(
    case: AttentionCase, new: int, contexts: tuple[int, ...], device: str = "cpu"
) -> None:
    """What was planned for other contexts is right for these: lengths are read on the device."""
    problem = paged_problem(case, [(new, context) for context in contexts])
    moved = problem.to(device)
    planned = PagedSequences(
        problem.sequences.query_lens,
        (new,) * len(contexts),
        torch.zeros_like(moved.sequences.block_tables),
        problem.sequences.block_size,
    )
    call = attention_call(replace(moved, sequences=planned), case)
    replay = captured(call)

    planned.context_lens_device.copy_(moved.sequences.context_lens_device)
    planned.block_tables.copy_(moved.sequences.block_tables)
    replay()

    assert_exact(call.out, problem, case, device)


def attention_call(problem: PagedProblem, case: AttentionCase) -> AttentionCall:
    """Return one layer's call whose rows are NaN until something writes them."""
    shape = (*problem.query.shape[:2], case.value_dim)
    return AttentionCall(
        problem.query,
        problem.key_pool,
        problem.value_pool,
        problem.sequences,
        scoring_of(case, problem.sinks),
        problem.query.new_full(shape, float("nan")),
    )


def captured(call: AttentionCall) -> Callable[[], None]:
    """Plan a step now; return what runs it. On a GPU that is the replay of a captured graph."""
    if call.query.device.type == "cpu":
        launches = list(plan_launches(call, card_of(call.query.device)))
        return lambda: [launch.run() for launch in launches] and None
    for launch in plan_launches(call, card_of(call.query.device)):
        launch.run()  # compiles
    call.out.fill_(float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in plan_launches(call, card_of(call.query.device)):
            launch.run()
    return graph.replay


def check_lengths_on_the_device(
    case: AttentionCase,
    max_query_len: int,
    contents: tuple[tuple[tuple[int, int], ...], ...],
    device: str = "cpu",
) -> None:
    """One plan, made for bounds alone, is right for each content: (new tokens, context) pairs.

    Contents differ in how many sequences they have, in their new tokens and in their contexts; all
    have as many new tokens together.
    """
    problems = [paged_problem(case, content, seed=n) for n, content in enumerate(contents)]
    [num_tokens] = {problem.query.shape[0] for problem in problems}
    static = _room_for(problems, num_tokens, max_query_len).to(device)
    call = attention_call(static, case)
    replay = captured(call)
    for problem in problems:
        _put(problem, static)
        call.out.fill_(float("nan"))

        replay()

        assert_exact(call.out, problem, case, device)


def _room_for(problems: list[PagedProblem], num_tokens: int, max_query_len: int) -> PagedProblem:
    """Return a problem with room for each of these, that holds one token a sequence so far."""
    num_sequences = max(len(problem.keys) for problem in problems) + 1
    num_sequences = max(num_sequences, -(-num_tokens // max_query_len))
    shape = num_sequences, max(p.sequences.block_tables.shape[1] for p in problems)
    starts = [min(row * max_query_len, num_tokens) for row in range(num_sequences + 1)]
    lens = [end - start for start, end in pairwise(starts)]
    largest = max(problems, key=lambda problem: problem.key_pool.shape[0])
    return replace(
        largest,
        query=torch.zeros_like(largest.query),
        key_pool=torch.zeros_like(largest.key_pool),
        value_pool=torch.zeros_like(largest.value_pool),
        sequences=DeviceSequences(
            num_tokens,
            max_query_len,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            torch.zeros(shape, dtype=torch.int32),
            largest.sequences.block_size,
        ),
    )


def _put(problem: PagedProblem, static: PagedProblem) -> None:
    """Fill the tensors of `static` with another problem; what it has no use for becomes NaN."""
    for target, source in (
        (static.key_pool, problem.key_pool),
        (static.value_pool, problem.value_pool),
    ):
        target.fill_(float("nan"))
        target[: source.shape[0]] = source.to(target.device)
    static.query.copy_(problem.query)
    if static.sinks is not None and problem.sinks is not None:
        static.sinks.copy_(problem.sinks)
    there, given = static.sequences, problem.sequences
    assert isinstance(there, DeviceSequences)
    count, width = given.block_tables.shape
    there.query_starts.fill_(there.num_tokens)
    there.query_starts[: count + 1] = given.query_starts.to(there.query_starts.device)
    there.context_lens.fill_(0)
    there.context_lens[:count] = given.context_lens_device.to(there.context_lens.device)
    there.block_tables.fill_(-1)
    there.block_tables[:count, :width] = given.block_tables.to(there.block_tables.device)


def check_rows_without_context(device: str = "cpu") -> None:
    """A padding row of a captured step has no context: it becomes zero, and its neighbours stay."""
    case = AttentionCase()
    problem = paged_problem(case, [(1, 40), (1, 1), (1, 300)])
    moved = problem.to(device)
    moved.sequences.context_lens_device[1] = 0
    moved.sequences.block_tables[1] = -1

    out = attend(moved, case, "triton", device)

    assert (out[1] == 0).all()
    expected = by_formula(problem, case, torch.float64)
    assert torch.allclose(out[[0, 2]].double(), expected[[0, 2]], atol=1e-5)


def check_unused_table_entries(device: str = "cpu") -> None:
    """Entries behind a context are never followed: not -1, and not an id far outside the pool."""
    case = AttentionCase(window=70)
    problem = paged_problem(case, [(1, 40), (20, 100), (2, 17)])
    before = attend(problem, case, "triton", device)
    tables = problem.sequences.block_tables
    used = [-(-context // 16) for context in problem.sequences.context_lens]
    for row, count in enumerate(used):
        tables[row, count:] = -1 if row else 2**31 - 1

    assert torch.equal(attend(problem, case, "triton", device), before)


def check_distant_blocks(device: str = "cpu") -> None:
    """Blocks that lie 2^31 elements into a pool and beyond are found: offsets are 64 bits wide."""
    case = AttentionCase(num_heads=2, num_kv_heads=1)
    problem = paged_problem(case, [(1, 40), (20, 50)], dtype=torch.float16).to(device)
    offset = 2**31 // problem.key_pool[0].numel()
    tables = problem.sequences.block_tables + offset
    moved = replace(
        problem,
        key_pool=_shifted(problem.key_pool, offset),
        value_pool=_shifted(problem.value_pool, offset),
        sequences=replace(problem.sequences, block_tables=tables.to(torch.int32)),
    )

    assert torch.equal(
        attend(moved, case, "triton", device), attend(problem, case, "triton", device)
    )


def _shifted(pool: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a pool with this many blocks before those of `pool`."""
    num_elements = (num_blocks + pool.shape[0]) * pool[0].numel()
    if pool.device.type == "cpu":
        memory = sparse_memory(num_elements, pool.dtype)
    else:
        memory = torch.zeros(num_elements, dtype=pool.dtype, device=pool.device)
    shifted = memory.view(-1, *pool.shape[1:])
    shifted[num_blocks:] = pool
    return shifted


def check_strided_tensors(device: str = "cpu") -> None:
    """Queries may be head-major and pools one layer's slices of a larger tensor."""
    case = AttentionCase(num_heads=6, num_kv_heads=3)
    problem = paged_problem(case, [(1, 40), (20, 50)])
    pools = torch.stack([problem.key_pool, problem.value_pool], dim=1)
    strided = replace(
        problem,
        query=problem.query.transpose(0, 1).contiguous().transpose(0, 1),
        key_pool=pools[:, 0],
        value_pool=pools[:, 1],
    )
    assert not strided.query.is_contiguous()

    out = attend(strided, case, "triton", device)

    assert torch.equal(out, attend(problem, case, "triton", device))


def check_small_splits(case: AttentionCase, device: str = "cpu") -> None:
    """More splits than the merge takes at once, of which a window leaves some rows nothing."""
    problem = paged_problem(case, [(3, 600), (1, 17), (2, 2)])
    call = attention_call(problem.to(device), case)
    split, merge = split_launches(call, 1, 16, Card(24, 99 << 10), Tile(16, 16, 4, 2), min_split=16)

    split.run()
    merge.run()

    assert_exact(call.out, problem, case, device)
