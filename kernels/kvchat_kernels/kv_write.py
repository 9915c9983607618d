"""Writes a step's keys and values to their slots: as they are, or normed and rotated before.

`rope_kv_write` prepares a step's projections for attention, in one pass over a merged QKV
projection: it norms each head where the model family does, rotates queries and keys, and writes
keys and values. Positions are given as angles.
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.launch import dense, uses_triton
from kvchat_kernels.row_operations import rms_norm_reference


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
        from kvchat_kernels.kv_write_kernels import kv_write_launch

        kv_write_launch(dense(key), dense(value), key_pool, value_pool, slot_mapping).run()
    else:
        kv_write_reference(key, value, key_pool, value_pool, slot_mapping)


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
        from kvchat_kernels.kv_write_kernels import rope_kv_write_launch

        rotated = query.new_empty(query.shape)
        query, key, value = dense(query), dense(key), dense(value)
        rope_kv_write_launch(query, key, value, rotation, destination, norms, rotated).run()
        return rotated
    return rope_kv_write_reference(query, key, value, rotation, destination, norms)


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
