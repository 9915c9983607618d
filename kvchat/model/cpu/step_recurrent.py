"""Layers with a state in a step's program: delta nets, Mamba 1 and 2, short convolutions, RWKV.

Operations of each are: products of the inputs, what keeps those of guesses, the convolution, the
step of the state with its gate and norm, where there is one, and output. Qwen3-Next has the parts
of each key head side by side; one more puts them in order. RWKV's mix their input with the row
before in place of a convolution.

A state never reads a guess: it reads its inputs in the next step, if the guess was right.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from kvchat.model.cpu.step_experts import add_mlp
from kvchat.model.cpu.step_operations import Activations, StepOperations, Unfit, check_widths
from kvchat.model.decoder.decoder import Mlp
from kvchat.model.decoder.matrices import LowRank, Matrix, Norm
from kvchat.model.decoder.recurrent import (
    ChannelMixing,
    Convolution,
    DeltaNet,
    Mamba,
    Recurrent,
    SelectiveHead,
    SelectiveScan,
    ShortConvolution,
    TimeMixing,
)
from kvchat.model.spec import StateTensor
from kvchat.model.state import CONV, OWN, RECURRENT, state_offsets
from kvchat_kernels.cpu import convolution, delta, gates, mamba, rwkv, selective
from kvchat_kernels.cpu.convolution import ConvolutionForm, ConvolutionTask
from kvchat_kernels.cpu.delta import DeltaTask
from kvchat_kernels.cpu.gates import Activation, SideTask
from kvchat_kernels.cpu.mamba import GroupNormTask, MambaTask
from kvchat_kernels.cpu.maths import stored_as
from kvchat_kernels.cpu.rwkv import AverageTask, ShiftTask
from kvchat_kernels.cpu.selective import SelectiveInputsTask, SelectiveTask
from kvchat_kernels.cpu.step import Header, InputsTask, guesses_kernel


class RecurrentLayers:
    """Adds the operations of a model's layers with a state; `tensors` and `dtype` are the model's.

    Sizes, and states, that no kernel takes raise Unfit.
    """

    def __init__(
        self, operations: StepOperations, tensors: tuple[StateTensor, ...], dtype: torch.dtype
    ) -> None:
        self._operations = operations
        offsets = state_offsets(tensors, dtype)
        self._places = {
            (tensor.layer, tensor.kind, tensor.index): (tensor.shape, offset, tensor.dtype or dtype)
            for tensor, offset in zip(tensors, offsets, strict=True)
        }

    def add(
        self, part: Recurrent, source: Activations, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Add a layer of `values` [rows, hidden], rounded into `source`; it writes `out`."""
        if isinstance(part, ChannelMixing):
            self._channel_mixing(part, values, out)
            return
        if isinstance(part, DeltaNet):
            read = self._delta_net(part, source, values)
        elif isinstance(part, Mamba):
            read = self._mamba(part, source, values)
        elif isinstance(part, SelectiveScan):
            read = self._selective_scan(part, source, values)
        elif isinstance(part, TimeMixing):
            read = self._time_mixing(part, values)
        else:
            read = self._short_convolution(part, source, values)
        self._operations.products((part.out,), read, read.floats, out)

    def _delta_net(self, part: DeltaNet, source: Activations, values: torch.Tensor) -> Activations:
        form, operations = part.form, self._operations
        check_widths(form.key_dim, form.value_dim)
        width = form.num_heads * form.value_dim
        num_steps = form.num_heads * (form.key_dim if form.decays_channels else 1)
        sizes = (part.convolution.num_channels, width, form.num_heads, num_steps)
        inputs = self._inputs("delta inputs", part.inputs, sum(sizes), source, values)
        if part.order is not None:
            ordered = operations.output("ordered delta inputs", sum(sizes))
            operations.reorder(inputs, part.order, ordered)
            inputs = ordered
        mixed, gates, betas, steps = inputs.split(sizes, dim=1)
        of_inputs = self._of_inputs(inputs)
        self._convolution(part.convolution, part.layer, of_inputs, mixed, mixed)
        read = operations.input("delta heads", width)
        task = DeltaTask(
            **of_inputs,
            mixed=mixed,
            gates=gates,
            betas=betas,
            steps=steps,
            step_bias=part.step_bias,
            rates=part.rates,
            norm=part.norm.weight,
            epsilon=part.norm.epsilon,
            out=read.floats,
            state=self._state(part.layer, (form.num_heads, form.key_dim, form.value_dim)),
        )
        operations.add_of_sequences(delta.delta_kernel(form), task, form.num_heads)
        return read

    def _mamba(self, part: Mamba, source: Activations, values: torch.Tensor) -> Activations:
        form, norm, operations = part.form, part.norm, self._operations
        check_widths(form.head_dim, form.state_size)
        width = form.num_heads * form.head_dim
        channels = width + 2 * form.num_groups * form.state_size
        if form.num_heads % form.num_groups or part.convolution.num_channels != channels:
            raise Unfit("has recurrent layers of another form")
        sizes = (width, channels, form.num_heads)
        inputs = self._inputs("mamba inputs", (part.inputs,), sum(sizes), source, values)
        gates, mixed, steps = inputs.split(sizes, dim=1)
        of_inputs = self._of_inputs(inputs)
        self._convolution(part.convolution, part.layer, of_inputs, mixed, mixed)
        read = operations.input("mamba heads", width)
        task = MambaTask(
            **of_inputs,
            mixed=mixed,
            gates=gates,
            steps=steps,
            step_bias=part.step_bias,
            rates=part.rates,
            skips=part.skips,
            out=read.floats,
            state=self._state(part.layer, (form.num_heads, form.head_dim, form.state_size)),
        )
        operations.add_of_sequences(mamba.mamba_kernel(form), task, form.num_heads)
        if norm is not None:
            of_group = norm.weight.numel() // form.num_groups
            check_widths(of_group)
            norming = GroupNormTask(
                x=read.floats,
                weight=norm.weight,
                width=of_group,
                epsilon=norm.epsilon,
                num_groups=form.num_groups,
            )
            operations.add(mamba.group_norm_kernel(), norming, None)
        return read

    def _selective_scan(
        self, part: SelectiveScan, source: Activations, values: torch.Tensor
    ) -> Activations:
        operations, num_heads, form = self._operations, len(part.heads), part.heads[0].form
        width, size = form.num_channels, form.state_size
        channels = num_heads * width
        check_widths(width, size, form.rank)
        if part.convolution.num_channels != channels:
            raise Unfit("has recurrent layers of another form")
        both = self._inputs("selective", (part.inputs,), 2 * channels, source, values)
        if part.order is not None:
            ordered = operations.output("ordered selective", 2 * channels)
            operations.reorder(both, part.order, ordered)
            both = ordered
        mixed, gates = both.split(channels, dim=1)
        x = operations.input("convolved", channels)
        self._convolution(part.convolution, part.layer, self._of_inputs(mixed), mixed, x.floats)
        read, start = operations.input("selective heads", channels), 0
        state = self._state(part.layer, part.state_shape)
        for head in part.heads:
            inputs = self._inputs_of_head(head, part.norm, x, x.floats[:, start : start + width])
            task = SelectiveTask(
                **self._of_inputs(inputs),
                gates=gates[:, start:],
                gates_stride=gates.stride(0) * 4,
                rates=head.rates,
                skips=head.skips,
                out=read.floats[:, start:],
                out_stride=read.floats.stride(0) * 4,
                state=state + start * size * 4,
            )
            units = selective.num_units(form)
            operations.add_of_sequences(selective.selective_kernel(form), task, units)
            start += width
        return read

    def _inputs_of_head(
        self, head: SelectiveHead, norm: Norm | None, source: Activations, x: torch.Tensor
    ) -> torch.Tensor:
        """Return what the state of a head reads, of `x`, a part of `source`."""
        operations, form = self._operations, head.form
        channels, size, rank = form.num_channels, form.state_size, form.rank
        if head.steps.num_out != channels or head.parts.num_out != rank + 2 * size:
            raise Unfit("has recurrent layers of another form")
        parts = operations.output("selective parts", rank + 2 * size)
        operations.products((head.parts,), source, x, parts)
        latents = operations.input("latents of steps", head.steps.num_in)
        inputs = operations.output("selective inputs", 2 * (channels + size))
        joining = SelectiveInputsTask(
            x=x,
            x_stride=x.stride(0) * 4,
            parts=parts,
            weight=None if norm is None else norm.weight,
            epsilon=0.0 if norm is None else norm.epsilon,
            latents=latents.floats,
            latents_width=head.steps.num_in,
            inputs=inputs,
        )
        operations.add(selective.selective_inputs_kernel(form, norm is not None), joining, None)
        operations.products((head.steps,), latents, latents.floats, inputs[:, channels:])
        return inputs

    def _short_convolution(
        self, part: ShortConvolution, source: Activations, values: torch.Tensor
    ) -> Activations:
        channels = part.convolution.num_channels
        mixed = self._inputs("convolution inputs", (part.inputs,), 3 * channels, source, values)
        summed = self._operations.input("convolved", channels)
        of_inputs = self._of_inputs(mixed)
        out = summed.floats
        self._convolution(part.convolution, part.layer, of_inputs, mixed, out, is_gated=True)
        return summed

    def _time_mixing(self, part: TimeMixing, values: torch.Tensor) -> Activations:
        operations, channels = self._operations, part.keys.num_out
        check_widths(channels)
        inputs = operations.output("keys and values", 2 * channels)
        receptances = operations.output("receptances", channels)
        outs = inputs, receptances, inputs[:, channels:]
        matrices = part.keys, part.receptances, part.values
        mixed = self._mixed(part.mixes, part.layer, 1, values)
        for matrix, source, out in zip(matrices, mixed, outs, strict=True):
            operations.products((matrix,), source, source.floats, out)
        state, dtype = self._own_place(part.layer, 2, (3, channels))
        if dtype != torch.float32:
            raise Unfit("has a state of another form")
        read = operations.input("averages", channels)
        task = AverageTask(
            **self._of_inputs(inputs),
            gates=receptances,
            rates=part.rates,
            bonuses=part.bonuses,
            out=read.floats,
            state=state,
        )
        operations.add_of_sequences(rwkv.average_kernel(channels), task, rwkv.num_units(channels))
        return read

    def _channel_mixing(self, part: ChannelMixing, values: torch.Tensor, out: torch.Tensor) -> None:
        operations, width = self._operations, out.shape[1]
        for_keys, for_gates = self._mixed(part.mixes, part.layer, 0, values)
        mlp = Mlp((part.keys,), part.values, Activation.SQUARED_RELU, is_gated=False)
        add_mlp(operations, mlp, for_keys, for_keys.floats, out)
        receptances = operations.output("receptances", width)
        operations.products((part.receptances,), for_gates, for_gates.floats, receptances)
        stride = out.stride(0) * 4
        task = SideTask(gate=receptances, side=out, side_stride=stride, out=out, width=width)
        operations.add(gates.side_kernel(Activation.SIGMOID), task, None)

    def _mixed(
        self, mixes: torch.Tensor, layer: int, index: int, values: torch.Tensor
    ) -> list[Activations]:
        """Return `values` mixed with the rows before them, once for each row of `mixes`.

        `index` is the number of the state's tensor that has the newest row.
        """
        width = values.shape[1]
        state, dtype = self._own_place(layer, index, (width,))
        stored = stored_as(dtype)
        if stored is None:
            raise Unfit("has a state of another form")
        names = ("keys", "receptances", "values")[: len(mixes)]
        mixed = [self._operations.input(f"mixed for {name}", width) for name in names]
        keys, receptances, *others = (each.floats for each in mixed)
        task = ShiftTask(
            **self._of_inputs(values),
            width=width,
            mixes=mixes,
            state=state,
            keys=keys,
            receptances=receptances,
            values=others[0] if others else None,
        )
        kernel = rwkv.shift_kernel(stored, bool(others))
        self._operations.add_of_sequences(kernel, task, rwkv.num_units(width, are_mixed=True))
        return mixed

    def _inputs(
        self,
        name: str,
        matrices: Sequence[Matrix | LowRank],
        width: int,
        source: Activations,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply with the matrices of the inputs; return their outputs side by side."""
        if sum(matrix.num_out for matrix in matrices) != width:
            raise Unfit("has recurrent layers of another form")
        inputs, start = self._operations.output(name, width), 0
        plain: list[Matrix] = []
        for matrix in (*matrices, None):
            if isinstance(matrix, Matrix):
                plain.append(matrix)
                continue
            self._operations.products(plain, source, values, inputs[:, start:])
            start += sum(each.num_out for each in plain)
            plain = []
            if matrix is not None:
                self._operations.low_rank(matrix, source, values, inputs[:, start:])
                start += matrix.num_out
        return inputs

    def _of_inputs(self, inputs: torch.Tensor) -> dict[str, Any]:
        """Return what a task says of a layer's inputs, and add what keeps those of guesses."""
        operations, header, width = self._operations, self._operations.header, inputs.shape[1]
        place = int(header[Header.GUESS_BYTES])
        header[Header.GUESS_BYTES] += -(-width // 16) * 64
        task = InputsTask(inputs=inputs, stride=inputs.stride(0) * 4, place=place)
        operations.add_of_sequences(guesses_kernel(width), task, 1, changes_state=False)
        return dict(task.items())

    def _place(self, layer: int, kind: str, shape: tuple[int, ...]) -> tuple[int, torch.dtype]:
        """Return where a tensor begins in the bytes of a sequence's state, and its dtype."""
        found = self._places.get((layer, kind, 0))
        if found is None or found[0] != (1, *shape):
            raise Unfit("has a state of another form")
        return found[1:]

    def _own_place(self, layer: int, index: int, shape: tuple[int, ...]) -> tuple[int, torch.dtype]:
        """Return the same of a layer's part of a tensor that has those of all layers: RWKV's."""
        found = self._places.get((0, OWN, index))
        if found is None or found[0][2:] != shape:
            raise Unfit("has a state of another form")
        _, offset, dtype = found
        return offset + layer * prod(shape) * dtype.itemsize, dtype

    def _state(self, layer: int, shape: tuple[int, ...]) -> int:
        """Return where the state of a recurrence begins, which kernels take in float32."""
        offset, dtype = self._place(layer, RECURRENT, shape)
        if dtype != torch.float32:
            raise Unfit("has a state of another form")
        return offset

    def _convolution(
        self,
        part: Convolution,
        layer: int,
        of_inputs: dict[str, Any],
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        is_gated: bool = False,
    ) -> None:
        """Add the convolution of `x` [rows, channels]; a gated one has three times as many."""
        num_taps, channels = part.weights.shape
        check_widths(channels)
        offset, dtype = self._place(layer, CONV, (channels, num_taps))
        stored = stored_as(dtype)
        if stored is None:
            raise Unfit("has a state of another form")
        task = ConvolutionTask(
            **of_inputs,
            x=x,
            weights=part.weights,
            channels=channels,
            state=offset,
            out=out,
            out_stride=out.stride(0) * 4,
            bias=part.bias,
        )
        form = ConvolutionForm(num_taps, stored, part.bias is not None, part.is_activated, is_gated)
        units = -(-channels // convolution.UNIT_CHANNELS)
        self._operations.add_of_sequences(convolution.convolution_kernel(form), task, units)
