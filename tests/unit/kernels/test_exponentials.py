"""Exponentials of 8 floats, and of 16 in their shorter way."""

import math

import pytest
import torch
from llvmlite import ir

from kvchat_kernels.cpu.code import F32, Code, kernel
from kvchat_kernels.cpu.maths import exp
from kvchat_kernels.cpu.program import Operation
from kvchat_kernels.cpu.task import Memory, Task
from support.cpu_tasks import header, run_units


class ExpTask(Task):
    """out[i] = exp(x[i]), float32."""

    x: Memory
    out: Memory


@kernel("exponentials", ExpTask)
def exp_kernel(code: Code, lanes: int) -> None:
    """Units: `lanes` numbers each."""
    offset = code.unit * (lanes * 4)
    numbers = code.load(code.task.x + offset, 0, ir.VectorType(F32, lanes))
    code.store(exp(code, numbers), code.task.out + offset, 0)


def exponentials(x: torch.Tensor, lanes: int) -> torch.Tensor:
    out = torch.full_like(x, 7.0)
    task = ExpTask(x=x, out=out)
    run_units(Operation(exp_kernel(lanes), task, header(1), None), len(x) // lanes, 1)
    return out


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(
    ("start", "end", "most"), [(-1, 1, 2e-7), (-11, -1, 7e-7), (-87, 88, 4e-6)]
)
def test_they_are_as_exact_as_is_said(lanes: int, start: float, end: float, most: float) -> None:
    x = torch.linspace(start, end, 1 << 16)
    exact = x.double().exp()

    out = exponentials(x, lanes)

    assert ((out.double() - exact).abs() / exact).max() <= most


@pytest.mark.parametrize("lanes", [8, 16])
def test_ends_of_their_range(lanes: int) -> None:
    """A number far below is 0, one far above no infinity, and what is no number stays so."""
    low, high = [-math.inf, -1e38, -1e30, -120.0], [88.5, 1e30, math.inf]
    x = torch.tensor([*low, *high, math.nan] * 2)

    out = exponentials(x, lanes).view(2, 8)

    assert not out[:, :4].any()
    assert out[:, 4:7].isfinite().all()
    assert (out[:, 4:7] > 1e38).all()
    assert out[:, 7].isnan().all()
