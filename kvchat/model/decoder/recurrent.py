"""Layers that keep a state of constant size, as what they compute: read from transformers' modules.

A kind of layer is a class and a function that reads it, which a family names. `RecurrentLayers` of
`cpu/step_recurrent.py` adds its operations to a compiled step.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kvchat.model.decoder.matrices import (
    LowRank,
    Matrix,
    Norm,
    Unknown,
    float_row,
    float_values,
    matrix_of,
)
from kvchat.model.packed.quantise import RowsApart
from kvchat_kernels.cpu.delta import DeltaForm
from kvchat_kernels.cpu.mamba import MambaForm
from kvchat_kernels.cpu.products import COLUMNS
from kvchat_kernels.cpu.selective import SelectiveForm


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
    def limits_prompts(self) -> bool:
        """Whether a prompt's rows have other steps than single rows."""
        least, most = self.limits
        return least > 0.0 or not math.isinf(most)  # a softplus is never below zero


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


@dataclass(frozen=True, slots=True)
class SelectiveHead:
    """Some channels of a Mamba-1 layer that share B and C: all of them but in Zamba.

    parts        the matrix of what steps are made of, of B and of C, whose input is convolved
    steps        the matrix of the steps, whose columns may be padded
    rates        float32 [channels, state size]
    skips        float32 [channels]
    """

    form: SelectiveForm
    parts: Matrix
    steps: Matrix
    rates: torch.Tensor
    skips: torch.Tensor


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """A Mamba-1 layer (`kvchat_kernels.cpu.selective`).

    inputs       the matrix of what is convolved, and of the gates
    order        where each of these is in its outputs, int32; None: they are in this order
    heads        side by side, of the same form
    norm         of the parts of a head, each by itself, [rank + 2 * state size]; None: none
    state_shape  of the cache object's tensor
    layer        its number in the cache object of transformers
    """

    inputs: Matrix
    order: torch.Tensor | None
    convolution: Convolution
    heads: tuple[SelectiveHead, ...]
    norm: Norm | None
    out: Matrix
    state_shape: tuple[int, ...]
    layer: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        of_heads = chain.from_iterable((head.parts, head.steps) for head in self.heads)
        return self.inputs, *of_heads, self.out


def read_selective_scan(mixer: Any, index: int) -> SelectiveScan:
    """Return the Mamba-1 layer of a mixer; raises Unknown for what it does not know."""
    rank, size = mixer.time_step_rank, mixer.ssm_state_size
    norm = None
    if hasattr(mixer, "dt_layernorm"):
        norms = (mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm)
        if hasattr(norms[0], "variance_epsilon"):
            weight = torch.cat([float_values(each.weight) for each in norms])
            norm = Norm(weight, float(norms[0].variance_epsilon))
        else:  # Falcon Mamba's have weights that their code does not read
            weight = torch.ones(rank + 2 * size, dtype=torch.float32)
            norm = Norm(weight, float(norms[0].eps))
    head = SelectiveHead(
        SelectiveForm(mixer.intermediate_size, size, rank),
        matrix_of(mixer.x_proj),
        _padded(matrix_of(mixer.dt_proj)),
        (-float_values(mixer.A_log).exp()).contiguous(),
        float_values(mixer.D),
    )
    return _scan_of(mixer, index, None, (head,), norm, (mixer.intermediate_size, size))


def read_zamba_scan(mixer: Any, index: int) -> SelectiveScan:
    """Return Zamba's layer of Mamba 1, whose heads have B, C and steps of their own."""
    num_heads, width, size = mixer.n_mamba_heads, mixer.mamba_head_dim, mixer.ssm_state_size
    form = SelectiveForm(width, size, mixer.time_step_rank)
    rates, bias = -float_values(mixer.A_log).exp(), float_values(mixer.dt_proj_bias)
    heads = tuple(
        SelectiveHead(
            form,
            Matrix(mixer.x_proj_weight.detach()[head], None),
            _padded(Matrix(mixer.dt_proj_weight.detach()[head], bias[head])),
            rates[head],
            float_values(mixer.D)[head],
        )
        for head in range(num_heads)
    )
    # What is convolved and the gates are by turns.
    order = torch.arange(2 * num_heads * width, dtype=torch.int32).view(-1, 2).T.flatten()
    return _scan_of(mixer, index, order, heads, None, (num_heads, width, size))


def _scan_of(
    mixer: Any,
    index: int,
    order: torch.Tensor | None,
    heads: tuple[SelectiveHead, ...],
    norm: Norm | None,
    state_shape: tuple[int, ...],
) -> SelectiveScan:
    return SelectiveScan(
        matrix_of(mixer.in_proj),
        order,
        read_convolution(mixer.conv1d, mixer.activation),
        heads,
        norm,
        matrix_of(mixer.out_proj),
        state_shape,
        index,
    )


def _padded(matrix: Matrix) -> Matrix:
    """Return a matrix with as many columns as kernels take, the last of them zeros."""
    missing = -matrix.num_in % COLUMNS
    weights = matrix.weights
    if not missing or not isinstance(weights, torch.Tensor):
        return matrix
    return Matrix(functional.pad(weights, (0, missing)), matrix.bias)


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


def read_short_convolution(mixer: Any, index: int) -> ShortConvolution:
    """Return the short convolution of a layer; raises Unknown for what it does not know."""
    return ShortConvolution(
        matrix_of(mixer.in_proj),
        read_convolution(mixer.conv, None),
        matrix_of(mixer.out_proj),
        index,
    )


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net (`kvchat_kernels.cpu.delta`).

    inputs       the matrices whose outputs are Q K V, the gates, the betas and the steps
    order        where each of these is in the outputs, int32; None: they are in this order
    rates, step_bias   float32 [heads]
    layer        its number in the cache object of transformers
    """

    form: DeltaForm
    inputs: tuple[Matrix | LowRank, ...]
    order: torch.Tensor | None
    out: Matrix
    convolution: Convolution
    rates: torch.Tensor
    step_bias: torch.Tensor
    norm: Norm
    layer: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        inputs = (each.matrices if isinstance(each, LowRank) else (each,) for each in self.inputs)
        return (*chain.from_iterable(inputs), self.out)


def read_kimi_delta_net(mixer: Any, index: int) -> DeltaNet:
    """Return the delta net of a layer of Kimi Linear, each of whose channels decays by itself."""
    heads, dim, forget = mixer.num_heads, mixer.head_dim, mixer.forget_gate
    query, key, value, beta = (matrix_of(getattr(mixer, f"{name}_proj")) for name in "qkvb")
    gates = LowRank(matrix_of(mixer.g_a_proj), matrix_of(mixer.g_b_proj))
    steps = LowRank(matrix_of(forget.f_a_proj), matrix_of(forget.f_b_proj))
    return DeltaNet(
        DeltaForm(heads, heads, dim, dim, decays_channels=True, has_silu=False),
        (query, key, value, gates, beta, steps),
        None,
        matrix_of(mixer.o_proj),
        read_convolution(mixer.conv1d, mixer.activation),
        -float_values(forget.A_log).flatten().exp(),
        float_values(forget.dt_bias),
        Norm(float_values(mixer.o_norm.weight), float(mixer.o_norm.variance_epsilon)),
        index,
    )


def read_olmo_delta_net(mixer: Any, index: int) -> DeltaNet:
    """Return the delta net of a layer of OLMo's hybrid, whose inputs have a matrix each."""
    return DeltaNet(
        DeltaForm(
            mixer.num_v_heads,
            mixer.num_k_heads,
            mixer.head_k_dim,
            mixer.head_v_dim,
            2.0 if mixer.allow_neg_eigval else 1.0,
        ),
        tuple(matrix_of(getattr(mixer, f"{name}_proj")) for name in "qkvgba"),
        None,
        matrix_of(mixer.o_proj),
        read_convolution(mixer.conv1d, mixer.activation),
        -float_values(mixer.A_log).exp(),
        float_values(mixer.dt_bias),
        Norm(float_values(mixer.o_norm.weight), float(mixer.o_norm.variance_epsilon)),
        index,
    )


def read_delta_net(mixer: Any, index: int) -> DeltaNet:
    """Return the delta net of a layer; raises Unknown for what it does not know."""
    form = DeltaForm(mixer.num_v_heads, mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim)
    is_grouped = hasattr(mixer, "in_proj_qkvz")
    names = ("qkvz", "ba") if is_grouped else ("qkv", "z", "b", "a")
    layers = [getattr(mixer, f"in_proj_{name}") for name in names]
    order = _order(form) if is_grouped else None
    if isinstance(first := layers[0], RowsApart) and order is not None:
        layers[:1] = first.parts
        places = torch.arange(len(order), dtype=torch.int32)
        places[: len(first.order)] = first.order
        order = places[order]
    norm = mixer.norm
    return DeltaNet(
        form,
        tuple(map(matrix_of, layers)),
        order,
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


@dataclass(frozen=True, slots=True)
class TimeMixing:
    """The half of RWKV's layers that averages values over time (`kvchat_kernels.cpu.rwkv`).

    mixes       float32 [3, hidden], of the inputs of keys, receptances and values: how much of a
                row each has, where the rest is of the row before
    rates, bonuses   float32 [channels]
    layer       its number in the state of transformers
    """

    mixes: torch.Tensor
    keys: Matrix
    receptances: Matrix
    values: Matrix
    rates: torch.Tensor
    bonuses: torch.Tensor
    out: Matrix
    layer: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.keys, self.receptances, self.values, self.out


def read_time_mixing(module: Any, index: int) -> TimeMixing:
    """Return the time mixing of a layer of RWKV."""
    return TimeMixing(
        _read_mixes(module, "key", "receptance", "value"),
        matrix_of(module.key),
        matrix_of(module.receptance),
        matrix_of(module.value),
        -float_values(module.time_decay).exp(),
        float_values(module.time_first),
        matrix_of(module.output),
        index,
    )


@dataclass(frozen=True, slots=True)
class ChannelMixing:
    """The half of RWKV's layers without averages: sigmoid(receptances) * values(relu(keys)^2).

    mixes    float32 [2, hidden], of the inputs of keys and receptances, as of TimeMixing
    layer    as of TimeMixing
    """

    mixes: torch.Tensor
    keys: Matrix
    receptances: Matrix
    values: Matrix
    layer: int

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.keys, self.receptances, self.values


def read_channel_mixing(module: Any, index: int) -> ChannelMixing:
    """Return the channel mixing of a layer of RWKV."""
    return ChannelMixing(
        _read_mixes(module, "key", "receptance"),
        matrix_of(module.key),
        matrix_of(module.receptance),
        matrix_of(module.value),
        index,
    )


def _read_mixes(module: Any, *names: str) -> torch.Tensor:
    return torch.stack([float_row(getattr(module, f"time_mix_{name}")) for name in names])


Recurrent = Mamba | SelectiveScan | DeltaNet | ShortConvolution | TimeMixing | ChannelMixing
