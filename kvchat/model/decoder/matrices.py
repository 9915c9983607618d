"""Matrices and norms of a loaded model, read from its modules: the parts of a decoder.

Weights are the model's own memory, as floats or as blocks. Reading refuses (`Unknown`) a layer
that is no plain one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvchat.model.packed.quantise import pack_of
from kvchat_kernels.linear.blocks import BlockWeights


class Unknown(Exception):
    """Something of the model that is not known here; says what, as words after "it"."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights [out, in] of a linear layer, the model's own memory, and a bias in float32.

    source    the layer, or the weights of what is no linear layer, such as a router
    factors   float32 [out], what the outputs, their bias included, are multiplied with
    """

    source: nn.Linear | torch.Tensor | BlockWeights
    bias: torch.Tensor | None
    factors: torch.Tensor | None = None

    @property
    def weights(self) -> torch.Tensor | BlockWeights:
        """The layer's weights as they are now: a GPU merges those of several layers."""
        if not isinstance(self.source, nn.Linear):
            return self.source
        pack = pack_of(self.source)
        return self.source.weight.detach() if pack is None else pack.weights

    @property
    def num_out(self) -> int:
        weights = self.weights
        return weights.num_out if isinstance(weights, BlockWeights) else weights.shape[0]

    @property
    def num_in(self) -> int:
        weights = self.weights
        return weights.num_in if isinstance(weights, BlockWeights) else weights.shape[1]

    @property
    def num_weights(self) -> int:
        return self.num_out * self.num_in

    def scaled(self, factors: torch.Tensor | float, of_input: float = 1.0) -> "Matrix":
        """Return the matrix with outputs that are multiplied, and of inputs that are."""
        if isinstance(factors, float) and factors == of_input == 1.0:
            return self
        # The dtype is said: torch's default is another while a thread loads a model.
        each = torch.ones(self.num_out, dtype=torch.float32) * factors * of_input
        bias = self.bias if self.bias is None else self.bias / of_input
        return Matrix(self.source, bias, each)


@dataclass(frozen=True, slots=True)
class LowRank:
    """A matrix whose input is what another one makes, of fewer numbers."""

    first: Matrix
    second: Matrix

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        return self.first, self.second

    @property
    def num_out(self) -> int:
        return self.second.num_out


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight; `weight` is float32 [width].

    With a `bias`, float32 [width], x is centred first, and it is added at last. `module` is
    transformers' own.
    """

    weight: torch.Tensor
    epsilon: float
    bias: torch.Tensor | None = None
    module: Any = None


def whole(weights: torch.Tensor) -> torch.Tensor:
    """Return weights whose rows lie one after another; raises Unknown for others."""
    if not weights.is_contiguous():
        raise Unknown("has weights that are turned")
    return weights


def matrix_of(layer: Any) -> Matrix:
    """Return the matrix of a linear layer; raises Unknown for any other layer."""
    if type(layer) is not nn.Linear:
        raise Unknown(f"has the layer {type(layer).__name__}")
    matrix = Matrix(layer, None if layer.bias is None else float_values(layer.bias))
    weights = matrix.weights
    if isinstance(weights, torch.Tensor):
        whole(weights)
    elif weights.num_in != layer.in_features:
        raise Unknown(f"has {layer.in_features} columns in blocks")
    return matrix


_PRECISE = "kvchat_precise"


def keep_precise(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Keep the float32 numbers that a file has of some parameters of fewer bits, by their names.

    The module computes with its parameters; compiled steps compute with `float_values` of them.
    """
    parameters = dict(module.named_parameters())
    for name, numbers in values.items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.shape == numbers.shape:
            setattr(parameter, _PRECISE, numbers)


def float_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter in float32: the file's own numbers, where `keep_precise` has them."""
    precise: torch.Tensor | None = getattr(parameter, _PRECISE, None)
    return parameter.detach().float() if precise is None else precise


def float_row(values: torch.Tensor) -> torch.Tensor:
    """Return `float_values` in one row."""
    return float_values(values).flatten()


def matrices_of(module: Any, merged: str, apart: Sequence[str]) -> tuple[Matrix, ...]:
    """Return the matrix of the layer `merged`, or those of its parts where they are apart."""
    names = (merged,) if hasattr(module, merged) else apart
    return tuple(matrix_of(getattr(module, name)) for name in names)
