"""Short gated convolutions in a step's program: LFM2's.

Operations are: products of the inputs, the convolution between its two gates, output.
"""

import torch

from kvchat.model.cpu.step_operations import Activations, StepOperations, Unfit
from kvchat.model.cpu.step_recurrent import StatePlaces, add_convolution
from kvchat.model.decoder.recurrent import ShortConvolution


def add_short_convolution(
    part: ShortConvolution,
    operations: StepOperations,
    state: StatePlaces,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add a layer's operations on `values` [rows, hidden], rounded into `source`; they write `out`.

    Raises Unfit for sizes that no kernel takes.
    """
    channels = part.convolution.num_channels
    if part.inputs.num_out != 3 * channels:
        raise Unfit("has short convolutions of another form")
    mixed = operations.output("convolution inputs", 3 * channels)
    operations.products((part.inputs,), source, values, mixed)
    summed = operations.input("convolved", channels)
    add_convolution(
        part.convolution, operations, state, part.layer, mixed, summed.floats, is_gated=True
    )
    operations.products((part.out,), summed, summed.floats, out)
