"""The Triton kernels of paged attention, interpreted: every rule, and every way work is divided."""

import pytest
import torch

from support.attention_checks import (
    CASES,
    POSITION_RULES,
    check_attention,
    check_private_tables,
    check_window_tables,
)
from support.attention_kernel_checks import (
    check_distant_blocks,
    check_lengths_on_the_device,
    check_replay,
    check_rows_without_context,
    check_small_splits,
    check_strided_tensors,
    check_unused_table_entries,
)
from support.interpreter import Interpreter
from support.matrix import spread
from support.plain_attention import AttentionCase

Contents = tuple[tuple[tuple[int, int], ...], ...]
# (new tokens, context). Decodes and a verification; a chunk, a first chunk and a decode beside it.
FEW_ROWS = ((1, 63), (3, 50), (1, 1))
MANY_ROWS = ((18, 70), (17, 17), (1, 33))
# Rules that change which keys a tile of rows walks, and one for each thing beside that.
TILE_RULES = [
    *("full", "odd heads", "wide keys", "sinks", "softcap and window"),
    *("window 1", "window 5", "window 100", "chunk 48", "window in chunk", "sinks and window"),
]


@pytest.mark.parametrize("name", spread(CASES, ["odd heads", "sinks", "softcap and window"]))
def test_few_rows_by_every_rule(interpreter: Interpreter, name: str) -> None:
    interpreter(check_attention, CASES[name], FEW_ROWS, "triton")


@pytest.mark.parametrize("name", spread(TILE_RULES, ["window 5", "chunk 48", "sinks and window"]))
def test_chunks_by_every_rule(interpreter: Interpreter, name: str) -> None:
    interpreter(check_attention, CASES[name], MANY_ROWS, "triton")


@pytest.mark.parametrize("lengths", [FEW_ROWS, MANY_ROWS], ids=["few rows", "chunks"])
@pytest.mark.parametrize("name", spread(POSITION_RULES, ["window in chunk"]))
def test_spans_look_at_positions_where_a_table_has_its_own(interpreter, name, lengths):
    interpreter(check_private_tables, POSITION_RULES[name], (*lengths, (2, 300)), "triton")


@pytest.mark.parametrize(
    ("name", "lengths"),
    spread(
        [
            ("softcap and window", ((1, 130), (3, 257), (1, 1))),
            ("sinks and window", ((90, 300), (60, 257), (1, 97))),
            ("window 5", ((300, 600),)),
        ],
        always=[("softcap and window", ((1, 130), (3, 257), (1, 1)))],
    ),
)
def test_what_is_behind_a_window_need_not_be_there(interpreter, name, lengths):
    """Tiles begin before a window: zero times a NaN of the scratch block would be one."""
    interpreter(check_window_tables, CASES[name], lengths, "triton", "cpu", torch.float32, 4)


@pytest.mark.parametrize(
    ("name", "lengths"),
    spread(
        [
            ("odd heads", ((1, 257), (2, 63))),
            ("one head", MANY_ROWS),  # so few programs that the chunks' keys are split as well
            ("softcap and window", MANY_ROWS),
            ("sinks, wide keys", MANY_ROWS),
        ],
        always=[("one head", MANY_ROWS), ("sinks, wide keys", MANY_ROWS)],
    ),
    ids=["odd heads", "one head", "softcap and window", "sinks, wide keys"],
)
def test_float16_is_as_exact_as_plain_arithmetic_in_it(interpreter, name, lengths):
    interpreter(check_attention, CASES[name], lengths, "triton", "cpu", torch.float16)


@pytest.mark.parametrize(
    ("block_size", "layout"),
    spread(
        [
            (1, "permuted"),
            (8, "descending"),
            (24, "permuted"),
            (64, "consecutive"),
            (256, "permuted"),
        ],
        always=[(24, "permuted")],
    ),
)
def test_where_blocks_lie_makes_no_difference(interpreter, block_size, layout):
    case = AttentionCase(num_heads=2, num_kv_heads=1, window=50, has_sinks=True)
    arguments = ("triton", "cpu", torch.float32, block_size, layout)
    interpreter(check_attention, case, ((17, 60), (2, 80), (1, 257)), *arguments)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({}, marks=pytest.mark.matrix(0)),
        {"window": 100, "has_sinks": True},
        pytest.param({"chunk": 48}, marks=pytest.mark.matrix(1)),
    ],
    ids=str,
)
def test_many_splits_are_merged_and_empty_ones_weigh_nothing(interpreter, rule):
    interpreter(check_small_splits, AttentionCase(num_heads=2, num_kv_heads=1, **rule))


@pytest.mark.parametrize("new", spread([1, 5], [5]))
def test_a_step_planned_for_a_single_token_is_right_for_a_long_context(interpreter, new):
    interpreter(check_replay, AttentionCase(has_sinks=True), new, (260, new, 33))


DECODES = (((1, 1), (1, 1)), ((1, 63), (1, 257)), ((1, 1030), (1, 2)))
VERIFICATIONS = (
    ((5, 5), (5, 5)),
    ((1, 63), (5, 257), (4, 4)),
    ((3, 700), (5, 9), (2, 2)),
    ((5, 1030), (1, 1), (1, 300), (3, 77)),
)


@pytest.mark.parametrize(
    "rule",
    [pytest.param({}, marks=pytest.mark.matrix), {"window": 100, "has_sinks": True}],
    ids=str,
)
@pytest.mark.parametrize(
    ("most", "contents"), spread([(1, DECODES), (5, VERIFICATIONS)], [(5, VERIFICATIONS)])
)
def test_one_plan_is_right_whatever_lengths_the_device_holds(interpreter, most, contents, rule):
    interpreter(check_lengths_on_the_device, AttentionCase(**rule), most, contents)


def test_one_plan_for_more_tokens_than_decodes_have_serves_single_ones_too(interpreter):
    """Beyond 16 new tokens the host plans by their number, which only the device knows here."""
    contents = (((17, 40),), ((1, 257), (16, 16)), ((3, 70), (13, 13), (1, 1)))
    interpreter(check_lengths_on_the_device, AttentionCase(chunk=48), 17, contents)


def test_rows_without_context_become_zero(interpreter: Interpreter) -> None:
    interpreter(check_rows_without_context)


def test_unused_table_entries_are_not_followed(interpreter: Interpreter) -> None:
    interpreter(check_unused_table_entries)


def test_blocks_beyond_two_to_the_31_elements_are_found(interpreter: Interpreter) -> None:
    interpreter(check_distant_blocks)


def test_queries_and_pools_may_be_strided(interpreter: Interpreter) -> None:
    interpreter(check_strided_tensors)


@pytest.mark.parametrize(
    ("new", "dtype"),
    spread([(1, torch.float32), (5, torch.float16)], [(5, torch.float16)]),
    ids=str,
)
def test_a_long_context(interpreter: Interpreter, new: int, dtype: torch.dtype) -> None:
    lengths = ((new, 4097), (1, 257), (new, new))
    interpreter(check_attention, CASES["odd heads"], lengths, "triton", "cpu", dtype)


@pytest.mark.soak
@pytest.mark.parametrize("new", [1, 5, 17, 257])
@pytest.mark.parametrize("name", CASES)
def test_long_contexts_by_every_rule(interpreter: Interpreter, name: str, new: int) -> None:
    lengths = ((new, 4097), (1, 257), (new, new))
    interpreter(check_attention, CASES[name], lengths, "triton", "cpu", torch.float16)
