"""Tests of kernels and of compiled steps again, with code for processors without AVX-512.

Most users have such a one. Prompts were changed where vectors have 512 bits, and measured nowhere
else: there they took up to 2.4 times as long as llama.cpp's.
"""

import pytest

from kvchat_kernels.cpu.code import has_feature
from support.other_process import ROOT, run_python

_PYTEST = """
import sys, pytest
from kvchat_kernels.cpu.code import has_feature, multiplies_many
assert has_feature("avx2") and not has_feature("avx512f") and multiplies_many()
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
_BLOCKS = "tests/kernels/test_linear_blocks.py::test_products_are_those_of_the_unpacked_weights"
_FLOATS = (
    "tests/kernels/test_cpu_kernels.py::"
    "test_a_row_of_a_product_is_the_same_beside_others_to_the_bit"
)
_STEP = (
    "tests/model/test_compiled_step.py::"
    "test_a_long_prompt_is_computed_group_by_group_where_that_is_faster"
)
# Many rows with weights of 8 bits, and of 4 with minimums and without.
_KINDS = [f"{_BLOCKS}[compiled-kind{kind}-40]" for kind in (0, 4, 6)]
_STEPS = [f"{_STEP}[{case}]" for case in ("config0-True-True-True", "config2-True-False-True")]


@pytest.mark.parametrize(
    ("level", "needed", "tests"),
    [
        ("x86-64-v3", "avx2", [*_KINDS, f"{_FLOATS}[dtype1]", *_STEPS]),
        ("x86-64-v3+avxvnni", "avxvnni", _KINDS[::2]),
    ],
)
def test_the_same_tests_pass_without_avx512(level: str, needed: str, tests: list[str]) -> None:
    if not has_feature(needed):
        pytest.skip(f"the processor has no {needed}")
    run_python(_PYTEST, *(f"{ROOT}/{test}" for test in tests), KVCHAT_CPU=level)
