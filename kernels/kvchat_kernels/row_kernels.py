"""The RMS norm, the gates and the product of a matrix with one row as Triton kernels.

Shapes: S is the elements of a row, padded to a power of two; E the elements of a part of a row; N
outputs of a tile; K inputs of a loop step.
"""

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch, next_power_of_2, row_stride


@triton.jit
def rms_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, hidden_stride, residual_stride, eps,
    offset, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row,) norms one row. It holds the row in registers and reads it once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)  # [S]
    inside = column < SIZE
    hidden = tl.load(hidden_ptr + row * hidden_stride + column, mask=inside, other=0.0)
    hidden = hidden.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # Norm the rounded sum, because the next layer reads the rounded sum too.
        total = (hidden + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + column, total, mask=inside)
        hidden = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    normed = (hidden * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + column, normed, mask=inside)


def rms_norm_launch(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> Launch:
    """Return the launch that fills `out` and, with a residual, `total`; both are contiguous."""
    size = hidden.shape[-1]
    block = next_power_of_2(size)
    values = {
        "hidden_ptr": hidden,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "out_ptr": out,
        "total_ptr": total,
        "hidden_stride": row_stride(hidden),
        "residual_stride": row_stride(residual) if residual is not None else 0,
        "eps": eps,
        "offset": offset,
        "SIZE": size,
        "BLOCK": block,
    }
    # Eight elements per thread, with up to 16 warps; the sum synchronises all of them.
    num_warps = min(16, max(1, block // 256))
    return Launch(rms_norm_kernel, (out.numel() // size,), values, num_warps=num_warps)


_BLOCK = 1024


@triton.jit
def gated_mul_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, size, IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part) computes BLOCK elements of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [E]
    inside = column < size
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if IS_GELU:
        # (1 + tanh(z)) / 2 = sigmoid(2 z): needs no tanh and has no cancellation.
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = tl.sigmoid(gate)
    product = (gate * share * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, product, mask=inside)


def gated_mul_launch(
    gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor
) -> Launch:
    """Return the launch that fills `out`, which is contiguous; `activation` is silu or gelu_tanh.

    A part has eight elements for each thread of four warps. With few rows, the parts of a row give
    the device enough programs.
    """
    assert out.is_contiguous()
    size = gate.shape[-1]
    values = {
        "gate_ptr": gate,
        "up_ptr": up,
        "out_ptr": out,
        "gate_stride": row_stride(gate),
        "up_stride": row_stride(up),
        "size": size,
        "IS_GELU": activation == "gelu_tanh",
        "BLOCK": _BLOCK,
    }
    return Launch(gated_mul_kernel, (out.numel() // size, triton.cdiv(size, _BLOCK)), values)


@triton.jit
def one_row_kernel(
    row_ptr, weight_ptr, bias_ptr, out_ptr, out_size, IN_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile,) computes BLOCK_N outputs; each thread sums its own columns, then all add."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # [N, 1]
    inner = tl.arange(0, BLOCK_K)[None, :]  # [1, K]
    weights = weight_ptr + output.to(tl.int64) * IN_SIZE + inner
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, IN_SIZE, BLOCK_K, num_stages=STAGES):
        is_input = start + inner < IN_SIZE
        inside = (output < out_size) & is_input
        weight = tl.load(weights + start, mask=inside, other=0.0)  # [N, K]
        row = tl.load(row_ptr + start + inner, mask=is_input, other=0.0)  # [1, K]
        total += weight.to(tl.float32) * row.to(tl.float32)
    result = tl.sum(total, axis=1)[:, None]  # [N, 1]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + output, mask=output < out_size, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty), mask=output < out_size)


def one_row_linear_launch(
    row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    """Return the launch that fills `out`; see `one_row_linear` for the shapes."""
    assert row.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    out_size, in_size = weight.shape
    is_exact = row.dtype == torch.float32
    tile = {"BLOCK_N": 4, "BLOCK_K": 512 if is_exact else 1024, "STAGES": 4}
    grid = (triton.cdiv(out_size, tile["BLOCK_N"]),)
    values = {
        "row_ptr": row,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "out_ptr": out,
        "out_size": out_size,
        "IN_SIZE": in_size,
    }
    return Launch(one_row_kernel, grid, {**values, **tile})
