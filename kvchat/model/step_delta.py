"""The operations of a gated delta net in a step's program, for one row of one sequence.

They are: products of the inputs, the convolution, the state's step with its norm and gate, output.
"""

import torch

from kvchat.model.decoder import DeltaNet
from kvchat.model.spec import StateTensor
from kvchat.model.state import CONV, RECURRENT, state_offsets
from kvchat.model.step_operations import Activations, StepOperations, Task, Unfit, check_widths
from kvchat_kernels.cpu import delta
from kvchat_kernels.cpu.maths import stored_as


def add_delta(
    operations: StepOperations,
    layer: DeltaNet,
    state: tuple[StateTensor, ...],
    dtype: torch.dtype,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add a delta net of `values` [rows, hidden], rounded into `source`; writes `out`.

    The state of a model in `dtype` has the tensors of `state`. Raises Unfit for sizes that no
    kernel takes.
    """
    form, channels = layer.form, len(layer.convolution)
    check_widths(form.key_dim, form.value_dim, channels)
    width = form.num_heads * form.value_dim
    sizes = (channels, width, form.num_heads, form.num_heads)
    if tuple(matrix.num_out for matrix in layer.inputs) != sizes:
        raise Unfit("has delta nets of another form")
    mixed = operations.output("delta inputs", sum(sizes))
    operations.products(layer.inputs, source, values, mixed)
    convolution_at, stored = _place(state, layer, CONV, (1, channels, delta.TAPS), dtype)
    state_shape = (1, form.num_heads, form.key_dim, form.value_dim)
    state_at, state_dtype = _place(state, layer, RECURRENT, state_shape, dtype)
    held = stored_as(stored)
    if held is None or state_dtype != torch.float32:
        raise Unfit("has a state of another form")
    of_inputs, place = delta.ConvolutionPlace, delta.DeltaPlace
    task: Task = {
        of_inputs.X: mixed,
        of_inputs.WEIGHTS: layer.convolution,
        of_inputs.CHANNELS: channels,
        of_inputs.STATE: convolution_at,
    }
    units = -(-channels // delta.UNIT_CHANNELS)
    operations.add(delta.convolution_kernel(held), task, units)
    _, gates, betas, steps = mixed.split(sizes, dim=1)
    read = operations.input("delta heads", width)
    task = {
        place.MIXED: mixed,
        place.GATES: gates,
        place.BETAS: betas,
        place.STEPS: steps,
        place.STEP_BIAS: layer.step_bias,
        place.RATES: layer.rates,
        place.NORM: layer.norm.weight,
        place.EPSILON: layer.norm.epsilon,
        place.OUT: read.floats,
        place.STATE: state_at,
    }
    operations.add(delta.delta_kernel(form), task, form.num_heads)
    operations.products((layer.out,), read, read.floats, out)


def _place(
    state: tuple[StateTensor, ...],
    layer: DeltaNet,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[int, torch.dtype]:
    """Return where in a state the layer's tensor of this kind lies, in bytes, and its dtype."""
    offsets = state_offsets(state, dtype)
    for tensor, offset in zip(state, offsets, strict=True):
        if (tensor.layer, tensor.kind, tensor.index) == (layer.layer, kind, 0):
            if tensor.shape != shape:
                break
            return offset, tensor.dtype or dtype
    raise Unfit("has a state of another form")
