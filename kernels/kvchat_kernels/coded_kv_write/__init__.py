"""Writes a step's keys and values to their slots in few bits, with a scale for each group. Turns
queries as keys are turned, and what turned values add up to back.

The reference says what the stored bytes are; a GPU's kernel stores the same ones, so that KV kept
by one device is read by another.
"""

import torch

from kvchat_kernels.coded_kv_write.reference import CodedPools, coded_write
from kvchat_kernels.kv_code import KvCode, turned_queries
from kvchat_kernels.launch import dense, uses_triton

__all__ = ["CodedPools", "coded_kv_write", "turn_queries"]


def coded_kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    pools: CodedPools,
    code: KvCode,
    slot_mapping: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Store new keys and values, rounded, in place.

    key            [num_tokens, num_kv_heads, key_dim], any floating dtype and strides. On a GPU a
                   last dimension that is not dense is copied first
    value          [num_tokens, num_kv_heads, value_dim], likewise
    pools          the four tensors of a `CodedKv`, contiguous
    slot_mapping   [num_tokens] int64, as of `kv_write`
    impl           auto, triton or reference
    """
    if uses_triton(key.device, impl):
        from kvchat_kernels.coded_kv_write.kernel import coded_kv_write_launch

        launch = coded_kv_write_launch(dense(key), dense(value), pools, code, slot_mapping)
        launch.run()
    else:
        coded_write(key, value, pools, code, slot_mapping)


def turn_queries(query: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Return queries [num_tokens, num_heads, dim] whose products with turned keys are those with
    the keys, in new memory. `dim` is a multiple of 8; `impl` as of `coded_kv_write`.
    """
    if not uses_triton(query.device, impl):
        return turned_queries(query)
    from kvchat_kernels.coded_kv_write.kernel import turned_queries_launch

    query = dense(query)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    turned_queries_launch(query, out).run()
    return out
