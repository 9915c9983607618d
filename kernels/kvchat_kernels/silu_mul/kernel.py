"""The gates as one elementwise Triton kernel.

Shapes: E is the elements of a part of a row.
"""

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch, row_stride

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
