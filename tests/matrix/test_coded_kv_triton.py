"""The Triton kernels of KV in few bits, interpreted: the write to the bit, attention by rule."""

import pytest
import torch

from kvchat.model.gpu.cuda_graph import trapping_host_reads
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.kv_code import FP8, INT4, K8V4
from kvchat_kernels.launch import Launch
from kvchat_kernels.paged_attention import DeviceSequences, Scoring
from support.attention_checks import CASES
from support.coded_kv_checks import (
    check_coded_attention,
    check_coded_replay,
    check_coded_write,
    check_turned_queries,
    zeroed_pools,
)
from support.interpreter import Interpreter
from support.matrix import spread
from support.plain_attention import AttentionCase

FEW_ROWS = ((1, 63), (3, 50), (1, 1))
RULES = [
    *("full", "odd heads", "wide keys", "window 5"),
    *("chunk 48", "softcap and window", "sinks, wide keys"),
]
MANY_ROWS = ((18, 70), (17, 17), (1, 33))
# One scale a head (dims that 8 does not divide), groups of 8, 16 and 32, and padded dims.
DIMS = [(16, 16), (20, 20), (8, 24), (40, 80), (96, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dims", spread([(dims,) for dims in DIMS], [(DIMS[0],)]), ids=str)
def test_the_write_stores_the_same_bytes_as_the_reference(interpreter, dims, dtype):
    interpreter(check_coded_write, dims, dtype)


FEW_BITS = [FP8, K8V4, INT4]


@pytest.mark.parametrize("code", FEW_BITS, ids=lambda code: code.name)
@pytest.mark.parametrize(
    "dims", spread([((64, 64),), ((80, 16),), ((48, 96),)], [((80, 16),)]), ids=str
)
def test_the_write_of_other_codes_stores_the_same_bytes_too(interpreter, dims, code):
    interpreter(check_coded_write, dims, torch.float32, "cpu", code)


@pytest.mark.parametrize("code", FEW_BITS, ids=lambda code: code.name)
@pytest.mark.parametrize(
    "dims", spread([((64, 64),), ((80, 16),), ((16, 96),)], [((80, 16),)]), ids=str
)
def test_attention_over_other_codes(interpreter, dims, code):
    case = AttentionCase(num_heads=6, num_kv_heads=2, key_dim=dims[0], value_dim=dims[1])
    lengths = ((1, 63), (17, 33), (18, 70))
    interpreter(check_coded_attention, case, lengths, "cpu", torch.float32, 16, False, code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_queries_are_turned_as_the_reference_turns_them(interpreter, dtype):
    for dim in (8, 16, 80, 96):
        interpreter(check_turned_queries, dim, dtype)


@pytest.mark.parametrize("name", spread(RULES, ["window 5", "chunk 48", "sinks, wide keys"]))
def test_few_rows_by_every_rule(interpreter: Interpreter, name: str) -> None:
    interpreter(check_coded_attention, CASES[name], FEW_ROWS)


@pytest.mark.parametrize(
    "dims", spread([(dims,) for dims in DIMS], [(DIMS[1],), (DIMS[3],)]), ids=str
)
def test_groups_of_every_size(interpreter: Interpreter, dims: tuple[int, int]) -> None:
    case = AttentionCase(num_heads=3, num_kv_heads=1, key_dim=dims[0], value_dim=dims[1])
    interpreter(check_coded_attention, case, ((1, 40), (17, 33)))


@pytest.mark.parametrize(
    "name", spread(["full", "window 100", "sinks and window"], ["sinks and window"])
)
def test_chunks_by_rule(interpreter: Interpreter, name: str) -> None:
    interpreter(check_coded_attention, CASES[name], MANY_ROWS)


@pytest.mark.parametrize("name", spread(["window 100", "chunk 48"], ["window 100"]))
def test_spans_look_at_positions_where_a_table_has_its_own(interpreter, name):
    lengths = (*FEW_ROWS, (18, 70))
    interpreter(check_coded_attention, CASES[name], lengths, "cpu", torch.float32, 16, True)


def test_float16_and_other_blocks(interpreter: Interpreter) -> None:
    case = AttentionCase(num_heads=6, num_kv_heads=3, key_dim=64, value_dim=32, softcap=2.0)
    interpreter(check_coded_attention, case, ((1, 257), (18, 70)), "cpu", torch.float16, 8)


@pytest.mark.parametrize("new", spread([1, 5], [5]))
def test_a_step_planned_for_a_single_token_is_right_for_a_long_context(interpreter, new):
    interpreter(check_coded_replay, AttentionCase(has_sinks=True, key_dim=64), new, (260, new, 33))


def test_a_step_on_the_kernels_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write by torch looks on the host for slots of -1, and attention by torch at lengths."""
    launched = []
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch.kernel.fn.__name__))
    monkeypatch.setattr(CodedKv, "_runs_kernels", lambda kv, query: True)
    monkeypatch.setattr("kvchat_kernels.coded_kv_write.uses_triton", lambda device, impl: True)
    kv = zeroed_pools(5, 16, 2, 64, 64)
    lengths = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    sequences = DeviceSequences(3, 1, *lengths, torch.zeros(3, 4, dtype=torch.int32), 16)
    rows, slots = torch.zeros(3, 2, 64), torch.zeros(3, dtype=torch.int64)

    with trapping_host_reads():
        kv.write(rows, rows, slots)
        kv.attend(torch.zeros(3, 4, 64), sequences, Scoring(0.1))

    assert launched == [
        "coded_kv_write_kernel",
        "turned_queries_kernel",
        "paged_attention_split_kernel",
        "merge_splits_kernel",
    ]
