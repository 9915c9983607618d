"""The kernels beside attention on a CUDA device: the interpreter's checks, real shapes, graphs.

The main dtype is bfloat16, because the interpreter cannot compute it correctly.
"""

from dataclasses import replace

import pytest
import torch

from kvchat.bench.scenarios import scenario
from kvchat.bench.setup import BenchSetup
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.model.checkpoint.source import find_model
from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks, scatter_blocks
from kvchat_kernels.kv_write import kv_write
from kvchat_kernels.row_operations import rms_norm
from kvchat_kernels.sampler import SamplerRows, sample_tokens
from support.block_linear_checks import (
    FILE_KINDS,
    KINDS,
    ROUNDED_KINDS,
    Kind,
    check_block_linear,
    check_many_rows_by_tiles,
    check_rows_beside_others,
)
from support.expert_checks import (
    Case,
    check_block_experts,
    check_groups,
    check_many_rows,
    random_step,
)
from support.expert_checks import check_rows_beside_others as check_rows_of_experts_beside_others
from support.kv_kernel_checks import KvCase, check_block_copies, check_kv_write, check_rope_kv_write
from support.rounding import assert_same_bits
from support.row_kernel_checks import (
    check_gates,
    check_one_row_linear,
    check_rms_norm,
    check_rows_in_any_order,
)
from support.sampler_kernel_checks import (
    Drawing,
    check_bounds_of_filters,
    check_broken_logits,
    check_draws,
    sampler_rows,
    some_logits,
)

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
HAS_ROOM = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 12 << 30
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = {
    "odd sizes": KvCase(),
    "no token": KvCase(num_tokens=0),
    "head-major": KvCase(is_transposed=True),
    "not dense": KvCase(is_dense=False),
    "8 B": KvCase(21, 32, 8, 128, 128, 128),
    "8 B, interleaved": KvCase(21, 32, 8, 128, 128, 128, is_interleaved=True),
    "0.4 B": KvCase(21, 14, 2, 64, 64, 64),
    "wide heads": KvCase(5, 8, 4, 256, 256, 256),
    "a part": KvCase(5, 24, 8, 128, 128, 96),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kv_write(name: str, dtype: torch.dtype) -> None:
    check_kv_write(replace(CASES[name], dtype=dtype, pool_dtype=dtype), DEVICE)


@pytest.mark.parametrize("offset", [None, 0.0, 1.0], ids=["", "normed", "normed with an offset"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rope_kv_write(name: str, dtype: torch.dtype, offset: float | None) -> None:
    case = replace(CASES[name], dtype=dtype, pool_dtype=dtype)
    if offset is not None:
        case = replace(case, has_norms=True, offset=offset)
    check_rope_kv_write(case, DEVICE)


@pytest.mark.parametrize(
    "shapes",
    [((16, 8, 128),) * 8, ((4, 2, 8), (4, 2, 16)), ((1, 4), (3, 4)), ((1, 3), (1, 7))],
    ids=["8 B", "16 bytes", "8 bytes", "2 bytes"],
)
def test_block_copies(shapes: tuple[tuple[int, ...], ...]) -> None:
    check_block_copies(shapes, DEVICE)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (0, 8), (2, 3, 257), (7, 4096), (300, 896)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, offset: float) -> None:
    check_rms_norm(shape, dtype, offset, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (0, 8), (2, 3, 257), (7, 12288), (300, 4864)], ids=str)
def test_gates(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_gates(shape, dtype, DEVICE)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (257, 33), (896, 1152), (4096, 6144)], ids=str)
def test_products_with_one_row(sizes: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    check_one_row_linear(sizes, dtype, has_bias, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
@pytest.mark.parametrize("sizes", [(90, 37), (896, 1152), (4096, 6144)], ids=str)
@pytest.mark.parametrize("kind", ROUNDED_KINDS, ids=str)
def test_products_with_weights_in_blocks(kind, sizes, num_rows, dtype):
    check_block_linear(kind, (num_rows, *sizes), dtype, True, DEVICE)


@pytest.mark.parametrize("num_rows", [1, 5, 20])
@pytest.mark.parametrize("kind", FILE_KINDS, ids=str)
def test_products_with_planes_codes_and_floats_of_files(kind: Kind, num_rows: int) -> None:
    """Twenty rows multiply with unpacked tiles."""
    check_block_linear(kind, (num_rows, 1024, 515), torch.bfloat16, False, DEVICE)


def test_many_rows_multiply_with_unpacked_tiles() -> None:
    check_many_rows_by_tiles("triton", DEVICE)


def test_a_row_of_a_block_product_does_not_depend_on_the_rows_beside_it() -> None:
    check_rows_beside_others(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("kind", ROUNDED_KINDS, ids=str)
def test_experts_with_weights_in_blocks(kind: Kind, num_rows: int, dtype: torch.dtype) -> None:
    kinds = (kind, kind) if num_rows != 5 else (kind, KINDS[0], kind)
    check_block_experts(Case(num_rows, 16, 8, 96, 160, kinds, dtype), DEVICE)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("kind", FILE_KINDS, ids=str)
def test_experts_in_planes_codes_and_floats_of_files(kind: Kind, num_rows: int) -> None:
    check_block_experts(Case(num_rows, 8, 2, kinds=(kind, kind), dtype=torch.bfloat16), DEVICE)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("sizes", [(32, 8, 2048, 768), (8, 2, 4096, 14336)], ids=str)
def test_experts_of_real_shapes(sizes: tuple[int, int, int, int], num_rows: int) -> None:
    kinds = KINDS[0], KINDS[0]
    case = Case(num_rows, *sizes, kinds=kinds, dtype=torch.bfloat16)
    step, exact = random_step(case, DEVICE), random_step(case, DEVICE)
    exact = replace(exact, x=exact.x.float(), factors=exact.factors.float())

    found, expected = step.by("triton").float(), exact.by("reference")

    assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 2, 16, 64])
def test_pairs_of_experts_are_grouped(num_rows: int) -> None:
    chosen = torch.rand(num_rows, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    check_groups(chosen.flatten().tolist(), 128, DEVICE)


@pytest.mark.parametrize("impl", ["triton", "auto"])
def test_many_rows_are_multiplied_expert_by_expert(impl: str) -> None:
    check_many_rows(DEVICE, impl)


def test_the_experts_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    check_rows_of_experts_beside_others(DEVICE)


@pytest.mark.parametrize("num_rows", [1, 7])
def test_captured_experts_follow_the_choice_of_their_rows(num_rows: int) -> None:
    step = random_step(Case(num_rows, 16, 4, dtype=torch.float16), DEVICE)
    step.by("triton")  # compiles, which must not happen while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step.by("triton")
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        step.chosen.copy_(torch.rand(num_rows, 16, generator=generator).topk(4).indices)
        graph.replay()
        assert torch.equal(found, step.by("triton"))


def test_rows_may_lie_in_any_order() -> None:
    check_rows_in_any_order(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 63, 2049, 32000, 151936])
def test_sampler(vocab: int, dtype: torch.dtype) -> None:
    """The twin runs on the device too. They may only differ where scores agree to the last places
    of a logarithm, or where the bound of a filter lies between two roundings of one sum."""
    check_draws(vocab, dtype, 1, DEVICE)


@pytest.mark.parametrize("vocab", [2049, 151936])
def test_sampler_without_candidates(vocab: int) -> None:
    check_draws(vocab, torch.float32, 3, DEVICE, max_candidates=2)


def test_a_draw_does_not_depend_on_the_order_in_which_candidates_arrive() -> None:
    """Programs of a row add their candidates as they come, in another order in every run."""
    logits = some_logits(4, 151936, 9).to(DEVICE)
    rows = sampler_rows([Drawing(temperature=0.6, top_k=60, top_p=0.95)] * 4, 5, DEVICE)
    first = sample_tokens(logits, rows).tolist()

    assert all(sample_tokens(logits, rows).tolist() == first for _ in range(50))


def test_the_device_samples_what_the_cpu_samples() -> None:
    drawings = [Drawing(temperature=0.6, top_k=20, top_p=0.95)] * 16
    logits = some_logits(16, 32000, 5)

    on_device = sample_tokens(logits.to(DEVICE), sampler_rows(drawings, 7, DEVICE))

    assert on_device.tolist() == sample_tokens(logits, sampler_rows(drawings, 7, "cpu")).tolist()


def test_filters_are_exact_at_their_bounds() -> None:
    check_bounds_of_filters(DEVICE)


def test_logits_that_are_no_numbers_are_reported() -> None:
    check_broken_logits(DEVICE)


@pytest.mark.skipif(not HAS_ROOM, reason="less than 12 GiB of device memory are free")
def test_slots_blocks_and_rows_beyond_the_reach_of_32_bits_are_found() -> None:
    num_blocks, dim = 2**15 + 3, 2**12
    pool = torch.zeros(num_blocks, 16, 1, dim, dtype=torch.bfloat16, device=DEVICE)
    last = num_blocks * 16 - 1
    new = torch.randn(1, 1, dim, device=DEVICE).bfloat16()

    kv_write(new, new, pool, pool, torch.tensor([last], device=DEVICE))
    assert_same_bits(pool.flatten(0, 1)[last], new[0], "keys")

    pools = PoolTensors([pool])
    images = torch.zeros(1, pools.image_bytes, dtype=torch.uint8, device=DEVICE)
    gather_blocks(pools, [num_blocks - 1], images)
    scatter_blocks(pools, [num_blocks - 2], images)
    copy_blocks(pools, [num_blocks - 1], [1])
    assert_same_bits(pool[-2], pool[-1], "a block from an image")
    assert_same_bits(pool[1], pool[-1], "a copied block")

    rows, weight = pool.view(-1, dim), torch.ones(dim, device=DEVICE).bfloat16()
    alone = rms_norm(rows[last:].clone(), weight, 1e-6)
    assert_same_bits(rms_norm(rows, weight, 1e-6)[last:], alone, "norms")


def test_a_captured_step_follows_its_slots_seeds_and_positions() -> None:
    """What a graph replays must come from tensors: slots and noise of the capture would repeat."""
    pool = torch.zeros(8, 4, 2, 64, device=DEVICE)
    new = torch.randn(2, 2, 64, device=DEVICE)
    slots = torch.tensor([4, 5], device=DEVICE)
    logits = some_logits(2, 5000, 1).to(DEVICE)
    rows = sampler_rows([Drawing(top_k=30, top_p=0.9)] * 2, 0, DEVICE)

    def step() -> torch.Tensor:
        kv_write(new, new, pool, pool, slots)
        rows.positions.add_(1)
        return sample_tokens(logits, rows)

    step()  # compiles, which must not happen while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = step()
    pool.zero_()
    slots.copy_(torch.tensor([9, 30]))
    positions = rows.positions.tolist()
    tokens = []
    for _ in range(5):
        graph.replay()
        tokens.append(drawn.tolist())

    assert_same_bits(pool.flatten(0, 1)[[9, 30]], new, "the slots of the replay")
    assert not pool.flatten(0, 1)[[4, 5]].any()
    columns = {name: getattr(rows, name) for name in SamplerRows.__slots__}
    for count, token in enumerate(tokens, start=1):
        columns["positions"] = torch.tensor(positions, device=DEVICE) + count
        assert sample_tokens(logits, SamplerRows(**columns)).tolist() == token


def test_every_kernel_is_measured_beside_its_ceiling() -> None:
    setup = BenchSetup(find_model("demo"), ModelConfig("demo"), CacheConfig(), 2, True)

    result = scenario("kernels")(setup)

    assert not result.refusal
    assert len(result.figures) > 20
    assert all(figure.value > 0 for figure in result.figures)
