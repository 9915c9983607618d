"""Mamba-2 layers in a step's program: those of Granite 4's hybrids, Bamba and others.

Operations are: product of the inputs, the convolution, the state's step with its gate, the norm,
output.
"""

import torch

from kvchat.model.cpu.step_operations import Activations, StepOperations, Unfit, check_widths
from kvchat.model.cpu.step_recurrent import StatePlaces, add_convolution
from kvchat.model.decoder.matrices import Norm
from kvchat.model.decoder.recurrent import Mamba
from kvchat.model.state import RECURRENT
from kvchat_kernels.cpu import mamba
from kvchat_kernels.cpu.mamba import GroupNormTask, MambaTask


def add_mamba(
    part: Mamba,
    operations: StepOperations,
    state: StatePlaces,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add a layer's operations on `values` [rows, hidden], rounded into `source`; they write `out`.

    Raises Unfit for sizes that no kernel takes.
    """
    form = part.form
    width = form.num_heads * form.head_dim
    sizes = (width, part.convolution.num_channels, form.num_heads)
    check_widths(form.head_dim, form.state_size)
    groups = 2 * form.num_groups * form.state_size
    if form.num_heads % form.num_groups or sizes[1] != width + groups:
        raise Unfit("has Mamba layers of another form")
    if part.inputs.num_out != sum(sizes):
        raise Unfit("has Mamba layers of another form")
    inputs = operations.output("mamba inputs", sum(sizes))
    operations.products((part.inputs,), source, values, inputs)
    gates, mixed, steps = inputs.split(sizes, dim=1)
    add_convolution(part.convolution, operations, state, part.layer, mixed, mixed)
    shape = (form.num_heads, form.head_dim, form.state_size)
    offset, dtype = state.place(part.layer, RECURRENT, shape)
    if dtype != torch.float32:
        raise Unfit("has a state of another form")
    read = operations.input("mamba heads", width)
    task = MambaTask(
        mixed=mixed,
        gates=gates,
        steps=steps,
        step_bias=part.step_bias,
        rates=part.rates,
        skips=part.skips,
        out=read.floats,
        state=offset,
        stride=inputs.stride(0) * 4,
    )
    operations.add_of_sequences(mamba.mamba_kernel(form), task, form.num_heads)
    if part.norm is not None:
        _add_norm(operations, read.floats, part.norm, form.num_groups)
    operations.products((part.out,), read, read.floats, out)


def _add_norm(operations: StepOperations, x: torch.Tensor, norm: Norm, num_groups: int) -> None:
    width = norm.weight.numel() // num_groups
    check_widths(width)
    task = GroupNormTask(
        x=x, weight=norm.weight, width=width, epsilon=norm.epsilon, num_groups=num_groups
    )
    operations.add(mamba.group_norm_kernel(), task, None)
