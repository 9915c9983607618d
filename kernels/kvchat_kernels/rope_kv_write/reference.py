"""The torch reference of the fused write: norm, rotation and two scatters in sequence."""

import torch

from kvchat_kernels.kv_write.reference import kv_write_reference
from kvchat_kernels.rms_norm.reference import rms_norm_reference
from kvchat_kernels.rope_kv_write.operands import HeadNorms, Rotation, StepKv


def rope_kv_write_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    destination: StepKv,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """Norm, rotate, write; see `rope_kv_write` for the shapes."""
    if norms is not None:
        query = rms_norm_reference(query, norms.query_weight, norms.eps, norms.offset)
        key = rms_norm_reference(key, norms.key_weight, norms.eps, norms.offset)
    pools = destination.key_pool, destination.value_pool
    kv_write_reference(rotate(key, rotation), value, *pools, destination.slot_mapping)
    return rotate(query, rotation)


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate each pair of dimensions by its angle: [num_tokens, num_heads, dim], same dtype."""
    rotary_dim = rotation.rotary_dim
    turned, passed = heads[..., :rotary_dim], heads[..., rotary_dim:]
    if rotation.is_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    cos = rotation.cos.to(heads.dtype)[:, None]
    sin = rotation.sin.to(heads.dtype)[:, None]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotation.is_interleaved:
        turned = torch.stack(parts, dim=-1).flatten(-2)
    else:
        turned = torch.cat(parts, dim=-1)
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned
