"""The KV write, alone and after norm and rotation, as Triton kernels for keys and values together.

Shapes: H heads of a tile, P pairs of dimensions, R dimensions that are not rotated, D dimensions of
a value. A head is held in three pieces: `first` and `second` of each pair, and the rest. So both
dimensions of a rotation are in the same thread.
"""

import torch
import triton
import triton.language as tl

from kvchat_kernels.kv_write import HeadNorms, Rotation, StepKv
from kvchat_kernels.launch import Launch, next_power_of_2

_BLOCK = 1024


@triton.jit
def _copy_row(
    source_ptr, target_ptr, head_stride, part, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    element = part * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = element < HEADS * DIM
    offset = (element // DIM).to(tl.int64) * head_stride + element % DIM
    row = tl.load(source_ptr + offset, mask=inside, other=0.0)
    tl.store(target_ptr + element, row.to(target_ptr.dtype.element_ty), mask=inside)


@triton.jit
def kv_write_kernel(
    key_ptr, value_ptr, key_pool_ptr, value_pool_ptr, slot_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, part) copies BLOCK elements of a token's keys and as many of its values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    if part * BLOCK < HEADS * KEY_DIM:
        _copy_row(
            key_ptr + token * key_token_stride, key_pool_ptr + slot * (HEADS * KEY_DIM),
            key_head_stride, part, HEADS, KEY_DIM, BLOCK,
        )  # fmt: skip
    if part * BLOCK < HEADS * VALUE_DIM:
        _copy_row(
            value_ptr + token * value_token_stride, value_pool_ptr + slot * (HEADS * VALUE_DIM),
            value_head_stride, part, HEADS, VALUE_DIM, BLOCK,
        )  # fmt: skip


def kv_write_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Launch:
    """Return the launch; see `kv_write` for the shapes."""
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
    num_parts = triton.cdiv(num_heads * max(key_dim, value_dim), _BLOCK)
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


# Elements of a tile: with heads of 128 dimensions, 16 per thread, 8 in each half of the head.
_TILE = 1024
_NUM_WARPS = 2


@triton.jit
def _load_pairs(row_ptr, inside, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
                BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """Return both dimensions of each pair, [H, P] float32; `row_ptr` and `inside` are [H, 1]."""
    if IS_INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_P)[None, :]  # [1, 2 P]
        both = tl.load(row_ptr + dim, mask=inside & (dim < 2 * PAIRS), other=0.0)  # [H, 2 P]
        first, second = tl.split(tl.reshape(both, (BLOCK_H, BLOCK_P, 2)))
    else:
        pair = tl.arange(0, BLOCK_P)[None, :]  # [1, P]
        first = tl.load(row_ptr + pair, mask=inside & (pair < PAIRS), other=0.0)
        second = tl.load(row_ptr + PAIRS + pair, mask=inside & (pair < PAIRS), other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(row_ptr, inside, first, second, PAIRS: tl.constexpr,
                 IS_INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr,
                 BLOCK_P: tl.constexpr):  # fmt: skip
    first = first.to(row_ptr.dtype.element_ty)
    second = second.to(row_ptr.dtype.element_ty)
    if IS_INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_P)[None, :]
        both = tl.reshape(tl.join(first, second), (BLOCK_H, 2 * BLOCK_P))
        tl.store(row_ptr + dim, both, mask=inside & (dim < 2 * PAIRS))
    else:
        pair = tl.arange(0, BLOCK_P)[None, :]
        tl.store(row_ptr + pair, first, mask=inside & (pair < PAIRS))
        tl.store(row_ptr + PAIRS + pair, second, mask=inside & (pair < PAIRS))


@triton.jit
def _norm_and_rotate(
    source_ptr, target_ptr, weight_ptr, cos_ptr, sin_ptr, angle_stride, first_head, source_stride,
    eps, offset, HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    head = first_head + tl.arange(0, BLOCK_H)[:, None]  # [H, 1]
    inside = head < HEADS
    source = source_ptr + head.to(tl.int64) * source_stride
    target = target_ptr + head * DIM
    first, second = _load_pairs(source, inside, PAIRS, IS_INTERLEAVED, BLOCK_H, BLOCK_P)
    rest_dim = 2 * PAIRS + tl.arange(0, BLOCK_R)[None, :]  # [1, R]
    rest_inside = inside & (rest_dim < DIM)
    if DIM > 2 * PAIRS:
        rest = tl.load(source + rest_dim, mask=rest_inside, other=0.0).to(tl.float32)  # [H, R]
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if DIM > 2 * PAIRS:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]  # [H, 1]
        weights = weight_ptr + tl.zeros((1, 1), dtype=tl.int32)
        everywhere = tl.full((1, 1), 1, dtype=tl.int1)
        left, right = _load_pairs(weights, everywhere, PAIRS, IS_INTERLEAVED, 1, BLOCK_P)
        first *= scale * (left + offset)
        second *= scale * (right + offset)
        if DIM > 2 * PAIRS:
            weight = tl.load(weight_ptr + rest_dim, mask=rest_dim < DIM, other=0.0)
            rest *= scale * (weight.to(tl.float32) + offset)
    pair = tl.arange(0, BLOCK_P)[None, :]  # [1, P]
    cos = tl.load(cos_ptr + pair * angle_stride, mask=pair < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + pair * angle_stride, mask=pair < PAIRS, other=0.0).to(tl.float32)
    turned, partner = first * cos - second * sin, second * cos + first * sin
    _store_pairs(target, inside, turned, partner, PAIRS, IS_INTERLEAVED, BLOCK_H, BLOCK_P)
    if DIM > 2 * PAIRS:
        tl.store(target + rest_dim, rest.to(target.dtype.element_ty), mask=rest_inside)


@triton.jit
def rope_kv_write_kernel(
    query_ptr, key_ptr, value_ptr, rotated_ptr, key_pool_ptr, value_pool_ptr, slot_ptr,
    cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr,
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, angle_token_stride, angle_stride, eps, offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, tile): first the query heads' tiles, then the keys', then the values'."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(HEADS, BLOCK_H)
    kv_tiles = tl.cdiv(KV_HEADS, BLOCK_H)
    cos_ptr += token * angle_token_stride
    sin_ptr += token * angle_token_stride
    if tile < query_tiles:
        _norm_and_rotate(
            query_ptr + token * query_token_stride, rotated_ptr + token * (HEADS * KEY_DIM),
            query_weight_ptr, cos_ptr, sin_ptr, angle_stride, tile * BLOCK_H, query_head_stride,
            eps, offset, HEADS, KEY_DIM, PAIRS, IS_INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_R,
        )  # fmt: skip
        return
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    if tile < query_tiles + kv_tiles:
        _norm_and_rotate(
            key_ptr + token * key_token_stride, key_pool_ptr + slot * (KV_HEADS * KEY_DIM),
            key_weight_ptr, cos_ptr, sin_ptr, angle_stride, (tile - query_tiles) * BLOCK_H,
            key_head_stride, eps, offset, KV_HEADS, KEY_DIM, PAIRS, IS_INTERLEAVED, BLOCK_H,
            BLOCK_P, BLOCK_R,
        )  # fmt: skip
        return
    head = (tile - query_tiles - kv_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [H, 1]
    dim = tl.arange(0, BLOCK_D)[None, :]  # [1, D]
    inside = (head < KV_HEADS) & (dim < VALUE_DIM)
    source = value_ptr + token * value_token_stride + head.to(tl.int64) * value_head_stride + dim
    target = value_pool_ptr + slot * (KV_HEADS * VALUE_DIM) + head * VALUE_DIM + dim
    value = tl.load(source, mask=inside, other=0.0)  # [H, D]
    tl.store(target, value.to(value_pool_ptr.dtype.element_ty), mask=inside)


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
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert destination.key_pool.is_contiguous()
    assert destination.value_pool.is_contiguous()
    assert rotated.is_contiguous()
    assert rotation.cos.stride() == rotation.sin.stride()
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    block_heads = max(1, _TILE // next_power_of_2(max(key_dim, value_dim)))
    block_heads = min(block_heads, next_power_of_2(num_heads))
    num_tiles = triton.cdiv(num_heads, block_heads) + 2 * triton.cdiv(num_kv_heads, block_heads)
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
