"""Short gated convolutions in a step's program: LFM2's.

Operations are: products of the inputs, the convolution between its two gates, output.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kvchat.model.cpu.matrices import Matrix, matrix_of
from kvchat.model.cpu.step_operations import Activations, StepOperations, Unfit
from kvchat.model.cpu.step_recurrent import Convolution, StatePlaces, read_convolution


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """out(C * convolution(B * x)), where `inputs` is the matrix of B, C and x.

    layer    its number in the cache object of transformers
    """

    inputs: Matrix
    convolution: Convolution
    out: Matrix
    layer: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.inputs, self.out

    @property
    def takes_prompts(self) -> bool:
        return True

    def add(
        self,
        operations: StepOperations,
        state: StatePlaces,
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        channels = self.convolution.num_channels
        if self.inputs.num_out != 3 * channels:
            raise Unfit("has short convolutions of another form")
        mixed = operations.output("convolution inputs", 3 * channels)
        operations.products((self.inputs,), source, values, mixed)
        summed = operations.input("convolved", channels)
        self.convolution.add(operations, state, self.layer, mixed, summed.floats, is_gated=True)
        operations.products((self.out,), summed, summed.floats, out)


def read_short_convolution(mixer: Any, index: int) -> ShortConvolution:
    """Return the short convolution of a layer; raises Unknown for what it does not know."""
    return ShortConvolution(
        matrix_of(mixer.in_proj),
        read_convolution(mixer.conv, None),
        matrix_of(mixer.out_proj),
        index,
    )
