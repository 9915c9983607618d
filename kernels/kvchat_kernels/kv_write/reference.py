"""The torch twin of the KV write: two scatters."""

import torch


def kv_write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter new keys and values into the pools, in place; see `kv_write` for the shapes."""
    if slot_mapping.numel() and slot_mapping.min() < 0:
        is_written = slot_mapping >= 0
        key, value, slot_mapping = key[is_written], value[is_written], slot_mapping[is_written]
    key_pool.flatten(0, 1).index_copy_(0, slot_mapping, key.to(key_pool.dtype))
    value_pool.flatten(0, 1).index_copy_(0, slot_mapping, value.to(value_pool.dtype))
