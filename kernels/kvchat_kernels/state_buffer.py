"""StateBuffer: the state of one sequence's recurrent layers, as bytes on the device.

The cache keeps and restores the bytes; the model reads and writes them as tensors. It is the
counterpart of `kv_layer.py` for layers whose memory does not grow with the context.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class StateBuffer:
    """The state after a sequence's first `num_tokens` tokens.

    data    [num_bytes] uint8 on the device, contiguous; zeros before the first token
    views   tensors that share the memory of `data`; the model makes them at its first step

    A step may leave its last tokens, which are guesses, out of `data`: it has then read all but the
    last `num_unread` tokens. `inputs` are what the recurrent layers need of these, two of [tokens,
    bytes] uint8: the first has theirs, the other is for the next step's guesses. `reader` lets
    `data` read them.

    Its owner is the sequence's block table. A step changes it in place.
    """

    data: torch.Tensor
    num_tokens: int = 0
    views: tuple[Any, ...] = field(default=())
    num_unread: int = 0
    inputs: tuple[torch.Tensor, torch.Tensor] | None = None
    reader: "Callable[[StateBuffer], None] | None" = None

    @property
    def num_read(self) -> int:
        """The number of tokens that `data` has read."""
        return self.num_tokens - self.num_unread

    def cut(self, num_tokens: int) -> None:
        """Take back the newest tokens, which `data` has not read; `num_tokens` stay."""
        num_wrong = self.num_tokens - num_tokens
        assert 0 <= num_wrong <= self.num_unread
        self.num_tokens, self.num_unread = num_tokens, self.num_unread - num_wrong

    def read_all(self) -> torch.Tensor:
        """Return `data` once it has read all tokens."""
        if self.num_unread:
            assert self.reader is not None
            self.reader(self)
            self.num_unread = 0
        return self.data

    def copy(self) -> "StateBuffer":
        """Return the same state in memory of its own."""
        copied = StateBuffer(torch.empty_like(self.data))
        copied.become(self)
        return copied

    @torch.inference_mode()  # in which a step has allocated `inputs`
    def become(self, other: "StateBuffer") -> None:
        """Take the value of `other`; the views stay valid."""
        self.data.copy_(other.data)
        self.num_tokens, self.num_unread = other.num_tokens, other.num_unread
        self.reader = other.reader
        if other.num_unread:
            assert other.inputs is not None
            if self.inputs is None:
                self.inputs = torch.empty_like(other.inputs[0]), torch.empty_like(other.inputs[1])
            self.inputs[0][: self.num_unread] = other.inputs[0][: self.num_unread]
