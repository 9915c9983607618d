"""Gated delta nets in a step's program: Qwen3.5's, and Qwen3-Next's.

Operations are: products of the inputs, the convolution, the state's step with its norm and gate,
output. Qwen3-Next has the parts of each key head side by side; one more puts them in order.
"""

import torch

from kvchat.model.cpu.step_operations import Activations, StepOperations, Unfit, check_widths
from kvchat.model.cpu.step_recurrent import StatePlaces, add_convolution
from kvchat.model.decoder.recurrent import DeltaNet
from kvchat.model.state import RECURRENT
from kvchat_kernels.cpu import delta, ordering
from kvchat_kernels.cpu.delta import DeltaTask
from kvchat_kernels.cpu.ordering import OrderingTask


def add_delta_net(
    part: DeltaNet,
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
    check_widths(form.key_dim, form.value_dim)
    width = form.num_heads * form.value_dim
    sizes = (part.convolution.num_channels, width, form.num_heads, form.num_heads)
    if sum(matrix.num_out for matrix in part.inputs) != sum(sizes):
        raise Unfit("has delta nets of another form")
    inputs = _inputs(part, operations, sum(sizes), source, values)
    mixed, gates, betas, steps = inputs.split(sizes, dim=1)
    add_convolution(part.convolution, operations, state, part.layer, mixed, mixed)
    shape = (form.num_heads, form.key_dim, form.value_dim)
    offset, dtype = state.place(part.layer, RECURRENT, shape)
    if dtype != torch.float32:
        raise Unfit("has a state of another form")
    read = operations.input("delta heads", width)
    task = DeltaTask(
        mixed=mixed,
        gates=gates,
        betas=betas,
        steps=steps,
        step_bias=part.step_bias,
        rates=part.rates,
        norm=part.norm.weight,
        epsilon=part.norm.epsilon,
        out=read.floats,
        state=offset,
        stride=inputs.stride(0) * 4,
    )
    operations.add_of_sequences(delta.delta_kernel(form), task, form.num_heads)
    operations.products((part.out,), read, read.floats, out)


def _inputs(
    part: DeltaNet,
    operations: StepOperations,
    width: int,
    source: Activations,
    values: torch.Tensor,
) -> torch.Tensor:
    """Multiply with the inputs; return Q K V, gates, betas and steps side by side."""
    inputs = operations.output("delta inputs", width)
    operations.products(part.inputs, source, values, inputs)
    if part.order is None:
        return inputs
    ordered = operations.output("ordered delta inputs", width)
    task = OrderingTask(x=inputs, source=part.order, width=width, out=ordered)
    operations.add(ordering.ordering_kernel(), task, None)
    return ordered
