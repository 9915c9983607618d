"""The compiled step of gated delta nets against the formulas in torch."""

import numpy as np
import pytest
import torch

from kvchat_kernels.cpu import delta, delta_reference, gates
from kvchat_kernels.cpu.maths import stored_as
from kvchat_kernels.cpu.program import Operation, run_units
from kvchat_kernels.cpu.step import Header
from support.cpu_tasks import header, task


def header_with(state: torch.Tensor) -> np.ndarray:
    numbers = header(1)
    numbers[Header.STATE] = state.data_ptr()
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [8, 24, 512, 1048])
def test_a_convolution_is_the_sum_of_the_last_inputs(channels: int, dtype: torch.dtype) -> None:
    """Three steps, so that what a step keeps is what the next one reads."""
    torch.manual_seed(0)
    weights = torch.randn(channels, delta.TAPS)
    # Before and behind it lies what must not change.
    whole = torch.randn(channels + 2, delta.TAPS).to(dtype)
    twin, before = whole.clone(), whole.clone()
    kernel = delta.convolution_kernel(stored_as(dtype))  # type: ignore[arg-type]
    units = -(-channels // delta.UNIT_CHANNELS)
    for _ in range(3):
        x = 3 * torch.randn(channels)
        expected = delta_reference.convolved(x, weights, twin[1:-1])
        place = delta.ConvolutionPlace
        places = {
            place.X: x,
            place.WEIGHTS: weights,
            place.CHANNELS: channels,
            place.STATE: delta.TAPS * dtype.itemsize,
        }

        run_units(Operation(kernel, task(places), header_with(whole), None), units, 2)

        assert torch.allclose(x, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(whole, twin)
    assert torch.equal(whole[[0, -1]], before[[0, -1]])


@pytest.mark.parametrize(
    ("num_heads", "num_key_heads", "key_dim", "value_dim"),
    [(1, 1, 8, 8), (4, 2, 16, 24), (3, 3, 24, 32), (16, 16, 128, 128), (8, 2, 64, 128)],
)
def test_a_step_of_the_state_is_the_formula(
    num_heads: int, num_key_heads: int, key_dim: int, value_dim: int
) -> None:
    torch.manual_seed(1)
    form = delta.DeltaForm(num_heads, num_key_heads, key_dim, value_dim)
    state = torch.randn(num_heads, key_dim, value_dim)
    twin, out = state.clone(), torch.zeros(num_heads, value_dim)
    # Steps far below and above zero, decays from nearly 1 to nearly 0.
    rates, bias = -torch.rand(num_heads) * 16, torch.linspace(-12, 12, num_heads)
    weight, epsilon = torch.randn(value_dim), 1e-6
    for _ in range(3):
        query, key = torch.randn(2, num_key_heads, key_dim).unbind()
        value, gate = torch.randn(2, num_heads, value_dim).unbind()
        betas, steps = torch.randn(2, num_heads).unbind()
        mixed = torch.cat((query.flatten(), key.flatten(), value.flatten()))
        place = delta.DeltaPlace
        places = {
            place.MIXED: mixed,
            place.GATES: gate,
            place.BETAS: betas,
            place.STEPS: steps,
            place.STEP_BIAS: bias,
            place.RATES: rates,
            place.NORM: weight,
            place.EPSILON: epsilon,
            place.OUT: out,
            place.STATE: 0,
        }

        operation = Operation(delta.delta_kernel(form), task(places), header_with(state), None)
        run_units(operation, num_heads, 2)

        log_decay = rates * torch.nn.functional.softplus(steps + bias)
        read = delta_reference.delta_step(query, key, value, log_decay, betas.sigmoid(), twin)
        expected = delta_reference.gated_norm(read, gate, weight, epsilon)
        assert torch.allclose(state, twin, rtol=1e-4, atol=1e-5)
        assert torch.allclose(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("num_heads", "dim"), [(1, 8), (3, 24), (8, 256)])
def test_heads_are_gated_one_by_one(num_heads: int, dim: int) -> None:
    torch.manual_seed(2)
    both = torch.randn(2, num_heads, 2, dim)
    out = torch.zeros(2, num_heads * dim + 5)
    place = gates.HeadPlace
    places = {
        place.BOTH: both,
        place.OUT: out,
        place.OUT_STRIDE: out.stride(0) * 4,
        place.NUM_HEADS: num_heads,
        place.DIM: dim,
    }

    run_units(Operation(gates.queries_kernel(), task(places), header(2), None), 2, 1)
    assert torch.equal(out[:, :-5], both[:, :, 0].flatten(1))
    run_units(Operation(gates.head_gate_kernel(), task(places), header(2), None), 2, 1)

    expected = both[:, :, 0] * both[:, :, 1].sigmoid()
    assert torch.allclose(out[:, :-5], expected.flatten(1), rtol=1e-5, atol=1e-6)
    assert not out[:, -5:].any()
