"""What layers with a state of constant size share in a step's program.

A kind of layer is a class with the members of `Recurrent` and a function that reads it from
transformers' module, in a file of its own: `step_delta.py`, `step_short_conv.py`, `step_mamba.py`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvchat.model.cpu.matrices import Matrix, Unknown, float_values
from kvchat.model.cpu.step_operations import Activations, StepOperations, Task, Unfit, check_widths
from kvchat.model.spec import StateTensor
from kvchat.model.state import CONV, state_offsets
from kvchat_kernels.cpu import convolution
from kvchat_kernels.cpu.convolution import ConvolutionForm
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


class Recurrent(Protocol):
    """A layer that keeps a state, as what it computes."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All that it multiplies with."""
        ...

    @property
    def takes_prompts(self) -> bool:
        """Whether rows of a prompt are computed as those that follow it, one by one."""
        ...

    def add(
        self,
        operations: StepOperations,
        state: StatePlaces,
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add its operations on `values` [rows, hidden], rounded into `source`; they write `out`.

        Raises Unfit for sizes that no kernel takes.
        """
        ...


@dataclass(frozen=True, slots=True)
class Convolution:
    """A sum over the last inputs of each channel (`kvchat_kernels.cpu.convolution`).

    weights   float32 [taps, channels]
    bias      float32 [channels]
    """

    weights: torch.Tensor
    bias: torch.Tensor | None
    is_activated: bool

    @property
    def num_channels(self) -> int:
        return self.weights.shape[1]

    def add(
        self,
        operations: StepOperations,
        state: StatePlaces,
        layer: int,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        is_gated: bool = False,
    ) -> None:
        """Add the operation on `x` [rows, channels]; a gated one has three times as many."""
        num_taps, channels = self.weights.shape
        check_widths(channels)
        offset, dtype = state.place(layer, CONV, (channels, num_taps))
        stored = stored_as(dtype)
        if stored is None:
            raise Unfit("has a state of another form")
        place = convolution.Place
        task: Task = {
            place.X: x,
            place.WEIGHTS: self.weights,
            place.CHANNELS: channels,
            place.STATE: offset,
            place.OUT: out,
            place.X_STRIDE: x.stride(0) * 4,
            place.OUT_STRIDE: out.stride(0) * 4,
        }
        if self.bias is not None:
            task[place.BIAS] = self.bias
        form = ConvolutionForm(num_taps, stored, self.bias is not None, self.is_activated, is_gated)
        units = -(-channels // convolution.UNIT_CHANNELS)
        operations.add_of_sequences(convolution.convolution_kernel(form), task, units)


def read_convolution(module: Any, activation: str | None) -> Convolution:
    """Return the convolution of an `nn.Conv1d` with one group a channel; raises Unknown."""
    if activation not in (None, "silu"):
        raise Unknown(f"has a convolution with {activation}")
    if module.groups != module.in_channels or module.in_channels != module.out_channels:
        raise Unknown("has a convolution of another kind")
    return Convolution(
        float_values(module.weight).squeeze(1).T.contiguous(),
        None if module.bias is None else float_values(module.bias),
        activation is not None,
    )
