"""KeyRotation: what a position does to the keys of a layer, so that a key can move to another one.

Rotary embeddings turn each pair of a key's numbers by an angle that grows evenly with the position.
So a key that is turned back by the angle of `n` positions is the key of the same hidden state `n`
positions earlier (StreamingLLM, Xiao et al. 2024). Scaled embeddings (linear, llama3, YaRN) only
choose other frequencies, or multiply all keys with one factor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

ChangeKeys = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """How one layer turns its keys.

    frequencies   [num_pairs] float64 on the CPU, radians a position; empty where position changes
                  no key. Numbers after the first `2 * num_pairs` of a head stay as they are
    neighbours    whether a pair is two neighbours; otherwise number `i` belongs to the number `i`
                  of the second half
    """

    frequencies: torch.Tensor
    neighbours: bool = False

    def fits(self, key_dim: int) -> bool:
        return 2 * len(self.frequencies) <= key_dim

    def moved(self, keys: torch.Tensor, num_back: int) -> torch.Tensor:
        """Return float32 keys [..., key_dim] as they are `num_back` positions earlier."""
        num_pairs = len(self.frequencies)
        if not num_pairs or not num_back:
            return keys
        angles = self.frequencies * -num_back
        cos, sin = (f(angles).float().to(keys.device) for f in (torch.cos, torch.sin))
        moved, shape = keys.clone(), (-1, 2) if self.neighbours else (2, -1)
        (one, other), to = (
            each[..., : 2 * num_pairs].unflatten(-1, shape).unbind(-1 if self.neighbours else -2)
            for each in (keys, moved)
        )
        torch.sub(one * cos, other * sin, out=to[0])
        torch.add(other * cos, one * sin, out=to[1])
        return moved
