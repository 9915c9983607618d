"""Norms, gates and products with one row: the kernels are as exact as their twins."""

from collections.abc import Callable

import pytest
import torch

from kvchat_kernels.row_operations import (
    add_rms_norm,
    gelu_tanh_mul,
    one_row_linear,
    rms_norm,
    silu_mul,
)
from support.interpreter import Interpreter
from support.row_kernel_checks import (
    check_distant_rows,
    check_gates,
    check_one_row_linear,
    check_rms_norm,
    check_rows_in_any_order,
)

DTYPES = [torch.float32, torch.float16]
SHAPES = [(1,), (1, 1), (3, 63), (0, 8), (2, 3, 257), (5, 1024), (1, 4097)]
# rows, inputs, outputs
PRODUCTS = [(1, 1), (63, 5), (257, 9), (2050, 4)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_alone_and_after_an_addition(interpreter, shape, dtype, offset):
    interpreter(check_rms_norm, shape, dtype, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates(interpreter: Interpreter, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    interpreter(check_gates, shape, dtype)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_products_with_one_row(interpreter, sizes, dtype, has_bias):
    interpreter(check_one_row_linear, sizes, dtype, has_bias)


def test_rows_may_lie_in_any_order(interpreter: Interpreter) -> None:
    interpreter(check_rows_in_any_order)


def test_rows_beyond_the_reach_of_32_bits_are_found(interpreter: Interpreter) -> None:
    interpreter(check_distant_rows)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: rms_norm(torch.randn(2, 8), torch.ones(7), 1e-6),
        lambda: add_rms_norm(torch.randn(2, 8), torch.randn(2, 9), torch.ones(8), 1e-6),
        lambda: silu_mul(torch.randn(2, 8), torch.randn(2, 7)),
        lambda: gelu_tanh_mul(torch.randn(8), torch.randn(8).half()),
        lambda: one_row_linear(torch.randn(2, 8), torch.randn(3, 8)),
        lambda: one_row_linear(torch.randn(1, 8), torch.randn(3, 9)),
    ],
    ids=["weights", "residual", "gate", "dtypes", "too many rows", "inputs"],
)
def test_operands_that_do_not_fit_are_refused(broken: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        broken()
