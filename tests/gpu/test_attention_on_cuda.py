"""The attention kernels on a CUDA device: exact in all dtypes, at real sizes, and when replayed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat_kernels.kv_code import CODES
from support.attention_checks import (
    CASES,
    MIXED,
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
from support.coded_kv_checks import (
    check_coded_attention,
    check_coded_replay,
    check_coded_write,
    check_turned_queries,
)
from support.plain_attention import AttentionCase
from support.private_tables import check_private_table

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Query heads, KV heads, key dim, value dim of layers that people run.
LAYERS = {
    "Qwen3-8B": AttentionCase(32, 8, 128, 128),
    "0.4 B": AttentionCase(14, 2, 64, 64),
    "Gemma 3": AttentionCase(8, 4, 256, 256, window=1024),
    "gpt-oss": AttentionCase(64, 8, 64, 64, window=128, has_sinks=True),
    "Gemma 2": AttentionCase(8, 4, 256, 256, softcap=50.0),
    "DeepSeek": AttentionCase(16, 16, 192, 128),
    "Phi": AttentionCase(32, 32, 96, 96),
    "Gemma 4": AttentionCase(8, 1, 512, 512),
    "one KV head": AttentionCase(32, 1, 80, 80),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_rule_on_a_mixed_batch(name: str, dtype: torch.dtype) -> None:
    check_attention(CASES[name], MIXED, "triton", DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POSITION_RULES)
def test_spans_look_at_positions_where_a_table_has_its_own(name: str, dtype: torch.dtype) -> None:
    check_private_tables(POSITION_RULES[name], MIXED, "triton", DEVICE, dtype)
    if name in ("full", "chunk 48"):
        check_coded_attention(POSITION_RULES[name], MIXED, DEVICE, dtype, is_private=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", ["window 5", "softcap and window", "sinks and window"])
def test_what_is_behind_a_window_need_not_be_there(name, block_size, dtype):
    for lengths in (MIXED, ((300, 600), (90, 300), (1, 97)), ((513, 1100),)):
        check_window_tables(CASES[name], lengths, "triton", DEVICE, dtype, block_size)


@pytest.mark.parametrize("name", ["llama", "gemma2, softcap", "gpt_oss, sinks"])
def test_logits_over_a_private_table_are_those_of_a_cache_without_the_dropped_tokens(
    name: str, tmp_path: Path
) -> None:
    check_private_table(name, tmp_path, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [1, 5, 16, 17, 257])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_real_models(name: str, new: int, dtype: torch.dtype) -> None:
    lengths = ((new, 4097), (1, 257), (new, new), (1, 63))
    check_attention(LAYERS[name], lengths, "triton", DEVICE, dtype)


@pytest.mark.parametrize("layout", ["permuted", "descending", "consecutive"])
@pytest.mark.parametrize("block_size", [1, 8, 24, 32, 256])
def test_where_blocks_lie_makes_no_difference(block_size: int, layout: str) -> None:
    case = AttentionCase(window=50, has_sinks=True)
    check_attention(case, MIXED, "triton", DEVICE, torch.float32, block_size, layout)


@pytest.mark.parametrize("rule", [{}, {"window": 100, "has_sinks": True}, {"chunk": 48}], ids=str)
def test_many_splits_are_merged_and_empty_ones_weigh_nothing(rule: dict[str, Any]) -> None:
    check_small_splits(AttentionCase(num_heads=2, num_kv_heads=1, **rule), DEVICE)


@pytest.mark.parametrize("new", [1, 5, 16])
def test_a_step_captured_for_a_single_token_is_right_for_a_long_context(new: int) -> None:
    case = AttentionCase(8, 2, 64, 64, has_sinks=True)
    check_replay(case, new, (32768, new, 257, 33), DEVICE)


@pytest.mark.parametrize("most", [5, 17])
def test_one_capture_is_right_whatever_lengths_the_device_holds(most: int) -> None:
    contents = (
        ((5, 5), (5, 5), (5, 5), (2, 2)),
        ((1, 32768), (5, 4097), (5, 63), (5, 257), (1, 1)),
        ((4, 12345), (4, 4), (4, 33), (3, 70), (2, 300)),
    )
    case = AttentionCase(8, 2, 64, 64, has_sinks=True, window=5000)
    check_lengths_on_the_device(case, most, contents, DEVICE)


def test_rows_without_context_become_zero() -> None:
    check_rows_without_context(DEVICE)


def test_unused_table_entries_are_not_followed() -> None:
    check_unused_table_entries(DEVICE)


def test_queries_and_pools_may_be_strided() -> None:
    check_strided_tensors(DEVICE)


def test_blocks_beyond_two_to_the_31_elements_are_found() -> None:
    check_distant_blocks(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [1, 5, 16, 257])
@pytest.mark.parametrize("code", CODES.values(), ids=list(CODES))
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_real_models_over_kv_in_few_bits(name, code, new, dtype):
    case = LAYERS[name]
    if code.takes(case.key_dim, case.value_dim):
        lengths = ((new, 4097), (1, 257), (new, new), (1, 63))
        check_coded_attention(case, lengths, DEVICE, dtype, 16, False, code)


@pytest.mark.parametrize("new", [1, 5])
def test_a_captured_step_over_kv_of_8_bits_is_right_at_other_lengths(new: int) -> None:
    check_coded_replay(AttentionCase(has_sinks=True, key_dim=64), new, (260, new, 33), DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES.values(), ids=list(CODES))
@pytest.mark.parametrize("dims", [(128, 128), (64, 256), (20, 40)], ids=str)
def test_a_gpu_stores_the_same_bytes_as_a_cpu(dims, code, dtype):
    if code.takes(*dims):
        check_coded_write(dims, dtype, DEVICE, code)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_a_gpu_turns_queries_as_a_cpu_does(dim: int, dtype: torch.dtype) -> None:
    check_turned_queries(dim, dtype, DEVICE)
