"""Operations on the rows of a layer: RMS norm, gates of MLPs, a linear layer on one row.

Each has a reference in torch, and a Triton kernel (`row_kernels.py`).
"""

import torch
from torch.nn import functional

from kvchat_kernels.launch import evenly_spaced, uses_triton


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    impl: str = "auto",
) -> torch.Tensor:
    """Return `hidden / sqrt(mean(hidden ** 2) + eps) * (weight + offset)`, row by row.

    hidden   [..., size]; rows that are not dense, or not equally far apart, are copied first
    weight   [size]
    offset   1.0 for Gemma, which stores its weights minus one; otherwise 0.0
    impl     auto, triton or reference

    Returns a contiguous tensor of the shape and dtype of `hidden`, owned by the caller. The kernel
    computes in float32 and rounds once. The reference also rounds before multiplying with the
    weights, as Llama's module does, unless there is an offset or they have another dtype. Source:
    Zhang and Sennrich, NeurIPS 2019.
    """
    assert weight.shape == hidden.shape[-1:], (weight.shape, hidden.shape)
    if uses_triton(hidden.device, impl):
        from kvchat_kernels.row_kernels import rms_norm_launch

        out = hidden.new_empty(hidden.shape)
        hidden = evenly_spaced(hidden)
        rms_norm_launch(hidden, None, weight, eps, offset, out, None).run()
        return out
    return rms_norm_reference(hidden, weight, eps, offset)


def add_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a residual and norm the sum; return the normed rows and the sum.

    residual   has the shape and dtype of `hidden`; neither is changed

    The sum is rounded to the dtype before the norm, as it is when separate modules store it.
    Otherwise as `rms_norm`; both results are new tensors, owned by the caller.
    """
    assert hidden.shape == residual.shape
    assert hidden.dtype == residual.dtype
    assert weight.shape == hidden.shape[-1:], (weight.shape, hidden.shape)
    if uses_triton(hidden.device, impl):
        from kvchat_kernels.row_kernels import rms_norm_launch

        out, total = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
        hidden, residual = evenly_spaced(hidden), evenly_spaced(residual)
        rms_norm_launch(hidden, residual, weight, eps, offset, out, total).run()
        return out, total
    return add_rms_norm_reference(hidden, residual, weight, eps, offset)


def rms_norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """Return the normed rows in the dtype of `hidden`; see `rms_norm` for the shapes."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if offset or weight.dtype != hidden.dtype:  # Gemma rounds once, after multiplying with these
        return (normed * (weight.float() + offset)).to(hidden.dtype)
    return (weight * normed.to(hidden.dtype)).to(hidden.dtype)


def add_rms_norm_reference(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed sum and the sum; see `add_rms_norm` for the shapes."""
    total = residual + hidden
    return rms_norm_reference(total, weight, eps, offset), total


def silu_mul(gate: torch.Tensor, up: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Return `silu(gate) * up` (SwiGLU: Shazeer, 2020).

    gate, up   [..., size] of one shape and dtype; the halves of a merged projection,
               `merged.chunk(2, dim=-1)`, need no copy. Rows that are not dense, or not equally far
               apart, are copied first
    impl       auto, triton or reference

    Returns a contiguous tensor of their shape and dtype, owned by the caller. The kernel computes
    in float32 and rounds once; the reference also rounds the activation, as transformers does.
    """
    return _gated(gate, up, "silu", impl)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Return `gelu(gate, approximate="tanh") * up`, as in Gemma; otherwise as `silu_mul`."""
    return _gated(gate, up, "gelu_tanh", impl)


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: str, impl: str) -> torch.Tensor:
    assert gate.shape == up.shape, (gate.shape, up.shape)
    assert gate.dtype == up.dtype
    if uses_triton(gate.device, impl):
        from kvchat_kernels.row_kernels import gated_mul_launch

        out = gate.new_empty(gate.shape)
        gated_mul_launch(evenly_spaced(gate), evenly_spaced(up), activation, out).run()
        return out
    twin = silu_mul_reference if activation == "silu" else gelu_tanh_mul_reference
    return twin(gate, up)


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`."""
    return functional.silu(gate) * up


def gelu_tanh_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) * up` with the tanh form of gelu."""
    return functional.gelu(gate, approximate="tanh") * up


def one_row_linear(
    row: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Return `row @ weight.T + bias`, summed in float32 and rounded once.

    row      [1, in_size], contiguous
    weight   [out_size, in_size], the layout of nn.Linear, in the dtype of `row`, contiguous
    bias     [out_size] or None
    impl     auto, triton or reference

    Returns [1, out_size] in the dtype of `row`, owned by the caller.
    """
    assert row.shape == (1, weight.shape[1]), (row.shape, weight.shape)
    assert row.dtype == weight.dtype
    if uses_triton(row.device, impl):
        from kvchat_kernels.row_kernels import one_row_linear_launch

        out = row.new_empty(1, weight.shape[0])
        one_row_linear_launch(row, weight, bias, out).run()
        return out
    return one_row_linear_reference(row, weight, bias)


def one_row_linear_reference(
    row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `row @ weight.T + bias`; see `one_row_linear` for the shapes."""
    return torch.nn.functional.linear(row, weight, bias)
