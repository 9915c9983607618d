"""Mamba-2 layers in a step's program: those of Granite 4's hybrids, Bamba and others.

Operations are: product of the inputs, the convolution, the state's step with its gate, the norm,
output.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvchat.model.cpu.matrices import Matrix, Norm, Unknown, float_values, matrix_of
from kvchat.model.cpu.step_operations import Activations, StepOperations, Task, Unfit, check_widths
from kvchat.model.cpu.step_recurrent import Convolution, StatePlaces, read_convolution
from kvchat.model.state import RECURRENT
from kvchat_kernels.cpu import mamba
from kvchat_kernels.cpu.mamba import MambaForm


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba-2 layer (`kvchat_kernels.cpu.mamba`).

    inputs       the matrix of the gates, of x, B and C, and of the steps
    rates, step_bias, skips   float32 [heads]
    limits       of the steps of a prompt; transformers has none for those of single rows
    norm         of each group of heads by itself; None: there is none
    layer        its number in the cache object of transformers
    """

    form: MambaForm
    inputs: Matrix
    convolution: Convolution
    rates: torch.Tensor
    step_bias: torch.Tensor
    skips: torch.Tensor
    limits: tuple[float, float]
    norm: Norm | None
    out: Matrix
    layer: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.inputs, self.out

    @property
    def takes_prompts(self) -> bool:
        least, most = self.limits
        return least <= 0.0 and math.isinf(most)  # a softplus is never below zero

    def add(
        self,
        operations: StepOperations,
        state: StatePlaces,
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        form, place = self.form, mamba.Place
        width = form.num_heads * form.head_dim
        sizes = (width, self.convolution.num_channels, form.num_heads)
        check_widths(form.head_dim, form.state_size)
        groups = 2 * form.num_groups * form.state_size
        if form.num_heads % form.num_groups or sizes[1] != width + groups:
            raise Unfit("has Mamba layers of another form")
        if self.inputs.num_out != sum(sizes):
            raise Unfit("has Mamba layers of another form")
        inputs = operations.output("mamba inputs", sum(sizes))
        operations.products((self.inputs,), source, values, inputs)
        gates, mixed, steps = inputs.split(sizes, dim=1)
        self.convolution.add(operations, state, self.layer, mixed, mixed)
        shape = (form.num_heads, form.head_dim, form.state_size)
        offset, dtype = state.place(self.layer, RECURRENT, shape)
        if dtype != torch.float32:
            raise Unfit("has a state of another form")
        read = operations.input("mamba heads", width)
        task: Task = {
            place.MIXED: mixed,
            place.GATES: gates,
            place.STEPS: steps,
            place.STEP_BIAS: self.step_bias,
            place.RATES: self.rates,
            place.SKIPS: self.skips,
            place.OUT: read.floats,
            place.STATE: offset,
            place.STRIDE: inputs.stride(0) * 4,
        }
        operations.add_of_sequences(mamba.mamba_kernel(form), task, form.num_heads)
        if self.norm is not None:
            self._add_norm(operations, read.floats, self.norm)
        operations.products((self.out,), read, read.floats, out)

    def _add_norm(self, operations: StepOperations, x: torch.Tensor, norm: Norm) -> None:
        place, num_groups = mamba.NormPlace, self.form.num_groups
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


def read_mamba(mixer: Any, index: int) -> Mamba:
    """Return the Mamba-2 layer of a mixer; raises Unknown for what it does not know."""
    form = MambaForm(mixer.num_heads, mixer.n_groups, mixer.head_dim, mixer.ssm_state_size)
    return Mamba(
        form,
        matrix_of(mixer.in_proj),
        read_convolution(mixer.conv1d, mixer.activation),
        -float_values(mixer.A_log).exp(),
        float_values(mixer.dt_bias),
        float_values(mixer.D),
        (float(mixer.time_step_limit[0]), float(mixer.time_step_limit[1])),
        _read_norm(mixer.norm, form),
        matrix_of(mixer.out_proj),
        index,
    )


def _read_norm(norm: Any, form: MambaForm) -> Norm | None:
    """Return the norm of what was gated, which has as many groups as B and C."""
    if type(norm) is nn.Identity:
        return None
    weight = float_values(norm.weight).contiguous()
    group_size = getattr(norm, "group_size", None)
    num_groups = norm.n_groups if group_size is None else weight.numel() // group_size
    if num_groups != form.num_groups or getattr(norm, "norm_before_gate", False):
        raise Unknown("norms the heads of Mamba layers otherwise")
    return Norm(weight, float(norm.variance_epsilon))
