"""Mamba-2 layers in a step's program: those of Granite 4's hybrids, Bamba and others.

Operations are: product of the inputs, the convolution, the state's step with its gate, the norm,
output.
"""

import torch

from kvchat.model.cpu.step_operations import Activations, StepOperations, Task, Unfit, check_widths
from kvchat.model.cpu.step_recurrent import StatePlaces, add_convolution
from kvchat.model.decoder.matrices import Norm
from kvchat.model.decoder.recurrent import Mamba
from kvchat.model.state import RECURRENT
from kvchat_kernels.cpu import mamba


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
    form, place = part.form, mamba.Place
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
    task: Task = {
        place.MIXED: mixed,
        place.GATES: gates,
        place.STEPS: steps,
        place.STEP_BIAS: part.step_bias,
        place.RATES: part.rates,
        place.SKIPS: part.skips,
        place.OUT: read.floats,
        place.STATE: offset,
        place.STRIDE: inputs.stride(0) * 4,
    }
    operations.add_of_sequences(mamba.mamba_kernel(form), task, form.num_heads)
    if part.norm is not None:
        _add_norm(operations, read.floats, part.norm, form.num_groups)
    operations.products((part.out,), read, read.floats, out)


def _add_norm(operations: StepOperations, x: torch.Tensor, norm: Norm, num_groups: int) -> None:
    place = mamba.NormPlace
    width = norm.weight.numel() // num_groups
    check_widths(width)
    task: Task = {
        place.X: x,
        place.WEIGHT: norm.weight,
        place.WIDTH: width,
        place.EPSILON: norm.epsilon,
        place.NUM_GROUPS: num_groups,
    }
    operations.add(mamba.group_norm_kernel(), task, None)
