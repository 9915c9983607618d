"""Paged attention against its formula.

The rule of tolerance (FlashAttention's): the error against a float64 oracle may be at most twice
that of the same formula computed plainly in the same dtype, plus one unit in the last place.
"""

import pytest
import torch

from kvchat_kernels.paged_attention import AttentionSpan, paged_attention
from support.paged_fixture import PagedProblem, paged_problem
from support.plain_attention import AttentionCase, plain_attention

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
EPSILON = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def attend(problem: PagedProblem, case: AttentionCase, impl: str) -> torch.Tensor:
    return paged_attention(
        problem.query,
        problem.key_pool,
        problem.value_pool,
        problem.sequences,
        span=AttentionSpan(case.window, case.chunk),
        scale=case.scale,
        softcap=case.softcap,
        sinks=problem.sinks,
        impl=impl,
    )


def by_formula(problem: PagedProblem, case: AttentionCase, dtype: torch.dtype) -> torch.Tensor:
    rows = problem.rows(problem.query)
    outputs = [
        plain_attention(case, query, key, value, problem.sinks, dtype)
        for query, key, value in zip(rows, problem.keys, problem.values, strict=True)
    ]
    return torch.cat(outputs)


def assert_close_enough(problem: PagedProblem, case: AttentionCase, impl: str) -> None:
    dtype = problem.query.dtype
    oracle = by_formula(problem, case, torch.float64)
    allowed = (by_formula(problem, case, dtype).double() - oracle).abs().max()

    out = attend(problem, case, impl)

    assert out.dtype == dtype
    assert out.shape == oracle.shape
    assert torch.isfinite(out).all(), "a slot outside a sequence was read"
    error = (out.double() - oracle).abs().max()
    ulp = EPSILON[dtype] * oracle.abs().max()
    assert error <= 2 * allowed + ulp, f"error {error:.3g}, plain {allowed:.3g}, ulp {ulp:.3g}"


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_every_rule_agrees_with_its_formula_on_a_mixed_batch(name: str, impl: str) -> None:
    case = CASES[name]
    assert_close_enough(paged_problem(case, MIXED), case, impl)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_low_precision_is_as_exact_as_plain_arithmetic_in_it(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    assert_close_enough(paged_problem(case, MIXED, dtype=dtype), case, "cpu")


@pytest.mark.parametrize("layout", ["permuted", "consecutive", "descending"])
@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_where_blocks_lie_makes_no_difference(block_size: int, layout: str) -> None:
    case = AttentionCase(window=50, has_sinks=True)
    problem = paged_problem(case, MIXED, block_size, layout=layout)
    assert_close_enough(problem, case, "cpu")


@pytest.mark.parametrize("new_tokens", [1, 16, 17, 300, 1000])
@pytest.mark.parametrize("name", ["full", "window 100", "chunk 48", "softcap", "sinks"])
def test_a_thousand_tokens_in_every_manner_of_chunk(name: str, new_tokens: int) -> None:
    case = CASES[name]
    problem = paged_problem(case, [(new_tokens, 1000)], layout="consecutive")
    assert_close_enough(problem, case, "cpu")


def test_large_scores_stay_finite() -> None:
    case = AttentionCase(has_sinks=True)
    problem = paged_problem(case, [(20, 90), (1, 33)])
    problem.key_pool.mul_(40.0)
    large = [key * 40.0 for key in problem.keys]

    out = attend(problem, case, "cpu")

    rows = problem.rows(problem.query)
    expected = torch.cat(
        [
            plain_attention(case, query, key, value, problem.sinks, torch.float64)
            for query, key, value in zip(rows, large, problem.values, strict=True)
        ]
    )
    assert torch.allclose(out.double(), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["full", "softcap and window", "chunk 48"])
def test_many_rows_are_computed_in_slabs_and_stay_exact(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from kvchat_kernels.paged_attention import torch_cpu

    case = CASES[name]
    problem = paged_problem(case, [(130, 200)])
    whole = attend(problem, case, "cpu")

    monkeypatch.setattr(torch_cpu, "_SLAB_BYTES", 3 * 4 * 200 * 4)

    assert torch.allclose(attend(problem, case, "cpu"), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("window 5", AttentionCase(window=6)),
        ("window 5", AttentionCase()),
        ("chunk 48", AttentionCase(chunk=47)),
        ("softcap", AttentionCase()),
        ("sinks", AttentionCase()),
    ],
    ids=["window off by one", "no window", "chunk off by one", "no softcap", "no sinks"],
)
def test_the_tolerance_tells_a_wrong_rule_from_rounding(name: str, wrong: AttentionCase) -> None:
    problem = paged_problem(CASES[name], MIXED)
    blind = PagedProblem(**{**vars(problem), "sinks": None}) if name == "sinks" else problem

    right, other = attend(problem, CASES[name], "cpu"), attend(blind, wrong, "cpu")

    assert (right - other).abs().max() > 0.01


def test_one_wrong_slot_shows() -> None:
    problem = paged_problem(AttentionCase(), [(1, 40)])
    before = attend(problem, AttentionCase(), "cpu")

    problem.key_pool[problem.sequences.block_tables[0, 1].item(), 3] += 1.0

    assert (attend(problem, AttentionCase(), "cpu") - before).abs().max() > 1e-4


def test_queries_need_not_be_contiguous() -> None:
    """transformers hands over [heads, tokens, dim] transposed; views of it must do."""
    problem = paged_problem(AttentionCase(), MIXED)
    strided = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()

    out = attend(PagedProblem(**{**vars(problem), "query": strided}), AttentionCase(), "cpu")

    assert torch.equal(out, attend(problem, AttentionCase(), "cpu"))
