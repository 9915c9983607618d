"""The KV write, alone and after norm and rotation, as Triton kernels for keys and values together.

Shapes: H heads of a tile, P pairs of dimensions, R dimensions that are not rotated, D dimensions of
a value. A head is held in three pieces: `first` and `second` of each pair, and the rest. So both
dimensions of a rotation are in the same thread.
"""

import triton
import triton.language as tl


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
