"""The torch reference of the KV write: two scatters."""

import torch


def kv_write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter new keys and values into the pools, in place; see `kv_write` for the shapes."""
    if key.dtype != key_pool.dtype:
        key = key.to(key_pool.dtype)
    if value.dtype != value_pool.dtype:
        value = value.to(value_pool.dtype)
    if slot_mapping.device.type in ("cpu", "meta"):
        # Slots of -1 are rare on a CPU, and a search for them would cost time in every layer of
        # every step: so try without. On the meta device there are no values to check.
        try:
            _scatter(key, value, key_pool, value_pool, slot_mapping)
        except IndexError:
            pass
        else:
            return
    is_written = slot_mapping >= 0
    _scatter(key[is_written], value[is_written], key_pool, value_pool, slot_mapping[is_written])


def _scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    key_pool.flatten(0, 1).index_copy_(0, slots, key)
    value_pool.flatten(0, 1).index_copy_(0, slots, value)
