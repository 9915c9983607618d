"""The torch references of the gates: what transformers' modules compute."""

import torch
from torch.nn import functional


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`."""
    return functional.silu(gate) * up


def gelu_tanh_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up` with the tanh form of gelu."""
    return functional.gelu(gate, approximate="tanh") * up
