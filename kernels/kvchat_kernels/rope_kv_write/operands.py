"""What the fused write is given, in three parts: the rotation, the norms of heads, the KV's place.

Knows shapes. One Rotation serves all layers of a step that share their frequencies.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position encoding of one step (RoFormer: Su et al., 2021).

    cos, sin        [num_tokens, rotary_dim / 2], any dtype and strides, attention scaling included.
                    transformers hands over each angle twice: take `[..., : rotary_dim // 2]` of
                    what is doubled by `cat`, `[..., ::2]` of what is doubled by
                    `repeat_interleave`
    is_interleaved  pairs are dimensions (2i, 2i + 1), as in Cohere and GLM; otherwise
                    (i, i + rotary_dim / 2), as in Llama

    Only the first `rotary_dim` dimensions of a head are rotated; the others pass.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        assert self.cos.shape == self.sin.shape, (self.cos.shape, self.sin.shape)
        assert self.cos.ndim == 2, self.cos.shape

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query head and each key head, before they are rotated.

    query_weight, key_weight   [key_dim]
    eps                        added to the mean square
    offset                     added to the weights: 1.0 for Gemma, which stores them less one
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class StepKv:
    """Where a step's keys and values go.

    key_pool       [num_blocks, block_size, num_kv_heads, key_dim], contiguous
    value_pool     [num_blocks, block_size, num_kv_heads, value_dim], contiguous
    slot_mapping   [num_tokens] int64; -1 writes nothing, padding rows name slots of the scratch
                   block 0 and may repeat, all others are distinct
    """

    key_pool: torch.Tensor
    value_pool: torch.Tensor
    slot_mapping: torch.Tensor
