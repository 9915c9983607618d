"""Linear layers of a model in low precision on a CPU: few rows by compiled kernels, in place.

torch's own product of one row in bfloat16 takes two to three times as long as reading the weights.
Weights stay where they are and are held once.
"""

import os
from typing import Any

import torch
from torch import nn

from kvchat.model.packed.quantise import pack_of
from kvchat_kernels.linear.cpu import FloatProduct

# A step of a model needs a dozen compiled shapes; what chats need again and again is there for the
# next. oneDNN itself keeps 1,024, and so grew by a gigabyte over a chat.
_NUM_KEPT = "64"
# oneDNN's own, and that of ideep, through which torch calls it. Both are read at the first product.
_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_kept_shapes() -> None:
    """Let this process's libraries keep few compiled shapes; before the first product is computed.

    What the user has set stays.
    """
    for name in _LIMITS:
        os.environ.setdefault(name, _NUM_KEPT)


def use_cpu_products(module: Any) -> None:
    """Replace the forwards of a model's linear layers, where it is in low precision on a CPU."""
    if module.device.type != "cpu" or module.dtype == torch.float32:
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and pack_of(layer) is None:
            product = FloatProduct(layer.weight.detach(), layer.bias)
            layer.forward = product  # type: ignore[method-assign, assignment]
