"""What paged attention must do, by any implementation and on any device that runs it.

Called here, where Triton interprets, and on a CUDA device, which then computes the oracles too.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from kvchat.model.batch import window_tables
from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences, Scoring, paged_attention
from support.paged_fixture import PagedProblem, paged_problem, with_private_tables
from support.plain_attention import AttentionCase, plain_attention
from support.rounding import assert_as_exact, poisoned_memory

CASES = {
    "full": AttentionCase(),
    "one head": AttentionCase(num_heads=1, num_kv_heads=1),
    "odd heads": AttentionCase(num_heads=7, num_kv_heads=1, key_dim=24, value_dim=24),
    "grouped by 3": AttentionCase(num_heads=9, num_kv_heads=3, key_dim=20, value_dim=20),
    "ungrouped": AttentionCase(num_heads=5, num_kv_heads=5),
    "wide keys": AttentionCase(key_dim=24, value_dim=16),
    "wide values": AttentionCase(key_dim=12, value_dim=20),
    "window 1": AttentionCase(window=1),
    "window 5": AttentionCase(window=5),
    "window 100": AttentionCase(window=100),
    "chunk 48": AttentionCase(chunk=48),
    "window in chunk": AttentionCase(window=9, chunk=64),
    "softcap": AttentionCase(softcap=2.0),
    "softcap and window": AttentionCase(softcap=2.0, window=37),
    "sinks": AttentionCase(has_sinks=True),
    "sinks and window": AttentionCase(has_sinks=True, window=21, num_heads=6),
    "sinks and softcap": AttentionCase(has_sinks=True, softcap=1.5),
    "sinks, wide keys": AttentionCase(has_sinks=True, key_dim=20, value_dim=12),
}
# (new tokens, context): first tokens, decodes, chunks, a partial last block, a full one.
MIXED = ((1, 1), (1, 257), (63, 63), (5, 64), (16, 130), (17, 131), (40, 300), (3, 3))


def span_of(case: AttentionCase) -> AttentionSpan:
    return AttentionSpan(case.window, case.chunk)


def scoring_of(case: AttentionCase, sinks: torch.Tensor | None) -> Scoring:
    return Scoring(case.scale, span_of(case), case.softcap, sinks)


def attend(
    problem: PagedProblem, case: AttentionCase, impl: str, device: str = "cpu"
) -> torch.Tensor:
    """Run the implementation on `device`, whose fresh memory holds NaN; return the rows."""
    moved = problem.to(device)
    with poisoned_memory():
        out = paged_attention(
            moved.query,
            moved.key_pool,
            moved.value_pool,
            moved.sequences,
            scoring_of(case, moved.sinks),
            impl,
        )
    return out.cpu()


def by_formula(
    problem: PagedProblem, case: AttentionCase, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """Return all rows as the formula says, computed in `dtype` on `device`."""
    sinks = None if problem.sinks is None else problem.sinks.to(device)
    rows = problem.rows(problem.query)
    positions = problem.positions or [None] * len(problem.keys)
    outputs = [
        plain_attention(case, query.to(device), key.to(device), value.to(device), sinks, dtype, at)
        for query, key, value, at in zip(rows, problem.keys, problem.values, positions, strict=True)
    ]
    return torch.cat(outputs)


def assert_exact(
    out: torch.Tensor, problem: PagedProblem, case: AttentionCase, device: str = "cpu"
) -> None:
    """Hold all rows to the formula in the dtype they came in."""
    plain = by_formula(problem, case, out.dtype, device)
    assert_as_exact(out.to(device), plain, by_formula(problem, case, torch.float64, device))


def check_attention(
    case: AttentionCase,
    lengths: Iterable[tuple[int, int]],
    impl: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    layout: str = "permuted",
) -> None:
    """One batch of (new tokens, context) is as exact as plain arithmetic."""
    problem = paged_problem(case, tuple(lengths), block_size, dtype, layout)
    assert_exact(attend(problem, case, impl, device), problem, case, device)


def check_window_tables(
    case: AttentionCase,
    lengths: Iterable[tuple[int, int]],
    impl: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> None:
    """Tables of window blocks are as exact: blocks behind a window have none, and what would lie
    there is NaN, in the scratch block too.
    """
    problem = paged_problem(case, tuple(lengths), block_size, dtype)
    given = problem.sequences
    assert isinstance(given, PagedSequences)
    numbers = torch.arange(1, len(problem.key_pool) + 1, dtype=torch.int32)
    pools = [torch.cat([torch.full_like(p[:1], torch.nan), p]) for p in problem.pools]
    num_behind = 0
    for table, new, end in zip(
        given.block_tables.long(), given.query_lens, given.context_lens, strict=True
    ):
        behind = table[: span_of(case).first_visible(end - new) // block_size]
        num_behind += len(behind)
        for pool in pools:
            pool[numbers[behind].long()] = torch.nan
        numbers[behind] = 0
    assert num_behind > 2
    lengths = zip(given.query_lens, given.context_lens, strict=True)
    num_before = [(end - new) // block_size for new, end in lengths]
    tables = window_tables(given.block_tables.numpy(), num_before, numbers)
    own = replace(given, block_tables=torch.from_numpy(tables))
    windowed = replace(problem, key_pool=pools[0], value_pool=pools[1], sequences=own)

    assert_exact(attend(windowed, case, impl, device), problem, case, device)


# Rules that look at positions, and one for each thing beside that.
POSITION_RULES = {
    name: CASES[name]
    for name in (
        *("full", "window 5", "window 100", "chunk 48", "window in chunk"),
        *("softcap and window", "sinks and window"),
    )
}


def check_private_tables(
    case: AttentionCase,
    lengths: Iterable[tuple[int, int]],
    impl: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> None:
    """Tables with holes and positions of their own, beside a shared one, are as exact too.

    (new tokens, slots); spans look at positions, and no hole is read.
    """
    problem = with_private_tables(paged_problem(case, tuple(lengths), block_size, dtype))
    assert_exact(attend(problem, case, impl, device), problem, case, device)
