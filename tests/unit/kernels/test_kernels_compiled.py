"""Every kernel beside attention, compiled for Hopper with the shapes of real models.

What the interpreter cannot show: that nothing spills, that shared memory suffices, that loads are
16 bytes wide, that weights are on their way before they are needed, that addresses have 64 bits.
"""

import re
from collections.abc import Callable

import pytest
import torch

from kvchat_kernels.block_copy import PoolTensors, copy_launch, image_launch
from kvchat_kernels.coded_kv_write.kernel import coded_kv_write_launch, turned_queries_launch
from kvchat_kernels.kv_code import FP8, INT4, INT8, K8V4, KvCode, group_size
from kvchat_kernels.kv_write import (
    HeadNorms,
    Rotation,
    StepKv,
    kv_write_launch,
    rope_kv_write_launch,
)
from kvchat_kernels.launch import Launch
from kvchat_kernels.row_kernels import gated_mul_launch, one_row_linear_launch, rms_norm_launch
from kvchat_kernels.sampler import SamplerRows, sampler_launches
from support.compiling import HOPPER, GpuCode, compile_for


def sweep(*values: object) -> list[object]:
    """The first value is compiled in every run, the others in long ones."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.soak) for value in values[1:])]


DTYPES = sweep(torch.bfloat16, torch.float16, torch.float32)
# query heads, KV heads, head dim, rotated dims: Qwen3-8B, 0.4 B, Gemma 3, Phi, one odd one
SHAPES = sweep(
    (32, 8, 128, 128), (14, 2, 64, 64), (8, 4, 256, 256), (24, 8, 128, 96), (9, 3, 20, 20)
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def compiled(launch: Launch) -> GpuCode:
    """Compile a launch and hold it to what every kernel must keep."""
    code = compile_for(
        HOPPER,
        launch.kernel,
        launch.values,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    assert code.stack_bytes == 0, "registers were spilled"
    assert code.shared_bytes <= HOPPER.shared_bytes
    # Sixteen warps of any of these kernels fit on a multiprocessor at once.
    assert code.registers * 32 * 16 <= 65536
    return code


def step(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[list[torch.Tensor], StepKv, torch.Tensor]:
    """A merged projection's queries, keys and values; their pools and slots; room for queries."""
    heads, kv_heads, dim, _ = shape
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    parts = meta(4, sum(widths), dtype=dtype).split(widths, dim=1)
    views = [part.view(4, -1, dim) for part in parts]
    pools = [meta(100, 16, kv_heads, dim, dtype=dtype) for _ in range(2)]
    slots = meta(4, dtype=torch.int64)
    return views, StepKv(pools[0], pools[1], slots), meta(4, heads, dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", [INT8, K8V4, INT4, FP8], ids=lambda code: code.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coded_kv_write(shape: tuple[int, int, int, int], code: KvCode, dtype: torch.dtype) -> None:
    (_, key, value), step_kv, _ = step(shape, dtype)
    _, kv_heads, dim, _ = shape
    if not code.takes(dim, dim):
        return
    pools = [
        meta(100, 16, kv_heads, width, dtype=stored)
        for numbers in (code.keys, code.values)
        for width, stored in (
            (numbers.width(dim), numbers.dtype),
            (dim // group_size(dim), torch.bfloat16),
        )
    ]

    launched = compiled(coded_kv_write_launch(key, value, tuple(pools), code, step_kv.slot_mapping))

    assert launched.ptx_count("div.full") == 0, "torch divides exactly"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_turned_queries(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    (query, _, _), _, _ = step(shape, dtype)

    compiled(turned_queries_launch(query, torch.empty_like(query).contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kv_write(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    (_, key, value), step_kv, _ = step(shape, dtype)
    pools = step_kv.key_pool, step_kv.value_pool

    code = compiled(kv_write_launch(key, value, *pools, step_kv.slot_mapping))

    if shape[2] % 64 == 0:
        assert code.ptx_count("ld.global.v4") >= 2
        assert code.ptx_count("st.global.v4") >= 2


@pytest.mark.parametrize("has_norms", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("is_interleaved", [False, True], ids=["", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_kv_write(shape, is_interleaved, has_norms):
    dtype = torch.bfloat16
    views, step_kv, rotated = step(shape, dtype)
    angles = meta(4, shape[3], dtype=dtype)
    angles = angles[:, ::2] if is_interleaved else angles[:, : shape[3] // 2]
    rotation = Rotation(angles, angles, is_interleaved)
    weight = meta(shape[2], dtype=dtype)
    norms = HeadNorms(weight, weight, 1e-6) if has_norms else None

    code = compiled(rope_kv_write_launch(*views, rotation, step_kv, norms, rotated))

    if shape[2] == shape[3] and shape[2] % 64 == 0:
        # Both halves of queries and of keys, or both at once, and values.
        assert code.ptx_count("ld.global.v4") >= 5
        assert code.ptx_count("st.global.v4") >= 5


@pytest.mark.parametrize(
    ("row", "num_wide"), [(128, 4), (3, 0)], ids=["words of 16 bytes", "words of 2 bytes"]
)
def test_block_copies(row: int, num_wide: int) -> None:
    block_size = 16 if num_wide else 1
    pools = PoolTensors([meta(100, block_size, 1, row) for _ in range(4)])
    ids = meta(3, dtype=torch.int64)
    images = meta(3, pools.image_bytes, dtype=torch.uint8)
    starts = [start for _, start, _ in pools.columns()]
    part = PoolTensors([meta(9, block_size, 1, row)] * 2, starts[1::2], pools.image_bytes)
    launches = [
        copy_launch(pools, ids, ids),
        image_launch(pools, ids, images, is_gather=True),
        image_launch(pools, ids, images, is_gather=False),
        image_launch(part, ids, images, is_gather=True),
    ]
    for launch in launches:
        code = compiled(launch)
        assert code.ptx_count("ld.global.v4") == code.ptx_count("st.global.v4") == num_wide


@pytest.mark.parametrize("has_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("size", sweep(4096, 576, 896, 16384))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype, size: int, has_residual: bool) -> None:
    rows, weight = meta(4, size, dtype=dtype), meta(size, dtype=dtype)
    residual = rows if has_residual else None

    code = compiled(rms_norm_launch(rows, residual, weight, 1e-6, 1.0, rows, residual))

    assert code.ptx_count("ld.global.v4") >= 2 + has_residual
    assert code.ptx_count("st.global.v4") >= 1 + has_residual


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(dtype: torch.dtype, activation: str) -> None:
    gate, up = meta(4, 2 * 12288, dtype=dtype).chunk(2, dim=1)

    code = compiled(gated_mul_launch(gate, up, activation, meta(4, 12288, dtype=dtype)))

    assert code.shared_bytes == 0
    assert code.ptx_count("ld.global.v4") >= 2
    assert code.ptx_count("st.global.v4") >= 1


@pytest.mark.parametrize("has_bias", sweep(True, False), ids=["bias", ""])
@pytest.mark.parametrize("sizes", sweep((12288, 4096), (4096, 24576), (896, 1152)), ids=str)
def test_products_with_one_row(sizes: tuple[int, int], has_bias: bool) -> None:
    in_size, out_size = sizes
    row, weight = meta(1, in_size), meta(out_size, in_size)
    bias = meta(out_size) if has_bias else None

    code = compiled(one_row_linear_launch(row, weight, bias, meta(1, out_size)))

    assert in_size < 1024 or code.ptx_count("cp.async.cg") >= 8
    if in_size == 12288:  # a power of two would be a shift
        stride = rf"mad\.wide\.s32\s.*, {in_size * 2},"
        assert re.search(stride, code.ptx), "rows are found with 32 bits"


@pytest.mark.parametrize("dtype", sweep(torch.float32, torch.float16), ids=str)
def test_products_with_one_row_of_other_dtypes(dtype: torch.dtype) -> None:
    row, weight = meta(1, 4096, dtype=dtype), meta(4096, 4096, dtype=dtype)

    code = compiled(one_row_linear_launch(row, weight, None, meta(1, 4096, dtype=dtype)))

    assert code.ptx_count("cp.async.cg") >= 8


@pytest.mark.parametrize("dtype", sweep(torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("vocab", sweep(151936, 32000))
def test_sampler(vocab: int, dtype: torch.dtype) -> None:
    floats, integers = meta(4, dtype=torch.float32), meta(4, dtype=torch.int64)
    rows = SamplerRows(floats, meta(4, dtype=torch.int32), floats, floats, integers, integers)
    likeliest, draw, decide = (
        compiled(launch) for launch in sampler_launches(meta(4, vocab, dtype=dtype), rows, integers)
    )

    for code in (likeliest, draw, decide):
        assert code.ptx_count("ld.global.v4") >= 2
    # The noise's first logarithm is exact near 1; a fast one of float32 is not.
    assert draw.ptx_count("fma.rn.f64") > 0


def test_every_kernel_has_a_test_here() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    kernels: dict[str, Callable[..., object]] = {
        "kv_write": kv_write_launch,
        "rope_kv_write": rope_kv_write_launch,
        "block_copies": copy_launch,
        "rms_norm": rms_norm_launch,
        "gates": gated_mul_launch,
        "products_with_one_row": one_row_linear_launch,
        "sampler": sampler_launches,
    }
    assert set(kernels) <= tested
