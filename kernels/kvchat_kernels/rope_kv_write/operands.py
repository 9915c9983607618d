"""The operands of `rope_kv_write`: the rotation, the head norms and the KV's destination.

One Rotation serves all layers of a step that share their frequencies.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position encoding of one step (RoFormer: Su et al., 2021).

    cos, sin        [num_tokens, rotary_dim / 2], any dtype and strides, attention scaling included.
                    transformers' tensors have each angle twice: pass `[..., : rotary_dim // 2]` if
                    it doubles them by `cat`, `[..., ::2]` if by `repeat_interleave`
    is_interleaved  pairs are dimensions (2i, 2i + 1), as in Cohere and GLM; otherwise
                    (i, i + rotary_dim / 2), as in Llama

    Only the first `rotary_dim` dimensions of a head are rotated; the others are copied.
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
    """RMS norms of each query head and each key head, applied before the rotation.

    query_weight, key_weight   [key_dim]
    eps                        added to the mean square
    offset                     added to the weights: 1.0 for Gemma, which stores them minus one
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class StepKv:
    """The destination of a step's keys and values.

    key_pool       [num_blocks, block_size, num_kv_heads, key_dim], contiguous
    value_pool     [num_blocks, block_size, num_kv_heads, value_dim], contiguous
    slot_mapping   [num_tokens] int64; -1 writes nothing. Padding rows use slots of the scratch
                   block, which may repeat; all other slots are distinct
    """

    key_pool: torch.Tensor
    value_pool: torch.Tensor
    slot_mapping: torch.Tensor
