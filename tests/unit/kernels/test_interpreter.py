"""The interpreting process: kernels run there, on CPU tensors, and fail loudly."""

import pytest
import torch
import triton
import triton.language as tl

from support.interpreter import Interpreter


@triton.jit
def square_kernel(value_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + index, mask=index < size, other=0.0)
    tl.store(value_ptr + index, value * value, mask=index < size)


def square(values: torch.Tensor) -> torch.Tensor:
    square_kernel[(triton.cdiv(values.numel(), 4),)](values, values.numel(), BLOCK=4)
    return values


def broken(values: torch.Tensor) -> torch.Tensor:
    square_kernel[(1,)](values, values.numel(), BLOCK=3)  # not a power of two
    return values


def test_a_kernel_runs_on_cpu_tensors(interpreter: Interpreter) -> None:
    assert interpreter(square, torch.arange(6.0)).tolist() == [0, 1, 4, 9, 16, 25]


def test_what_fails_over_there_fails_here(interpreter: Interpreter) -> None:
    with pytest.raises(Exception, match="power of 2"):
        interpreter(broken, torch.arange(3.0))
    assert interpreter(square, torch.ones(3)).tolist() == [1, 1, 1]


def test_this_process_compiles_and_does_not_interpret() -> None:
    assert isinstance(square_kernel, triton.JITFunction)
