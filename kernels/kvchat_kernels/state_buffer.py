"""StateBuffer: the state of one sequence's recurrent layers, as bytes on the device.

The cache keeps and restores the bytes; the model reads and writes them as tensors. It is the
counterpart of `kv_layer.py` for layers whose memory does not grow with the context.
"""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class StateBuffer:
    """The state after a sequence's first `num_tokens` tokens.

    data    [num_bytes] uint8 on the device, contiguous; zeros before the first token
    views   tensors that share the memory of `data`; the model makes them at its first step

    Its owner is the sequence's block table. A step changes it in place.
    """

    data: torch.Tensor
    num_tokens: int = 0
    views: tuple[Any, ...] = field(default=())

    def copy(self) -> "StateBuffer":
        """Return the same state in memory of its own."""
        return StateBuffer(self.data.clone(), self.num_tokens)

    def become(self, other: "StateBuffer") -> None:
        """Take the value of `other`; the views stay valid."""
        self.data.copy_(other.data)
        self.num_tokens = other.num_tokens
