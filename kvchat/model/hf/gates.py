"""Which kernel computes the activation and the product of a gated MLP at once."""

from collections.abc import Callable

import torch
from torch import nn

from kvchat_kernels.silu_mul import gelu_tanh_mul, silu_mul

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Activations by the names of their classes, torch's own and transformers'.
_GATES: dict[str, Gate] = {
    "SiLU": silu_mul,
    "SiLUActivation": silu_mul,
    "GELUTanh": gelu_tanh_mul,
    "PytorchGELUTanh": gelu_tanh_mul,
}


def gate_of(act: Callable[[torch.Tensor], torch.Tensor]) -> Gate | None:
    """Return what computes act(gate) * up at once, None where nothing does."""
    return _GATES.get(type(act).__name__) if isinstance(act, nn.Module) else None
