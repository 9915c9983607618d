"""The compiled steps of layers with a state, each against its formula in torch."""

from typing import Any

import pytest
import torch

from kvchat_kernels.cpu import (
    convolution,
    delta,
    delta_rows,
    gates,
    mamba,
    mamba_rows,
    selective,
)
from kvchat_kernels.cpu.convolution import ConvolutionForm
from kvchat_kernels.cpu.maths import stored_as
from kvchat_kernels.cpu.program import Operation, Program
from kvchat_kernels.cpu.step import Header, OfSequence, guesses_kernel
from support import recurrent_formulas
from support.cpu_tasks import header, in_order, of_inputs, run, run_units, sequences

# The rows of a step's sequences: one row, a prompt, rows of several sequences.
_COUNTS = [[1], [5], [1, 3, 2, 1]]


@pytest.mark.parametrize("counts", _COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_taps", [2, 3, 4, 5])
@pytest.mark.parametrize("channels", [8, 24, 1048])
def test_a_convolution_is_the_sum_of_the_last_inputs(channels, num_taps, dtype, counts):
    """Three steps, so that what a step keeps is what the next one reads."""
    torch.manual_seed(0)
    weights = torch.randn(num_taps, channels)
    # Before and behind each state lies what must not change.
    whole = torch.randn(len(counts), channels + 2, num_taps).to(dtype)
    twin, before = whole.clone(), whole.clone()
    stored = stored_as(dtype)
    assert stored is not None
    form = ConvolutionForm(num_taps, stored, has_bias=False, is_activated=True, is_gated=False)
    units = -(-channels // convolution.UNIT_CHANNELS)
    for _ in range(3):
        wide = 3 * torch.randn(sum(counts), channels + 5)
        x = wide[:, :channels]  # rows have a gap between them
        expected = torch.stack(
            [
                recurrent_formulas.convolved(row, weights, twin[index, 1:-1])
                for row, index in zip(x, in_order(counts), strict=True)
            ]
        )
        task = convolution.ConvolutionTask(
            x=x,
            weights=weights,
            channels=channels,
            state=num_taps * dtype.itemsize,
            out=x,
            out_stride=x.stride(0) * 4,
            **of_inputs(x),
        )
        gap = wide[:, channels:].clone()

        run(convolution.convolution_kernel(form), task, units, list(whole), counts)

        assert torch.allclose(x, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(whole, twin)
        assert torch.equal(wide[:, channels:], gap)
    assert torch.equal(whole[:, [0, -1]], before[:, [0, -1]])


@pytest.mark.parametrize("counts", _COUNTS)
@pytest.mark.parametrize("is_activated", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_convolution_may_have_a_bias_and_gates(is_gated, is_activated, counts):
    torch.manual_seed(1)
    channels, num_taps, num_rows = 48, 3, sum(counts)
    weights, bias = torch.randn(num_taps, channels), torch.randn(channels)
    state, x = torch.randn(len(counts), channels, num_taps), torch.randn(num_rows, 3, channels)
    twin, out = state.clone(), torch.zeros(num_rows, channels)
    stored = stored_as(torch.float32)
    assert stored is not None
    form = ConvolutionForm(num_taps, stored, True, is_activated, is_gated)
    task = convolution.ConvolutionTask(
        x=x,
        weights=weights,
        bias=bias,
        channels=channels,
        state=0,
        out=out,
        out_stride=out.stride(0) * 4,
        **of_inputs(x),
    )

    run(convolution.convolution_kernel(form), task, 1, list(state), counts)

    for row, index in enumerate(in_order(counts)):
        factor, of_sum, inputs = x[row]
        expected = recurrent_formulas.convolved(
            factor * inputs if is_gated else factor,
            weights,
            twin[index],
            bias=bias,
            is_activated=is_activated,
        )
        expected = expected * of_sum if is_gated else expected
        assert torch.allclose(out[row], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, twin)


@pytest.mark.parametrize("width", [1, 7, 2048, 5000])
def test_numbers_are_put_in_another_order(width: int) -> None:
    torch.manual_seed(2)
    x, out = torch.randn(3, width + 2), torch.zeros(3, width + 1)
    order = torch.randperm(width).int()
    task = delta.OrderingTask(
        x=x,
        x_stride=4 * (width + 2),
        source=order,
        width=width,
        out=out,
        out_stride=4 * (width + 1),
    )

    run(delta.ordering_kernel(), task, 3, counts=[1, 1, 1])

    assert torch.equal(out[:, :-1], x[:, order.long()])
    assert not out[:, -1].any()


@pytest.mark.parametrize("counts", _COUNTS)
@pytest.mark.parametrize(
    ("num_heads", "num_key_heads", "key_dim", "value_dim"),
    [(1, 1, 8, 8), (4, 2, 16, 24), (3, 3, 24, 32), (16, 16, 128, 128), (8, 2, 64, 128)],
)
def test_a_step_of_the_state_is_the_formula(num_heads, num_key_heads, key_dim, value_dim, counts):
    torch.manual_seed(1)
    form = delta.DeltaForm(num_heads, num_key_heads, key_dim, value_dim)
    keys, values, num_rows = num_key_heads * key_dim, num_heads * value_dim, sum(counts)
    state = torch.randn(len(counts), num_heads, key_dim, value_dim)
    twin, out = state.clone(), torch.zeros(num_rows, num_heads, value_dim)
    # Steps far below and above zero, decays from nearly 1 to nearly 0.
    rates, bias = -torch.rand(num_heads) * 16, torch.linspace(-12, 12, num_heads)
    weight, epsilon = torch.randn(value_dim), 1e-6
    for _ in range(2):
        inputs = torch.randn(num_rows, 2 * keys + 2 * values + 2 * num_heads)
        mixed, gates, betas, steps = inputs.split(
            (2 * keys + values, values, num_heads, num_heads), dim=1
        )
        task = delta.DeltaTask(
            mixed=mixed,
            gates=gates,
            betas=betas,
            steps=steps,
            step_bias=bias,
            rates=rates,
            norm=weight,
            epsilon=epsilon,
            out=out,
            state=0,
            **of_inputs(inputs),
        )

        run(delta.delta_kernel(form), task, num_heads, list(state), counts)

        for row, index in enumerate(in_order(counts)):
            query, key, value = mixed[row].split((keys, keys, values))
            read = recurrent_formulas.delta_step(
                query.view(num_key_heads, key_dim),
                key.view(num_key_heads, key_dim),
                value.view(num_heads, value_dim),
                rates * torch.nn.functional.softplus(steps[row] + bias),
                betas[row].sigmoid(),
                twin[index],
            )
            gate = gates[row].view(num_heads, value_dim)
            expected = recurrent_formulas.gated_norm(read, gate, weight, epsilon)
            assert torch.allclose(out[row], expected, rtol=1e-3, atol=1e-3)
        assert torch.allclose(state, twin, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("counts", _COUNTS)
@pytest.mark.parametrize(
    ("num_heads", "num_groups", "head_dim", "state_size"),
    [(1, 1, 8, 8), (4, 2, 16, 24), (6, 3, 24, 16), (16, 1, 64, 128), (8, 8, 32, 256)],
)
def test_a_step_of_mamba_is_the_formula(num_heads, num_groups, head_dim, state_size, counts):
    torch.manual_seed(3)
    form = mamba.MambaForm(num_heads, num_groups, head_dim, state_size)
    width, of_groups, num_rows = num_heads * head_dim, num_groups * state_size, sum(counts)
    state = torch.randn(len(counts), num_heads, head_dim, state_size)
    twin, out = state.clone(), torch.zeros(num_rows, num_groups, width // num_groups)
    rates, bias = -torch.rand(num_heads) * 16, torch.linspace(-12, 4, num_heads)
    skips, weight, epsilon = torch.randn(num_heads), torch.randn_like(out[0]), 1e-5
    for _ in range(2):
        inputs = torch.randn(num_rows, 2 * width + 2 * of_groups + num_heads)
        gates, mixed, steps = inputs.split((width, width + 2 * of_groups, num_heads), dim=1)
        task = mamba.MambaTask(
            mixed=mixed,
            gates=gates,
            steps=steps,
            step_bias=bias,
            rates=rates,
            skips=skips,
            out=out,
            state=0,
            **of_inputs(inputs),
        )

        run(mamba.mamba_kernel(form), task, num_heads, list(state), counts)

        for row, index in enumerate(in_order(counts)):
            x, b, c = mixed[row].split((width, of_groups, of_groups))
            read = recurrent_formulas.mamba_step(
                x.view(num_heads, head_dim),
                b.view(num_groups, state_size),
                c.view(num_groups, state_size),
                torch.nn.functional.softplus(steps[row] + bias),
                rates,
                skips,
                twin[index],
            )
            expected = read.flatten() * torch.nn.functional.silu(gates[row])
            assert torch.allclose(out[row].flatten(), expected, rtol=1e-3, atol=1e-3)
        assert torch.allclose(state, twin, rtol=1e-4, atol=1e-4)
    task = mamba.GroupNormTask(
        x=out, weight=weight, width=out.shape[2], epsilon=epsilon, num_groups=num_groups
    )
    normed = recurrent_formulas.group_norm(out, weight, epsilon)

    run(mamba.group_norm_kernel(), task, num_rows, counts=counts)

    assert torch.allclose(out, normed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", _COUNTS)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("channels", "size", "rank", "width"),
    [(8, 8, 8, 32), (200, 24, 40, 64), (1536, 16, 48, 64), (64, 128, 32, 32)],
)
def test_a_step_of_mamba_1_is_the_formula(channels, size, rank, width, is_normed, counts):
    torch.manual_seed(5)
    form = selective.SelectiveForm(channels, size, rank)
    num_rows, epsilon = sum(counts), 1e-5
    state, out = torch.randn(len(counts), channels, size), torch.zeros(num_rows, channels + 3)
    twin, weight = state.clone(), torch.randn(rank + 2 * size)
    # Steps far below and above zero, decays from nearly 1 to nearly 0.
    rates, skips = -torch.rand(channels, size) * 16, torch.randn(channels)
    for _ in range(2):
        wide, both = torch.randn(num_rows, channels + 5), torch.randn(num_rows, 2 * channels)
        x = wide[:, 5:]
        parts, latents = torch.randn(num_rows, rank + 2 * size), torch.zeros(num_rows, width)
        inputs = torch.full((num_rows, 2 * (channels + size)), 7.0)
        joining = selective.SelectiveInputsTask(
            x=x,
            x_stride=x.stride(0) * 4,
            parts=parts,
            weight=weight,
            epsilon=epsilon,
            latents=latents,
            latents_width=width,
            inputs=inputs,
        )

        run(selective.selective_inputs_kernel(form, is_normed), joining, num_rows, counts=counts)

        pieces = parts.split((rank, size, size), dim=1)
        if is_normed:
            pieces = [
                recurrent_formulas.group_norm(piece, of_piece, epsilon)
                for piece, of_piece in zip(pieces, weight.split((rank, size, size)), strict=True)
            ]
        assert torch.allclose(latents[:, :rank], pieces[0], rtol=1e-5, atol=1e-6)
        assert not latents[:, rank:].any()
        assert bool((inputs[:, channels : 2 * channels] == 7.0).all()), "of the steps' product"
        inputs[:, channels : 2 * channels] = 6 * torch.randn(num_rows, channels)
        task = selective.SelectiveTask(
            gates=both[:, channels:],
            gates_stride=both.stride(0) * 4,
            rates=rates,
            skips=skips,
            out=out,
            out_stride=out.stride(0) * 4,
            state=0,
            **of_inputs(inputs),
        )

        units = selective.num_units(form)
        run(selective.selective_kernel(form), task, units, list(state), counts)

        for row, index in enumerate(in_order(counts)):
            steps = torch.nn.functional.softplus(inputs[row, channels : 2 * channels])
            read = recurrent_formulas.selective_step(
                x[row], pieces[1][row], pieces[2][row], steps, rates, skips, twin[index]
            )
            expected = read * torch.nn.functional.silu(both[row, channels:])
            assert torch.allclose(out[row, :channels], expected, rtol=1e-3, atol=1e-3)
        assert not out[:, channels:].any()
        assert torch.allclose(state, twin, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_heads", "dim"), [(1, 8), (3, 24), (8, 256)])
def test_heads_are_gated_one_by_one(num_heads: int, dim: int) -> None:
    torch.manual_seed(2)
    both = torch.randn(2, num_heads, 2, dim)
    out = torch.zeros(2, num_heads * dim + 5)
    task = gates.HeadsTask(
        both=both, out=out, out_stride=out.stride(0) * 4, num_heads=num_heads, dim=dim
    )

    run_units(Operation(gates.heads_kernel(is_gate=False), task, header(2), None), 2, 1)
    assert torch.equal(out[:, :-5], both[:, :, 0].flatten(1))
    run_units(Operation(gates.heads_kernel(is_gate=True), task, header(2), None), 2, 1)

    expected = both[:, :, 0] * both[:, :, 1].sigmoid()
    assert torch.allclose(out[:, :-5], expected.flatten(1), rtol=1e-5, atol=1e-6)
    assert not out[:, -5:].any()


@pytest.mark.parametrize("num_rows", [1, 2, 37])
@pytest.mark.parametrize(
    "heads",
    [delta.DeltaForm(1, 1, 8, 8), delta.DeltaForm(4, 2, 16, 24), delta.DeltaForm(6, 2, 64, 128)],
)
def test_rows_of_a_delta_net_are_its_steps_one_after_another(heads, num_rows):
    torch.manual_seed(4)
    form = delta_rows.RowsForm(heads, num_taps=4)
    channels, width = form.num_channels, heads.num_heads * heads.value_dim
    inputs, weights = torch.randn(num_rows, channels), torch.randn(4, channels)
    past, state = (
        torch.randn(4, channels),
        torch.randn(heads.num_heads, heads.key_dim, heads.value_dim),
    )
    gates, out = torch.randn(num_rows, width), torch.zeros(num_rows, width)
    betas, steps = torch.randn(2, num_rows, heads.num_heads).unbind()
    rates, bias = -torch.rand(heads.num_heads) * 16, torch.linspace(-6, 2, heads.num_heads)
    norm, epsilon = torch.randn(heads.value_dim), 1e-6
    expected, twin, twin_past = [], state.clone(), past.T.clone()
    keys = heads.num_key_heads * heads.key_dim
    for row in range(num_rows):
        mixed = recurrent_formulas.convolved(inputs[row], weights, twin_past)
        query, key, value = mixed.split((keys, keys, width))
        read = recurrent_formulas.delta_step(
            query.view(-1, heads.key_dim),
            key.view(-1, heads.key_dim),
            value.view(-1, heads.value_dim),
            rates * torch.nn.functional.softplus(steps[row] + bias),
            betas[row].sigmoid(),
            twin,
        )
        gate = gates[row].view(-1, heads.value_dim)
        expected.append(recurrent_formulas.gated_norm(read, gate, norm, epsilon).flatten())
    task = delta_rows.DeltaRowsTask(
        x=torch.cat((past[1:], inputs)),
        weights=weights,
        mixed=torch.zeros(num_rows, channels),
        steps=steps.clone(),
        betas=betas.clone(),
        step_bias=bias,
        rates=rates,
        state=state,
        gates=gates,
        norm=norm,
        epsilon=epsilon,
        out=out,
    )

    for kernel, units in (
        (delta_rows.inputs_kernel(form), num_rows),
        (delta_rows.steps_kernel(form), form.num_units),
        (delta_rows.outputs_kernel(form), num_rows),
    ):
        run_units(Operation(kernel, task, header(num_rows), None), units, 2)

    assert torch.allclose(state, twin, rtol=1e-3, atol=1e-4)
    assert torch.allclose(out, torch.stack(expected), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 37])
@pytest.mark.parametrize(
    "sizes",
    [mamba.MambaForm(1, 1, 8, 8), mamba.MambaForm(4, 2, 24, 16), mamba.MambaForm(6, 3, 64, 128)],
)
def test_rows_of_mamba_are_its_steps_one_after_another(sizes, num_rows, has_bias):
    torch.manual_seed(5)
    form = mamba_rows.RowsForm(sizes, 4, has_bias)
    channels, width = form.num_channels, sizes.num_heads * sizes.head_dim
    inputs, weights = torch.randn(num_rows, channels), torch.randn(4, channels)
    bias = torch.randn(channels) if has_bias else None
    past = torch.randn(4, channels)
    state = torch.randn(sizes.num_heads, sizes.head_dim, sizes.state_size)
    gates, out = torch.randn(num_rows, width), torch.zeros(num_rows, width)
    steps, skips = torch.randn(num_rows, sizes.num_heads), torch.randn(sizes.num_heads)
    rates, step_bias = -torch.rand(sizes.num_heads) * 16, torch.linspace(-6, 2, sizes.num_heads)
    norm, epsilon = torch.randn(sizes.num_groups, width // sizes.num_groups), 1e-5
    expected, twin, twin_past = [], state.clone(), past.T.clone()
    of_groups = sizes.num_groups * sizes.state_size
    for row in range(num_rows):
        mixed = recurrent_formulas.convolved(inputs[row], weights, twin_past, bias=bias)
        x, b, c = mixed.split((width, of_groups, of_groups))
        step = torch.nn.functional.softplus(steps[row] + step_bias).clamp(0.01, 1.5)
        read = recurrent_formulas.mamba_step(
            x.view(sizes.num_heads, -1),
            b.view(sizes.num_groups, -1),
            c.view(sizes.num_groups, -1),
            step,
            rates,
            skips,
            twin,
        )
        gated = read.flatten() * torch.nn.functional.silu(gates[row])
        normed = recurrent_formulas.group_norm(gated.view_as(norm), norm, epsilon)
        expected.append(normed.flatten())
    task = mamba_rows.MambaRowsTask(
        x=torch.cat((past[1:], inputs)),
        weights=weights,
        bias=bias,
        mixed=torch.zeros(num_rows, channels),
        steps=steps.clone(),
        decays=torch.zeros_like(steps),
        step_bias=step_bias,
        rates=rates,
        skips=skips,
        least=0.01,
        most=1.5,
        state=state,
        gates=gates,
        norm=norm,
        epsilon=epsilon,
        out=out,
    )

    for kernel, units in (
        (mamba_rows.inputs_kernel(form), num_rows),
        (mamba_rows.steps_kernel(form), form.num_units),
        (mamba_rows.norms_kernel(form), num_rows),
    ):
        run_units(Operation(kernel, task, header(num_rows), None), units, 2)

    assert torch.allclose(state, twin, rtol=1e-3, atol=1e-4)
    assert torch.allclose(out, torch.stack(expected), rtol=1e-2, atol=1e-3)


class Guessing:
    """A layer's kernels over one sequence, whose steps may end with guesses."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(5)
        heads, dim = 3, 16
        of_heads, of_dim = torch.randn(heads), torch.randn(dim)
        self.out = torch.zeros(8, heads * dim)
        steps: dict[str, Any] = {"step_bias": of_heads, "rates": -of_heads.abs(), "out": self.out}
        if kind == "delta":
            delta_form = delta.DeltaForm(heads, heads, dim, dim)
            self.kernel: Any = delta.delta_kernel(delta_form)
            self.sizes, self.state = (3 * heads * dim, heads * dim, 3, 3), (heads, dim, dim)
            names, task = ("mixed", "gates", "betas", "steps"), delta.DeltaTask
            steps |= {"norm": of_dim, "epsilon": 1e-6}
            self.units = heads
        elif kind == "mamba":
            mamba_form = mamba.MambaForm(heads, 1, dim, 24)
            self.kernel = mamba.mamba_kernel(mamba_form)
            self.sizes, self.state = (heads * dim, heads * dim + 48, 3), (heads, dim, 24)
            names, task = ("gates", "mixed", "steps"), mamba.MambaTask
            steps["skips"] = of_heads
            self.units = heads
        else:
            stored, is_gated = stored_as(torch.bfloat16), kind == "gated convolution"
            assert stored is not None
            form = ConvolutionForm(4, stored, has_bias=False, is_activated=True, is_gated=is_gated)
            self.kernel = convolution.convolution_kernel(form)
            width = heads * dim
            self.sizes, self.state, self.units = (width * (3 if is_gated else 1),), (width, 2), 1
            names, task = ("x",), convolution.ConvolutionTask
            steps = {"out": self.out, "out_stride": width * 4, "channels": width}
            steps["weights"] = torch.randn(4, width)
        width = sum(self.sizes)
        self.width, self.inputs = width, torch.zeros(8, width)
        self.task = task(
            **dict(zip(names, self.inputs.split(self.sizes, dim=1), strict=True)),
            **steps,
            state=0,
            inputs=self.inputs,
            stride=width * 4,
            place=64,
        )

    def run(self, state: torch.Tensor, rows: torch.Tensor, **of_sequence: int) -> torch.Tensor:
        """Run rows; return what they read."""
        self.inputs[: len(rows)] = rows
        numbers, named = header(len(rows)), sequences([state], [len(rows)])
        numbers[Header.SEQUENCES], numbers[Header.GUESS_BYTES] = named.ctypes.data, self.width * 8
        for place, number in of_sequence.items():
            named[0, OfSequence[place]] = number
        kernels = ((guesses_kernel(self.width), 1), (self.kernel, self.units))
        program = Program([Operation(k, self.task, numbers, units) for k, units in kernels])
        program.prepare()
        program.run(2)
        return self.out[: len(rows)].clone()


@pytest.mark.parametrize("kind", ["delta", "mamba", "convolution", "gated convolution"])
def test_a_state_reads_guesses_once_they_are_right(kind: str) -> None:
    """To the bit as rows that run one by one: three guesses, one, and none."""
    layer = Guessing(kind)
    rows, states, outs = torch.randn(5, layer.width), [torch.randn(layer.state)], []
    for row in rows:
        states.append(states[-1].clone())
        outs.append(layer.run(states[-1], row[None])[0])
    state = states[0].clone()
    one, other = (torch.zeros(8, 2 * layer.width) for _ in range(2))

    out = layer.run(state, rows[:4], NUM_SURE=1, GUESSES=one.data_ptr())
    assert torch.equal(out, torch.stack(outs[:4]))
    assert torch.equal(state, states[1])

    right = {"RIGHT": one.data_ptr(), "NUM_RIGHT": 2}  # the third guess was wrong
    out = layer.run(state, rows[3:], NUM_SURE=1, GUESSES=other.data_ptr(), **right)
    assert torch.equal(out, torch.stack(outs[3:]))
    assert torch.equal(state, states[4])

    layer.run(state, rows[:0], RIGHT=other.data_ptr(), NUM_RIGHT=1)
    assert torch.equal(state, states[5])
