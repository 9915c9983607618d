"""Keeps what oneDNN compiles on a CPU in bounds: few numbers of rows, and few shapes kept.

oneDNN compiles a product for every shape it meets and keeps 1,024 of them, and torch's layer above
it as many: over a chat, whose turns are of every length, a gigabyte that no setting of kvchat's
bounds. Float32 products are another library's, which keeps nothing.
"""

import os
from types import MethodType
from typing import Any

import torch
from torch import nn

from kvchat_kernels.few_sizes import linear_of_few_sizes

# A step of a model needs a dozen; what chats need again and again is there for the next.
_NUM_KEPT = "64"
# oneDNN's own, and that of ideep, through which torch calls it. Both are read at the first product.
_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_kept_shapes() -> None:
    """Let this process's libraries keep few compiled shapes; before the first product is computed.

    What the user has set stays.
    """
    for name in _LIMITS:
        os.environ.setdefault(name, _NUM_KEPT)


def take_few_shapes(module: Any) -> None:
    """Let the linear layers of a model in low precision on a CPU see few numbers of rows."""
    if module.device.type != "cpu" or module.dtype == torch.float32:
        return
    for layer in module.modules():
        if type(layer) is nn.Linear:
            # As a method of its own, which a deep copy binds to the copy.
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear_of_few_sizes(x, layer.weight, layer.bias)
