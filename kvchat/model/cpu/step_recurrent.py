"""What layers with a state of constant size share in a step's program.

Each kind of `decoder/recurrent.py` has a function that adds its operations, in a file of its own:
`step_delta.py`, `step_short_conv.py`, `step_mamba.py`.
"""

import torch

from kvchat.model.cpu.step_operations import StepOperations, Unfit, check_widths
from kvchat.model.decoder.recurrent import Convolution
from kvchat.model.spec import StateTensor
from kvchat.model.state import CONV, state_offsets
from kvchat_kernels.cpu import convolution
from kvchat_kernels.cpu.convolution import ConvolutionForm, ConvolutionTask
from kvchat_kernels.cpu.maths import stored_as


class StatePlaces:
    """Where the tensors of a sequence's state lie, for a model in `dtype`."""

    def __init__(self, tensors: tuple[StateTensor, ...], dtype: torch.dtype) -> None:
        offsets = state_offsets(tensors, dtype)
        self._found = {
            (tensor.layer, tensor.kind): (tensor.shape, offset, tensor.dtype or dtype)
            for tensor, offset in zip(tensors, offsets, strict=True)
            if tensor.index == 0
        }

    def place(self, layer: int, kind: str, shape: tuple[int, ...]) -> tuple[int, torch.dtype]:
        """Return where a layer's tensor begins, in bytes, and its dtype.

        Raises Unfit for a layer without a tensor of this kind and shape.
        """
        found = self._found.get((layer, kind))
        if found is None or found[0] != (1, *shape):
            raise Unfit("has a state of another form")
        return found[1:]


def add_convolution(
    part: Convolution,
    operations: StepOperations,
    state: StatePlaces,
    layer: int,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    is_gated: bool = False,
) -> None:
    """Add the operation on `x` [rows, channels]; a gated one has three times as many."""
    num_taps, channels = part.weights.shape
    check_widths(channels)
    offset, dtype = state.place(layer, CONV, (channels, num_taps))
    stored = stored_as(dtype)
    if stored is None:
        raise Unfit("has a state of another form")
    task = ConvolutionTask(
        x=x,
        weights=part.weights,
        channels=channels,
        state=offset,
        out=out,
        x_stride=x.stride(0) * 4,
        out_stride=out.stride(0) * 4,
        bias=part.bias,
    )
    form = ConvolutionForm(num_taps, stored, part.bias is not None, part.is_activated, is_gated)
    units = -(-channels // convolution.UNIT_CHANNELS)
    operations.add_of_sequences(convolution.convolution_kernel(form), task, units)
