"""Activations of transformers' modules, and what computes them with the product of a gated MLP."""

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, silu

from kvchat_kernels.cpu.gates import Activation
from kvchat_kernels.row_operations import gelu_tanh_mul, silu_mul

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# By the names of their classes, torch's own and transformers'.
_ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUActivation": Activation.GELU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
    "ReLUSquaredActivation": Activation.SQUARED_RELU,
    "XIELUActivation": Activation.XIELU,
}


def _gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gelu(gate).mul_(up)


# What computes act(gate) * up on a GPU.
GATES: dict[Activation | None, Gate] = {
    Activation.SILU: silu_mul,
    Activation.GELU_TANH: gelu_tanh_mul,
    Activation.GELU: _gelu_mul,
}


def activation_of(act: object) -> Activation | None:
    """Return the activation that a module, or torch's function, computes; None for an unknown."""
    return Activation.SILU if act is silu else _ACTIVATIONS.get(type(act).__name__)
