"""Gated delta nets in a step's program: Qwen3.5's, and Qwen3-Next's.

Operations are: products of the inputs, the convolution, the state's step with its norm and gate,
output. Qwen3-Next has the parts of each key head side by side; one more puts them in order.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kvchat.model.cpu.matrices import Matrix, Norm, float_values, matrix_of
from kvchat.model.cpu.step_operations import Activations, StepOperations, Task, Unfit, check_widths
from kvchat.model.cpu.step_recurrent import Convolution, StatePlaces, read_convolution
from kvchat.model.state import RECURRENT
from kvchat_kernels.cpu import delta, ordering
from kvchat_kernels.cpu.delta import DeltaForm


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net (`kvchat_kernels.cpu.delta`).

    inputs       the matrices whose outputs are Q K V, the gates, the betas and the steps
    order        where each of these is in the outputs, int32; None: they are in this order
    rates, step_bias   float32 [heads]
    layer        its number in the cache object of transformers
    """

    form: DeltaForm
    inputs: tuple[Matrix, ...]
    order: torch.Tensor | None
    out: Matrix
    convolution: Convolution
    rates: torch.Tensor
    step_bias: torch.Tensor
    norm: Norm
    layer: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (*self.inputs, self.out)

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
        form = self.form
        check_widths(form.key_dim, form.value_dim)
        width = form.num_heads * form.value_dim
        sizes = (self.convolution.num_channels, width, form.num_heads, form.num_heads)
        if sum(matrix.num_out for matrix in self.inputs) != sum(sizes):
            raise Unfit("has delta nets of another form")
        inputs = self._inputs(operations, sum(sizes), source, values)
        mixed, gates, betas, steps = inputs.split(sizes, dim=1)
        self.convolution.add(operations, state, self.layer, mixed, mixed)
        shape = (form.num_heads, form.key_dim, form.value_dim)
        offset, dtype = state.place(self.layer, RECURRENT, shape)
        if dtype != torch.float32:
            raise Unfit("has a state of another form")
        place = delta.Place
        read = operations.input("delta heads", width)
        task: Task = {
            place.MIXED: mixed,
            place.GATES: gates,
            place.BETAS: betas,
            place.STEPS: steps,
            place.STEP_BIAS: self.step_bias,
            place.RATES: self.rates,
            place.NORM: self.norm.weight,
            place.EPSILON: self.norm.epsilon,
            place.OUT: read.floats,
            place.STATE: offset,
            place.STRIDE: inputs.stride(0) * 4,
        }
        operations.add_of_sequences(delta.delta_kernel(form), task, form.num_heads)
        operations.products((self.out,), read, read.floats, out)

    def _inputs(
        self, operations: StepOperations, width: int, source: Activations, values: torch.Tensor
    ) -> torch.Tensor:
        """Multiply with the inputs; return Q K V, gates, betas and steps side by side."""
        inputs = operations.output("delta inputs", width)
        operations.products(self.inputs, source, values, inputs)
        if self.order is None:
            return inputs
        ordered = operations.output("ordered delta inputs", width)
        place = ordering.Place
        task: Task = {
            place.X: inputs,
            place.FROM: self.order,
            place.WIDTH: width,
            place.OUT: ordered,
        }
        operations.add(ordering.ordering_kernel(), task, None)
        return ordered


def read_delta_net(mixer: Any, index: int) -> DeltaNet:
    """Return the delta net of a layer; raises Unknown for what it does not know."""
    form = DeltaForm(mixer.num_v_heads, mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim)
    is_grouped = hasattr(mixer, "in_proj_qkvz")
    names = ("qkvz", "ba") if is_grouped else ("qkv", "z", "b", "a")
    norm = mixer.norm
    return DeltaNet(
        form,
        tuple(matrix_of(getattr(mixer, f"in_proj_{name}")) for name in names),
        _order(form) if is_grouped else None,
        matrix_of(mixer.out_proj),
        read_convolution(mixer.conv1d, mixer.activation),
        -float_values(mixer.A_log).exp(),
        float_values(mixer.dt_bias),
        Norm(float_values(norm.weight), float(norm.variance_epsilon)),
        index,
    )


def _order(form: DeltaForm) -> torch.Tensor:
    """Return where Q K V, gates, betas and steps are where each key head has its own together.

    Of each key head there are its query, its key, the values and the gates of the heads that it
    serves; then, of each again, their betas and their steps.
    """
    heads, repeats = form.num_key_heads, form.num_heads // form.num_key_heads
    values = repeats * form.value_dim
    parts = (form.key_dim, form.key_dim, values, values)
    large = torch.arange(heads * sum(parts), dtype=torch.int32).view(heads, -1)
    small = torch.arange(heads * 2 * repeats, dtype=torch.int32).view(heads, -1) + large.numel()
    pieces = (*large.split(parts, dim=1), *small.split(repeats, dim=1))
    return torch.cat([piece.flatten() for piece in pieces])
