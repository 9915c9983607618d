"""The torch reference of a write in few bits: round, then scatter."""

import torch

from kvchat_kernels.kv_code import KvCode

# Keys, their scales, values, their scales: the tensors of a `CodedKv`.
CodedPools = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def coded_write(
    key: torch.Tensor,
    value: torch.Tensor,
    pools: CodedPools,
    code: KvCode,
    slot_mapping: torch.Tensor,
) -> None:
    """Store new keys and values, rounded; see `coded_kv_write` for the shapes."""
    is_written = slot_mapping >= 0
    if not bool(is_written.all()):
        key, value, slot_mapping = (x[is_written] for x in (key, value, slot_mapping))
    parts = (*code.keys.quantised(key), *code.values.quantised(value))
    for tensor, part in zip(pools, parts, strict=True):
        tensor.flatten(0, 1).index_copy_(0, slot_mapping, part)
