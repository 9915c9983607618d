"""Writes a step's keys and values to their slots.

`rope_kv_write` does the same for keys that still need their norm or rotation.
"""

import torch

from kvchat_kernels.kv_write.reference import kv_write_reference
from kvchat_kernels.launch import dense, uses_triton

__all__ = ["kv_write"]


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Scatter new keys and values into the pools, in place.

    key            [num_tokens, num_kv_heads, key_dim], cast to the pool's dtype; any strides. On a
                   GPU a last dimension that is not dense is copied first
    value          [num_tokens, num_kv_heads, value_dim], likewise
    key_pool       [num_blocks, block_size, num_kv_heads, key_dim], contiguous
    value_pool     [num_blocks, block_size, num_kv_heads, value_dim], contiguous
    slot_mapping   [num_tokens] int64, `block_id * block_size + offset`. A token at slot -1 is not
                   written. Padding rows use slots of the scratch block, which may repeat; all other
                   slots are distinct
    impl           auto, triton or reference
    """
    if uses_triton(key.device, impl):
        from kvchat_kernels.kv_write.kernel import kv_write_launch

        kv_write_launch(dense(key), dense(value), key_pool, value_pool, slot_mapping).run()
    else:
        kv_write_reference(key, value, key_pool, value_pool, slot_mapping)
