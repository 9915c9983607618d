"""Prepares a step's projections for attention, in one pass over a merged QKV projection.

Norms each head where the model family does, rotates queries and keys, and writes keys and values to
their slots in the pools. Positions are given as angles.
"""

import torch

from kvchat_kernels.launch import dense, uses_triton
from kvchat_kernels.rope_kv_write.operands import HeadNorms, Rotation, StepKv
from kvchat_kernels.rope_kv_write.reference import rope_kv_write_reference

__all__ = ["HeadNorms", "Rotation", "StepKv", "rope_kv_write"]


def rope_kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    destination: StepKv,
    norms: HeadNorms | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Norm, rotate and return the queries; norm and rotate the keys, and write KV to its slots.

    query         [num_tokens, num_heads, key_dim]
    key           [num_tokens, num_kv_heads, key_dim]
    value         [num_tokens, num_kv_heads, value_dim]
    impl          auto, triton or reference

    The three may be views of one merged projection, with any strides; a last dimension that is not
    dense is copied first. Returns new rotated queries, [num_tokens, num_heads, key_dim] contiguous
    in the query's dtype, owned by the caller. Keys and values are cast to their pools' dtypes. The
    kernel computes in float32 and rounds once.
    """
    num_tokens, _, key_dim = query.shape
    assert key.shape[0] == value.shape[0] == destination.slot_mapping.shape[0] == num_tokens
    assert rotation.cos.shape[0] == num_tokens, (rotation.cos.shape, num_tokens)
    assert rotation.rotary_dim <= key_dim, (rotation.rotary_dim, key_dim)
    assert key.shape[1:] == destination.key_pool.shape[2:]
    assert value.shape[1:] == destination.value_pool.shape[2:]
    assert key.shape[2] == key_dim
    if uses_triton(query.device, impl):
        from kvchat_kernels.rope_kv_write.kernel import rope_kv_write_launch

        rotated = query.new_empty(query.shape)
        query, key, value = dense(query), dense(key), dense(value)
        rope_kv_write_launch(query, key, value, rotation, destination, norms, rotated).run()
        return rotated
    return rope_kv_write_reference(query, key, value, rotation, destination, norms)
