"""Paged attention on a CPU against its formula; support/rounding.py has the rule of tolerance."""

import pytest
import torch

from support.attention_checks import (
    CASES,
    MIXED,
    POSITION_RULES,
    attend,
    check_attention,
    check_private_tables,
)
from support.matrix import spread
from support.paged_fixture import PagedProblem, paged_problem
from support.plain_attention import AttentionCase, plain_attention


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_every_rule_agrees_with_its_formula_on_a_mixed_batch(name: str, impl: str) -> None:
    check_attention(CASES[name], MIXED, impl)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("name", POSITION_RULES)
def test_spans_look_at_positions_where_a_table_has_its_own(name: str, impl: str) -> None:
    check_private_tables(POSITION_RULES[name], MIXED, impl)


@pytest.mark.parametrize(
    ("name", "dtype"),
    spread(
        [(name, dtype) for name in CASES for dtype in (torch.bfloat16, torch.float16)],
        always=[*((name, torch.bfloat16) for name in CASES), ("sinks and window", torch.float16)],
    ),
    ids=str,
)
def test_low_precision_is_as_exact_as_plain_arithmetic_in_it(name: str, dtype: torch.dtype) -> None:
    check_attention(CASES[name], MIXED, "cpu", dtype=dtype)


@pytest.mark.parametrize("layout", ["permuted", "consecutive", "descending", "broken"])
@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_where_blocks_lie_makes_no_difference(block_size: int, layout: str) -> None:
    case = AttentionCase(window=50, has_sinks=True)
    check_attention(case, MIXED, "cpu", block_size=block_size, layout=layout)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("new_tokens", [1, 5, 17])
def test_a_long_context_whose_last_block_holds_one_token(new_tokens: int, impl: str) -> None:
    check_attention(CASES["odd heads"], [(new_tokens, 4097), (1, 1)], impl)


@pytest.mark.parametrize("new_tokens", [1, 16, 17, 300, 1000])
@pytest.mark.parametrize(
    "name", spread(["full", "window 100", "chunk 48", "softcap", "sinks"], ["window 100", "sinks"])
)
def test_a_thousand_tokens_in_every_manner_of_chunk(name: str, new_tokens: int) -> None:
    check_attention(CASES[name], [(new_tokens, 1000)], "cpu", layout="consecutive")


@pytest.mark.parametrize(
    "dtype",
    spread([torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16]),
    ids=str,
)
@pytest.mark.parametrize("new_tokens", [1, 5, 24])
@pytest.mark.parametrize("name", ["full", "window 100", "chunk 48", "softcap", "sinks"])
def test_runs_of_blocks_are_read_where_they_lie(name, new_tokens, dtype):
    lengths = [(new_tokens, 1500), (new_tokens, 70)]

    check_attention(CASES[name], lengths, "cpu", dtype=dtype, layout="broken")


@pytest.mark.parametrize("layout", ["broken", "consecutive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "window 100", "sinks"])
def test_a_row_over_a_long_context_is_read_from_a_copy_or_in_place(name, dtype, layout):
    check_attention(CASES[name], [(1, 2300), (1, 4500), (1, 9)], "cpu", dtype=dtype, layout=layout)


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
