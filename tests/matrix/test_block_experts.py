"""A mixture's experts with weights in blocks on a GPU: interpreted, and compiled for GPUs."""

from dataclasses import replace

import pytest
import torch

from kvchat_kernels.experts import MAX_ROWS
from kvchat_kernels.experts_kernels import Groups, add_up_launch, group_launch, product_launch
from kvchat_kernels.linear.file_formats import UNEVEN
from support.block_linear_checks import KINDS, Kind, empty_blocks
from support.compiling import BLACKWELL, GPUS, HOPPER, RTX_40, RTX_50, Gpu
from support.expert_checks import (
    Case,
    check_block_experts,
    check_groups,
    check_many_rows,
    check_no_host_reads,
    check_rows_beside_others,
)
from support.interpreter import Interpreter
from support.matrix import spread
from support.soak_sizes import short_and_long
from unit.kernels.test_block_linear import check_compiled, meta


@pytest.mark.parametrize("num_rows", spread([1, 2], [2]))
@pytest.mark.parametrize("kind", spread(KINDS, [KINDS[3]]), ids=str)
def test_experts_are_those_of_the_unpacked_weights(interpreter, kind, num_rows):
    dtype = torch.float16 if num_rows == 2 else torch.float32
    num_experts = 3 if kind.columns > 32 else 6  # rows of 256 columns take long
    interpreter(check_block_experts, Case(num_rows, num_experts, kinds=(kind, kind), dtype=dtype))


@pytest.mark.parametrize("num_rows", spread([1, 3], [3]))
def test_gate_up_and_down_of_a_file_may_have_layouts_of_their_own(interpreter, num_rows):
    kinds = KINDS[1], KINDS[3], KINDS[5]
    interpreter(check_block_experts, Case(num_rows, top_k=3, kinds=kinds))


@pytest.mark.parametrize("impl", ["triton", "reference", "auto"])
def test_no_row_has_no_output(interpreter: Interpreter, impl: str) -> None:
    interpreter(check_block_experts, Case(num_rows=0), "cpu", impl)


WITHOUT_STEPS = [kind for kind in KINDS if kind.columns == 32]


@short_and_long(1, 60)
def test_steps_of_random_sizes(interpreter: Interpreter, size: int) -> None:
    generator = torch.Generator().manual_seed(size)

    def below(limit: int) -> int:
        return int(torch.randint(1, limit, (1,), generator=generator))

    for _ in range(size):
        num_experts = 8 + below(12)
        kinds = tuple(WITHOUT_STEPS[below(len(WITHOUT_STEPS) + 1) - 1] for _ in range(1 + below(3)))
        case = Case(below(24), num_experts, below(9), 32 * below(6), 32 * below(6), kinds)
        dtype = (torch.float16, torch.float32)[below(3) - 1]
        interpreter(check_block_experts, replace(case, dtype=dtype, can_repeat=below(3) == 1))


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS + 1])
def test_a_bias_is_added_to_what_an_expert_makes(interpreter, num_rows, impl):
    case = Case(num_rows, hidden=32, width=32, has_bias=True)
    interpreter(check_block_experts, case, "cpu", impl)


def test_an_expert_of_more_pairs_than_a_tile_has_rows(interpreter: Interpreter) -> None:
    interpreter(check_block_experts, Case(39, num_experts=2, top_k=2, hidden=32, width=32))


@pytest.mark.parametrize(
    ("experts", "num_experts"),
    [
        ([5], 6),
        ([0] * 33, 1),
        ([2, 0, 2, 2, 1], 3),
        ([7] * 16 + [3] * 17 + [0, 7], 9),
        ([expert % 60 for expert in range(0, 700, 7)], 64),
    ],
)
def test_pairs_are_grouped_by_expert(experts, num_experts, interpreter):
    interpreter(check_groups, experts, num_experts)


@pytest.mark.parametrize("impl", ["triton", "reference", "auto"])
def test_many_rows_are_multiplied_expert_by_expert(interpreter: Interpreter, impl: str) -> None:
    interpreter(check_many_rows, "cpu", impl)


def test_a_row_does_not_depend_on_the_rows_beside_it(interpreter: Interpreter) -> None:
    interpreter(check_rows_beside_others)


@pytest.mark.parametrize("num_rows", spread([1, MAX_ROWS], [MAX_ROWS]))
def test_steps_of_graphs_read_nothing_on_the_host(interpreter: Interpreter, num_rows: int) -> None:
    interpreter(check_no_host_reads, num_rows)


# hidden, width of an expert, experts, experts of a row
QWEN3_30B = (2048, 768, 128, 8)
MIXTRAL = (4096, 14336, 8, 2)
WIDE_32 = (2880, 2880, 32, 4)
SHAPES = {"Qwen3-30B-A3B": QWEN3_30B, "Mixtral": MIXTRAL, "32 of 2880": WIDE_32}
# There a few rows spill four registers, compiled by Triton 3.7, and one row of codes two or four.
SPILLED = [
    (BLACKWELL, "32 of 2880", KINDS[0]),
    (BLACKWELL, "Qwen3-30B-A3B", Kind(3, 32, torch.int8, codes=UNEVEN[::2])),
    (RTX_50, "Mixtral", Kind(4, 32, torch.float16, codes=UNEVEN)),
]
USUAL = [
    (RTX_40, "Qwen3-30B-A3B", KINDS[0]),
    (HOPPER, "Mixtral", KINDS[6]),
    (RTX_40, "Qwen3-30B-A3B", KINDS[9]),
    (RTX_40, "32 of 2880", KINDS[18]),
]
OTHERS = [
    pytest.param(gpu, name, kind, marks=pytest.mark.soak)
    for gpu in GPUS
    for name in SHAPES
    for kind in KINDS
    if SHAPES[name][0] % kind.columns == 0
    if (gpu, name, kind) not in [*USUAL, *SPILLED]
]


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("gpu", "name", "kind"), [*USUAL, *OTHERS], ids=str)
def test_weights_are_on_their_way_before_they_are_needed(gpu, name, kind, num_rows):
    hidden, width, num_experts, top_k = SHAPES[name]
    chosen = meta(num_rows, top_k, dtype=torch.int64)
    groups = Groups.empty(chosen, num_experts) if num_rows > 1 else None
    both = meta(num_rows * top_k, 2 * width)
    gate_up = empty_blocks((num_experts * 2 * width, hidden), kind)
    down = empty_blocks((num_experts * hidden, width), kind)
    products = meta(len(both), hidden, dtype=torch.float32)
    launches = [
        product_launch(meta(num_rows, hidden), chosen, groups, gate_up, num_experts, both),
        product_launch(meta(len(both), width), chosen, groups, down, num_experts, products),
    ]
    for launch in launches:
        counts = check_compiled(gpu, launch)
        is_one_step = width // 32 <= 32 and launch is launches[1] and num_rows == 1
        # Planes of 2 and 3 bits have 8 bytes of a block, and so has a row of 90 blocks of 5 bits.
        is_narrow = kind.bits not in (4, 8)
        is_ahead = counts["cp.async.cg"] + (counts["cp.async.ca"] if is_narrow else 0) > 0
        assert is_one_step or is_ahead
        assert (counts["mma.sync"] > 0) == (num_rows > 1)


@pytest.mark.parametrize(
    "num_rows", [1, *[pytest.param(n, marks=pytest.mark.soak) for n in (5, 64)]]
)
@pytest.mark.parametrize("gpu", [RTX_40], ids=str)
def test_grouping_and_adding_up(gpu: Gpu, num_rows: int) -> None:
    hidden, _, num_experts, top_k = QWEN3_30B
    chosen = meta(num_rows, top_k, dtype=torch.int64)
    check_compiled(gpu, group_launch(chosen, num_experts, Groups.empty(chosen, num_experts)))
    products = meta(num_rows * top_k, hidden, dtype=torch.float32)
    check_compiled(gpu, add_up_launch(products, meta(num_rows, top_k), meta(num_rows, hidden)))
