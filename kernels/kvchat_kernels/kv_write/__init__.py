"""Write a step's keys and values into their slots.

Knows pools and slots; not which sequence owns a slot.
"""

import torch


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter new keys and values into the pools, in place.

    key            [num_tokens, num_kv_heads, key_dim], cast to the pool's dtype
    value          [num_tokens, num_kv_heads, value_dim], likewise
    key_pool       [num_blocks, block_size, num_kv_heads, key_dim]
    value_pool     [num_blocks, block_size, num_kv_heads, value_dim]
    slot_mapping   [num_tokens] int64, `block_id * block_size + offset`; padding rows name slots of
                   the scratch block 0, and may repeat; all other slots are distinct
    """
    assert key.shape[0] == value.shape[0] == slot_mapping.shape[0]
    key_pool.flatten(0, 1).index_copy_(0, slot_mapping, key.to(key_pool.dtype))
    value_pool.flatten(0, 1).index_copy_(0, slot_mapping, value.to(value_pool.dtype))
