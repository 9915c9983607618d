"""What the compile-only harness says of kernels whose code is known beforehand."""

import pytest
import torch
import triton
import triton.language as tl

from support.compiling import HOPPER, GpuCode, compile_for


@triton.jit
def copy_kernel(source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + index, mask=index < size, other=0.0)
    tl.store(target_ptr + index, value, mask=index < size)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr):
    K: tl.constexpr = 64
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for step in range(steps):
        a = tl.load(a_ptr + step * M * K + row[:, None] * K + inner[None, :])
        b = tl.load(b_ptr + step * N * K + inner[:, None] * N + column[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + row[:, None] * N + column[None, :], total)


def compile_copy(size: int) -> GpuCode:
    values = {"source_ptr": torch.float32, "target_ptr": torch.float32, "size": size}
    return compile_for(HOPPER, copy_kernel, {**values, "BLOCK": 512}, num_warps=4)


def compile_product(m: int, n: int, num_stages: int, num_warps: int = 4) -> GpuCode:
    pointers = {"a_ptr": torch.bfloat16, "b_ptr": torch.bfloat16, "out_ptr": torch.float32}
    values = {**pointers, "steps": 32, "M": m, "N": n}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile_for(HOPPER, product_kernel, values, **options)


def test_a_size_that_is_divisible_lets_loads_be_vectors() -> None:
    assert compile_copy(4096).ptx_count("ld.global.v4") == 1
    assert compile_copy(4095).ptx_count("ld.global.v4") == 0


def test_a_copy_needs_no_shared_memory_and_few_registers() -> None:
    code = compile_copy(4096)

    assert code.shared_bytes == 0
    assert 0 < code.registers < 40
    assert code.stack_bytes == code.spills == 0


def test_products_use_the_tensor_cores_that_fit_their_rows() -> None:
    small, large = compile_product(16, 64, 3), compile_product(64, 64, 3)

    assert (small.ptx_count("mma.sync") > 0, small.ptx_count("wgmma") > 0) == (True, False)
    assert (large.ptx_count("mma.sync") > 0, large.ptx_count("wgmma") > 0) == (False, True)
    assert (small.sass_count("HMMA") > 0, large.sass_count("HGMMA") > 0) == (True, True)


def test_each_stage_beyond_the_first_two_costs_its_buffers() -> None:
    two, three, four = (compile_product(64, 64, stages) for stages in (2, 3, 4))
    one_stage = 2 * 64 * 64 * 2

    assert three.shared_bytes - two.shared_bytes == one_stage
    assert four.shared_bytes - three.shared_bytes == one_stage
    assert four.shared_bytes < HOPPER.shared_bytes
    assert three.ptx_count("cp.async.cg") > 0


def test_spills_are_seen() -> None:
    """In the stack alone too, which the kernels' own tests look at."""
    code = compile_product(64, 256, 2, num_warps=1)

    assert code.registers == 255
    assert code.spills > 0
    assert code.stack_bytes > 0


def test_a_forgotten_or_invented_value_is_refused() -> None:
    with pytest.raises(AssertionError, match="size"):
        compile_for(HOPPER, copy_kernel, {"source_ptr": torch.float32, "BLOCK": 4})
