"""The RMS norm as a Triton kernel, one program per row.

Shapes: S is the elements of a row, padded to a power of two.
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
