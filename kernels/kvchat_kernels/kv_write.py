"""Writes a step's keys and values to their slots: as they are, or normed and rotated before.

`rope_kv_write` prepares a step's projections for attention, in one pass over a merged QKV
projection: it norms each head where the model family does, rotates queries and keys, and writes
keys and values. Positions are given as angles.
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.launch import Launch, dense, next_power_of_2, uses_triton
from kvchat_kernels.row_operations import rms_norm_reference

# Elements of a token's keys that a program of the plain write copies.
_BLOCK = 1024
# Elements of a tile: with heads of 128 dimensions, 16 per thread, 8 in each half of the head.
_TILE = 1024
_NUM_WARPS = 2


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


def kv_write_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Launch:
    """Return the launch; see `kv_write` for the shapes."""
    from kvchat_kernels.kv_write_kernels import kv_write_kernel

    assert key.shape[0] == value.shape[0] == slot_mapping.shape[0]
    assert key.shape[1:] == key_pool.shape[2:], (key.shape, key_pool.shape)
    assert value.shape[1:] == value_pool.shape[2:], (value.shape, value_pool.shape)
    assert key.stride(-1) == 1, key.stride()
    assert value.stride(-1) == 1, value.stride()
    assert key_pool.is_contiguous()
    assert value_pool.is_contiguous()
    assert slot_mapping.is_contiguous()
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[-1]
    num_parts = -(-num_heads * max(key_dim, value_dim) // _BLOCK)
    values = {
        "key_ptr": key,
        "value_ptr": value,
        "key_pool_ptr": key_pool,
        "value_pool_ptr": value_pool,
        "slot_ptr": slot_mapping,
        "key_token_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_token_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK": _BLOCK,
    }
    return Launch(kv_write_kernel, (num_tokens, num_parts), values, num_warps=4)


def rope_kv_write_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    destination: StepKv,
    norms: HeadNorms | None,
    rotated: torch.Tensor,
) -> Launch:
    """Return the launch that fills `rotated` and the pools; see `rope_kv_write` for the shapes."""
    from kvchat_kernels.kv_write_kernels import rope_kv_write_kernel

    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert destination.key_pool.is_contiguous()
    assert destination.value_pool.is_contiguous()
    assert rotated.is_contiguous()
    assert rotation.cos.stride() == rotation.sin.stride()
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    block_heads = max(1, _TILE // next_power_of_2(max(key_dim, value_dim)))
    block_heads = min(block_heads, next_power_of_2(num_heads))
    num_tiles = -(-num_heads // block_heads) + 2 * -(-num_kv_heads // block_heads)
    values = {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "rotated_ptr": rotated,
        "key_pool_ptr": destination.key_pool,
        "value_pool_ptr": destination.value_pool,
        "slot_ptr": destination.slot_mapping,
        "cos_ptr": rotation.cos,
        "sin_ptr": rotation.sin,
        "query_weight_ptr": norms.query_weight if norms is not None else None,
        "key_weight_ptr": norms.key_weight if norms is not None else None,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "key_token_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_token_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "angle_token_stride": rotation.cos.stride(0),
        "angle_stride": rotation.cos.stride(1),
        "eps": norms.eps if norms is not None else 0.0,
        "offset": norms.offset if norms is not None else 0.0,
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PAIRS": rotation.rotary_dim // 2,
        "IS_INTERLEAVED": rotation.is_interleaved,
        "BLOCK_H": block_heads,
        "BLOCK_P": next_power_of_2(rotation.rotary_dim // 2),
        "BLOCK_R": next_power_of_2(key_dim - rotation.rotary_dim),
        "BLOCK_D": next_power_of_2(value_dim),
    }
    return Launch(rope_kv_write_kernel, (num_tokens, num_tiles), values, num_warps=_NUM_WARPS)
