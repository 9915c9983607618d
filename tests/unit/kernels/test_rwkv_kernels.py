"""The compiled steps of RWKV's layers, each against its formula in torch."""

import pytest
import torch

from kvchat_kernels.cpu import rwkv
from kvchat_kernels.cpu.maths import stored_as
from support import recurrent_formulas
from support.cpu_tasks import in_order, of_inputs, run

# The rows of a step's sequences: one row, a prompt, rows of several sequences.
_COUNTS = [[1], [5], [1, 3, 2, 1]]


@pytest.mark.parametrize("counts", _COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_mixes", [2, 3])
@pytest.mark.parametrize("width", [8, 520, 1048])
def test_rows_are_mixed_with_those_before(width, num_mixes, dtype, counts):
    torch.manual_seed(6)
    mixes, newest = torch.rand(num_mixes, width), torch.randn(len(counts), 2, width).to(dtype)
    twin, stored = newest.clone(), stored_as(dtype)
    assert stored is not None
    for _ in range(2):
        x, out = torch.randn(sum(counts), width), torch.zeros(num_mixes, sum(counts), width)
        task = rwkv.ShiftTask(
            width=width,
            mixes=mixes,
            state=width * dtype.itemsize,
            keys=out[0],
            receptances=out[1],
            values=out[2] if num_mixes == 3 else None,
            **of_inputs(x),
        )

        units = rwkv.num_units(width, are_mixed=True)
        run(rwkv.shift_kernel(stored, num_mixes == 3), task, units, list(newest), counts)

        for row, index in enumerate(in_order(counts)):
            expected = recurrent_formulas.mixed_rows(x[row], mixes, twin[index, 1])
            assert torch.allclose(out[:, row], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(newest, twin)


@pytest.mark.parametrize("counts", _COUNTS)
@pytest.mark.parametrize("size", [3.0, 200.0])
@pytest.mark.parametrize("channels", [8, 136, 768])
def test_averages_are_of_all_rows_so_far(channels: int, size: float, counts: list[int]) -> None:
    """From a state of zeros; exponents may be far out of the range of float32."""
    torch.manual_seed(7)
    rates, bonuses = -torch.rand(channels) * 16, torch.randn(channels)
    state = torch.zeros(len(counts), 3, channels)
    past: list[list[torch.Tensor]] = [[] for _ in counts]
    for _ in range(3):
        num_rows = sum(counts)
        inputs, out = torch.randn(num_rows, 2 * channels), torch.zeros(num_rows, channels)
        inputs[:, :channels] *= size
        gates = torch.randn(num_rows, channels)
        task = rwkv.AverageTask(
            gates=gates,
            rates=rates,
            bonuses=bonuses,
            out=out,
            state=0,
            **of_inputs(inputs),
        )

        units = rwkv.num_units(channels)
        run(rwkv.average_kernel(channels), task, units, list(state), counts)

        for row, index in enumerate(in_order(counts)):
            past[index].append(inputs[row].double())
            keys, values = torch.stack(past[index]).chunk(2, dim=1)
            read = recurrent_formulas.averaged(keys, values, rates, bonuses)
            expected = (read * gates[row].sigmoid()).float()
            assert torch.allclose(out[row], expected, rtol=1e-3, atol=1e-4)
