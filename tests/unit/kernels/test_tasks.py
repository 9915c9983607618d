"""Tasks of compiled kernels: fields by name, in place of numbered places that two sides counted."""

import pytest
import torch

from kvchat_kernels.cpu.code import F32, Code, Kernel
from kvchat_kernels.cpu.program import Operation
from kvchat_kernels.cpu.task import Memory, Task
from support.cpu_tasks import header, run_units


class ScalingTask(Task):
    """`out` is `x` times `factor`, `count` floats each."""

    x: Memory
    count: int
    factor: float = 1.0
    bias: Memory | None = None
    out: Memory


class LongerTask(ScalingTask):
    """The same, with a field that another kernel reads."""

    rest: int


def scaling_kernel() -> Kernel[ScalingTask]:
    def write(code: Code) -> None:
        with code.loop(0, code.task.count) as index:
            value = code.load(code.task.x, index * 4, F32) * code.task.factor
            code.store(value, code.task.out, index * 4)

    return Kernel("scaling for a test", ScalingTask, (), write)


def test_a_kernel_reads_the_fields_that_its_task_has() -> None:
    x, out = torch.arange(5.0), torch.zeros(6)
    for task in (
        ScalingTask(x=x, count=5, factor=0.5, out=out),
        LongerTask(x=x, count=5, factor=0.5, out=out, rest=7),
    ):
        out.zero_()

        run_units(Operation(scaling_kernel(), task, header(1), None), 1, 1)

        assert torch.equal(out, torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 0.0]))


def test_a_number_may_be_changed_between_runs() -> None:
    """As a step changes where its logits go."""
    x, out, other = torch.ones(2), torch.zeros(2), torch.zeros(2)
    task = ScalingTask(x=x, count=2, factor=3.0, out=out)
    operation = Operation(scaling_kernel(), task, header(1), None)

    task.number("out")[:] = other.data_ptr()
    run_units(operation, 1, 1)

    assert (out.tolist(), other.tolist()) == ([0.0, 0.0], [3.0, 3.0])


def test_a_task_of_another_kernel_is_refused_before_it_runs() -> None:
    class OtherTask(Task):
        x: Memory

    with pytest.raises(AssertionError, match="scaling"):
        Operation(scaling_kernel(), OtherTask(x=torch.zeros(1)), header(1), None)


def test_a_task_without_a_value_that_its_kernel_needs_is_refused() -> None:
    with pytest.raises(TypeError, match="out"):
        ScalingTask(x=torch.zeros(1), count=1)  # type: ignore[call-arg]


def test_a_field_does_not_hide_what_a_task_can_do() -> None:
    with pytest.raises(AssertionError, match="hide"):

        class BrokenTask(Task):
            numbers: int  # type: ignore[assignment]
