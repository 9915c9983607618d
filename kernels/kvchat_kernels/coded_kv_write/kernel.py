"""The write in few bits as one Triton kernel for keys and values together, and one for queries.

Shapes: H heads of a tile, B groups of a head, G numbers of a group, both padded to powers of two.
"""

import torch
import triton
import triton.language as tl

from kvchat_kernels.coded_kv_write.reference import CodedPools
from kvchat_kernels.kv_code import LEAST, STEPS, UNITS, Form, KvCode, group_size
from kvchat_kernels.launch import Launch, next_power_of_2

_TILE = 1024
_LEAST, _UNITS = tl.constexpr(LEAST), tl.constexpr(float(UNITS))
_STEP, _LAST, _GAP = (tl.constexpr(x) for x in (STEPS.start, STEPS[-1], STEPS.step))
_INT4, _E4M3 = tl.constexpr(Form.INT4.value), tl.constexpr(Form.E4M3.value)


@triton.jit
def _bfloat16_bits(x):
    """Return floats rounded to bfloat16, half to even, as the low 16 bits of int32.

    In integers, so that the interpreter rounds as a GPU does. Infinity stays; NaN is for the
    caller.
    """
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _whole(x):
    """Return floats below 2^22 as whole numbers, half to even: adding 1.5 * 2^23 leaves no more."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _turned(x, ROUNDS: tl.constexpr):
    """Return groups [H, B, 2 ** ROUNDS] times the Hadamard matrix, added in the order of `turned`.

    Each round takes neighbours and puts their sums before their differences. So the numbers that
    were 1, 2, 4, ... apart are neighbours one round after another, and all are in place at the end.
    """
    for _ in tl.static_range(ROUNDS):
        pairs = tl.reshape(x, (x.shape[0] * x.shape[1], x.shape[2] // 2, 2))
        first, second = tl.split(pairs)
        both = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        x = tl.reshape(both, x.shape)
    return x


@triton.jit
def _best_scale(x, peak):
    """Return [H, B] the scales of 4 bits of groups [H, B, G], as `kv_code` searches them."""
    unit = tl.math.div_rn(peak, tl.full(peak.shape, _UNITS, dtype=tl.float32))
    unit = tl.where(tl.max(x, axis=2) == peak, -unit, unit)
    # Of a group without usable numbers nothing is searched: the caller has its scale.
    is_usable = (peak >= _LEAST) & (peak < float("inf"))
    divisor = tl.broadcast_to(tl.where(is_usable, unit, 1.0)[:, :, None], x.shape)
    whole = _whole(tl.math.div_rn(tl.where(is_usable[:, :, None], x, 0.0), divisor))
    best = tl.full(peak.shape, -1.0, dtype=tl.float32)
    scale = tl.zeros(peak.shape, dtype=tl.float32)
    for step in tl.static_range(_STEP, _LAST + 1, _GAP):
        level = tl.minimum(tl.maximum(_whole(whole * (1.0 / step)), -8.0), 7.0)
        product = tl.sum(whole * level, axis=2)
        square = tl.sum(level * level, axis=2)
        square = tl.where(square > 0.0, square, 1.0)
        gain = tl.math.div_rn(product * product, square)
        is_better = gain > best
        best = tl.where(is_better, gain, best)
        scale = tl.where(is_better, tl.math.div_rn(product, square), scale)
    return tl.where(is_usable, scale * unit, peak)


@triton.jit
def _e4m3_bits(x):
    """Return floats of at most 448 as the nearest e4m3, half to even, in the low 8 bits of int32.

    In integers, for GPUs that have no such floats.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = _whole(tl.abs(x) * 512.0).to(tl.int32)
    return tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _write_heads(
    source_ptr, head_stride, numbers_ptr, scales_ptr, slot, first_head, HEADS: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, MOST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    num_groups: tl.constexpr = DIM // GROUP
    head = first_head + tl.arange(0, BLOCK_H)[:, None]  # [H, 1]
    group = tl.arange(0, BLOCK_B)[None, :]  # [1, B]
    number = tl.arange(0, BLOCK_G)[None, None, :]  # [1, 1, G]
    is_group = (head < HEADS) & (group < num_groups)  # [H, B]
    dim = (group * GROUP)[:, :, None] + number  # [1, B, G]
    inside = is_group[:, :, None] & (number < GROUP)
    source = source_ptr + head.to(tl.int64)[:, :, None] * head_stride + dim
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)  # [H, B, G]
    x = _turned(x, ROUNDS)
    peak = tl.max(tl.abs(x), axis=2)  # [H, B]
    is_nan = tl.max((x != x).to(tl.int32), axis=2) > 0
    # Divisions as torch's: `/` would be off in the last bits on a GPU.
    if FORM == _INT4:
        scale = _best_scale(x, peak)
    else:
        scale = tl.math.div_rn(peak, tl.full((BLOCK_H, BLOCK_B), MOST, dtype=tl.float32))
    scale = tl.where(peak < _LEAST, 0.0, scale)
    bits = tl.where(is_nan, 0x7FC0, _bfloat16_bits(scale)) & 0xFFFF
    divisor = (bits << 16).to(tl.float32, bitcast=True)
    is_usable = ((bits & 0x7FFF) > 0) & ((bits & 0x7FFF) < 0x7F80)
    divisor = tl.broadcast_to(tl.where(is_usable, divisor, 1.0)[:, :, None], x.shape)
    level = tl.where(is_usable[:, :, None], tl.math.div_rn(x, divisor), 0.0)
    place = slot * HEADS + head  # [H, 1]
    tl.store(scales_ptr + place * num_groups + group, bits.to(tl.int16), mask=is_group)
    numbers = numbers_ptr + (place * DIM)[:, :, None] + dim
    if FORM == _INT4:
        level = tl.minimum(tl.maximum(_whole(level), -8.0), 7.0).to(tl.int32) + 8
        halves = tl.permute(tl.reshape(level, (BLOCK_H, BLOCK_B, 2, BLOCK_G // 2)), (0, 1, 3, 2))
        lower, upper = tl.split(halves)  # [H, B, G / 2]
        half = tl.arange(0, BLOCK_G // 2)[None, None, :]
        numbers = (
            numbers_ptr + ((place * DIM)[:, :, None] + (group * GROUP)[:, :, None]) // 2 + half
        )
        tl.store(numbers, (lower | (upper << 4)).to(tl.uint8), mask=is_group[:, :, None])
    elif FORM == _E4M3:
        level = tl.minimum(tl.maximum(level, -MOST), MOST)
        tl.store(numbers, _e4m3_bits(level).to(tl.uint8), mask=inside)
    else:
        level = tl.minimum(tl.maximum(_whole(level), -MOST), MOST)
        tl.store(numbers, level.to(tl.int8), mask=inside)


@triton.jit
def coded_kv_write_kernel(
    key_ptr, value_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, slot_ptr,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr, KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr,
    KEY_MOST: tl.constexpr, VALUE_MOST: tl.constexpr, BLOCK_H: tl.constexpr,
    KEY_BLOCK_B: tl.constexpr, KEY_BLOCK_G: tl.constexpr, VALUE_BLOCK_B: tl.constexpr,
    VALUE_BLOCK_G: tl.constexpr, KEY_ROUNDS: tl.constexpr, VALUE_ROUNDS: tl.constexpr,
):  # fmt: skip
    """Program (token, tile) rounds and stores BLOCK_H heads: first the keys' tiles, then the
    values'.
    """
    token = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(HEADS, BLOCK_H)
    tile = tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    if tile < tiles:
        _write_heads(
            key_ptr + token * key_token_stride, key_head_stride, keys_ptr, key_scales_ptr, slot,
            tile * BLOCK_H, HEADS, KEY_DIM, KEY_GROUP, KEY_FORM, KEY_MOST, BLOCK_H, KEY_BLOCK_B,
            KEY_BLOCK_G, KEY_ROUNDS,
        )  # fmt: skip
    else:
        _write_heads(
            value_ptr + token * value_token_stride, value_head_stride, values_ptr,
            value_scales_ptr, slot, (tile - tiles) * BLOCK_H, HEADS, VALUE_DIM, VALUE_GROUP,
            VALUE_FORM, VALUE_MOST, BLOCK_H, VALUE_BLOCK_B, VALUE_BLOCK_G, VALUE_ROUNDS,
        )  # fmt: skip


def coded_kv_write_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    pools: CodedPools,
    code: KvCode,
    slot_mapping: torch.Tensor,
) -> Launch:
    """Return the launch; see `coded_kv_write` for the shapes."""
    keys, key_scales, values, value_scales = pools
    assert key.shape[0] == value.shape[0] == slot_mapping.shape[0]
    for given, stored, numbers in ((key, keys, code.keys), (value, values, code.values)):
        assert given.shape[1] == stored.shape[2], (given.shape, stored.shape)
        assert numbers.width(given.shape[2]) == stored.shape[3], (given.shape, stored.shape)
    assert key.stride(-1) == value.stride(-1) == 1
    assert all(tensor.is_contiguous() for tensor in (*pools, slot_mapping))
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[-1]
    key_group, value_group = key_dim // key_scales.shape[3], value_dim // value_scales.shape[3]
    block_heads = _heads_of_tile(num_heads, max(key_dim, value_dim))
    operands = {
        "key_ptr": key,
        "value_ptr": value,
        "keys_ptr": keys,
        "key_scales_ptr": key_scales.view(torch.int16),
        "values_ptr": values,
        "value_scales_ptr": value_scales.view(torch.int16),
        "slot_ptr": slot_mapping,
        "key_token_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_token_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_GROUP": key_group,
        "VALUE_GROUP": value_group,
        "KEY_FORM": code.keys.form.value,
        "VALUE_FORM": code.values.form.value,
        "KEY_MOST": code.keys.most,
        "VALUE_MOST": code.values.most,
        "BLOCK_H": block_heads,
        "KEY_BLOCK_B": next_power_of_2(key_dim // key_group),
        "KEY_BLOCK_G": next_power_of_2(key_group),
        "VALUE_BLOCK_B": next_power_of_2(value_dim // value_group),
        "VALUE_BLOCK_G": next_power_of_2(value_group),
        "KEY_ROUNDS": key_group.bit_length() - 1 if code.keys.turns(key_dim) else 0,
        "VALUE_ROUNDS": value_group.bit_length() - 1 if code.values.turns(value_dim) else 0,
    }
    grid = (num_tokens, 2 * triton.cdiv(num_heads, block_heads))
    # The search of scales holds three numbers in the place of one.
    searches = Form.INT4 in (code.keys.form, code.values.form)
    return Launch(coded_kv_write_kernel, grid, operands, num_warps=8 if searches else 4)


def _heads_of_tile(num_heads: int, dim: int) -> int:
    return min(max(1, _TILE // next_power_of_2(dim)), next_power_of_2(num_heads))


@triton.jit
def turned_queries_kernel(
    query_ptr, out_ptr, token_stride, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Program (token, tile) turns BLOCK_H heads of a query."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None, None]  # [H, 1, 1]
    group = tl.arange(0, BLOCK_B)[None, :, None]
    dim = group * GROUP + tl.arange(0, GROUP)[None, None, :]  # [1, B, G]
    inside = (head < HEADS) & (dim < DIM)
    source = query_ptr + token * token_stride + head * head_stride + dim
    x = _turned(tl.load(source, mask=inside, other=0.0).to(tl.float32), ROUNDS) * (1.0 / GROUP)
    to = out_ptr + (token * HEADS + head) * DIM + dim
    tl.store(to, x.to(out_ptr.dtype.element_ty), mask=inside)


def turned_queries_launch(query: torch.Tensor, out: torch.Tensor) -> Launch:
    """Return the launch; `query` has a dense last dimension, `out` is contiguous."""
    num_tokens, num_heads, dim = query.shape
    assert query.stride(-1) == 1
    assert out.is_contiguous()
    assert out.shape == query.shape
    group, block_heads = group_size(dim), _heads_of_tile(num_heads, dim)
    operands = {
        "query_ptr": query,
        "out_ptr": out,
        "token_stride": query.stride(0),
        "head_stride": query.stride(1),
        "HEADS": num_heads,
        "DIM": dim,
        "GROUP": group,
        "BLOCK_H": block_heads,
        "BLOCK_B": next_power_of_2(dim // group),
        "ROUNDS": group.bit_length() - 1,
    }
    grid = (num_tokens, triton.cdiv(num_heads, block_heads))
    return Launch(turned_queries_kernel, grid, operands, num_warps=4)
