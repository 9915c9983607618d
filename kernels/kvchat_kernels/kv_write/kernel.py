"""The KV write as one Triton kernel for keys and values together."""

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch

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
