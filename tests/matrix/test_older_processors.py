"""Tests of kernels and of compiled steps again, with code for processors without AVX-512.

Most users have such a one. Prompts were changed where vectors have 512 bits, and measured nowhere
else: there they took up to 2.4 times as long as llama.cpp's.
"""

import pytest

from kvchat_kernels.cpu.code import has_feature
from kvchat_kernels.cpu.level import LEVELS, level
from support.other_process import ROOT, run_python

_PYTEST = """
import sys, pytest
from kvchat_kernels.cpu.code import has_feature
assert has_feature(sys.argv[1]) and not has_feature("avx512f")
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
_BLOCKS = "tests/matrix/test_linear_blocks.py::test_products_are_those_of_the_unpacked_weights"
_FLOATS = (
    "tests/unit/kernels/test_cpu_kernels.py::"
    "test_a_row_of_a_product_is_the_same_beside_others_to_the_bit"
)
_STEP = "tests/matrix/test_compiled_step.py::test_a_long_prompt_is_computed_group_by_group"
# Many rows with weights of 8 bits, of 4, and in planes; and a single row of these.
_KINDS = [f"{_BLOCKS}[compiled-kind{kind}-40]" for kind in (0, 6, 15)]
_KINDS += [f"{_BLOCKS}[compiled-kind{kind}-1]" for kind in (15, 17)]
_STEPS = [f"{_STEP}[config1-False-True]"]
_POINTS = "tests/unit/model/test_grid_blocks.py::test_points_are_looked_up_in_products"
_GRIDS = [f"{_POINTS}[{name}]" for name in ("IQ3_XXS", "IQ2_S", "IQ1_M", "TQ1_0")]


@pytest.mark.parametrize(
    ("level", "needed", "tests"),
    [
        ("x86-64-v3", "avx2", [*_KINDS, f"{_FLOATS}[dtype1]", *_STEPS, *_GRIDS]),
        pytest.param("x86-64-v3+avxvnni", "avxvnni", _KINDS[1:], marks=pytest.mark.matrix),
        pytest.param("x86-64-v2", "sse2", _GRIDS, marks=pytest.mark.matrix),
    ],
)
def test_the_same_tests_pass_without_avx512(level: str, needed: str, tests: list[str]) -> None:
    if not has_feature(needed):
        pytest.skip(f"the processor has no {needed}")
    run_python(_PYTEST, needed, *(f"{ROOT}/{test}" for test in tests), KVCHAT_CPU=level)


def test_a_level_needs_all_features_of_its_code() -> None:
    """A Zen 4, which has AVX-512 and no AVX-VNNI, ended in an illegal instruction."""
    zen4 = LEVELS["x86-64-v3"].needed | {"avx512vnni"}

    assert level("x86-64-v3", zen4).usable >= {"avx2"}
    with pytest.raises(RuntimeError, match="avxvnni, but this processor has no avxvnni"):
        level("x86-64-v3+avxvnni", zen4)
    with pytest.raises(RuntimeError, match="this processor has no avx"):
        level("x86-64-v3", LEVELS["x86-64-v2"].needed)


def test_float16_is_converted_without_instructions_for_it() -> None:
    """LLVM called functions that no one has: Q4_0 was a segmentation fault before AVX and F16C."""
    if not has_feature("sse2"):
        pytest.skip("the processor is no x86")
    run_python(
        """
        import torch
        from llvmlite import ir
        from matrix.test_linear_blocks import random_blocks
        from kvchat_kernels.cpu.code import F16, F32, Kernel
        from kvchat_kernels.cpu.program import Operation
        from kvchat_kernels.cpu.task import Memory, Task
        from kvchat_kernels.linear.blocks import Rounding, dequantised
        from kvchat_kernels.linear.cpu import BlockProduct, rows_of
        from support.cpu_tasks import header, run_units

        class Conversion(Task):
            given: Memory
            result: Memory
            count: int

        def converted(given, instruction, size, kinds, out):
            def write(code):
                of, to = (ir.VectorType(kind, size) if size > 1 else kind for kind in kinds)
                with code.loop(0, code.task.count, size) as at:
                    value = code.load(code.task.given, at * given.itemsize, of)
                    value = code.convert(instruction, value, to)
                    code.store(value, code.task.result, at * out.itemsize)
            kernel = Kernel(f"test {instruction} {size}", Conversion, (), write)
            task = Conversion(given=given, result=out, count=len(given))
            run_units(Operation(kernel, task, header(1), None), 1, 1)
            return out

        def assert_same(found, wanted):
            assert torch.equal(found.isnan(), wanted.isnan())
            there = ~wanted.isnan()
            kind = torch.int16 if found.itemsize == 2 else torch.int32
            assert torch.equal(found[there].view(kind), wanted[there].view(kind))

        torch.manual_seed(0)
        halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
        middles = (halves.float()[1:] + halves.float()[:-1]) / 2
        near = torch.cat([halves.float(), middles, torch.zeros(1)]).view(torch.int32)
        any_bits = torch.randint(-(2**31), 2**31, (1 << 17,), dtype=torch.int64).to(torch.int32)
        floats = torch.cat([near, near + 1, near - 1, any_bits]).view(torch.float32)
        for size in (1, 8):
            found = converted(halves, "fpext", size, (F16, F32), torch.empty(len(halves)))
            assert_same(found, halves.float())
            room = torch.empty(len(floats), dtype=torch.float16)
            assert_same(converted(floats, "fptrunc", size, (F32, F16), room), floats.half())

        weights = random_blocks((17, 96), 4, 32, torch.float16, True)
        rows = rows_of(torch.randn(3, 96), Rounding.BYTES)
        exact = rows.values() @ dequantised(weights).t()
        assert (BlockProduct(weights).of_rows(rows) - exact).norm() <= 1e-5 * exact.norm()
        """,
        KVCHAT_CPU="x86-64-v2",
    )
