"""Where fused parts take one kernel for several operations, and in which of its forms.

On a GPU an operation on a few rows costs its launch and little else, so fewer are faster; on a CPU
torch's own are. Knows what kernels stand for which modules. Proves nothing: `fuse` does.
"""

from collections.abc import Callable

import torch
from torch import nn

from kvchat_kernels.silu_mul import gelu_tanh_mul, silu_mul
from kvchat_kernels.skinny_linear import skinny_linear

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Activations by the names of their classes, torch's own and transformers'.
_GATES: dict[str, Gate] = {
    "SiLU": silu_mul,
    "SiLUActivation": silu_mul,
    "GELUTanh": gelu_tanh_mul,
    "PytorchGELUTanh": gelu_tanh_mul,
}


def takes_kernels(x: torch.Tensor) -> bool:
    """Tell whether operations on `x` go through kernels of kvchat_kernels."""
    return x.is_cuda


def gate_of(act: Callable[[torch.Tensor], torch.Tensor]) -> Gate | None:
    """Return what computes act(gate) * up at once, None where nothing does."""
    return _GATES.get(type(act).__name__) if isinstance(act, nn.Module) else None


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return what torch's linear does, by the kernel for 1 to 16 rows: x [..., in_features]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return skinny_linear(rows, weight, bias).view(*x.shape[:-1], -1)
