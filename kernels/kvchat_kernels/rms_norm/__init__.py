"""Root mean square norm of rows, alone or after a residual addition."""

import torch

from kvchat_kernels.launch import evenly_spaced, uses_triton
from kvchat_kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

__all__ = ["add_rms_norm", "rms_norm"]


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
        from kvchat_kernels.rms_norm.kernel import rms_norm_launch

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
        from kvchat_kernels.rms_norm.kernel import rms_norm_launch

        out, total = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
        hidden, residual = evenly_spaced(hidden), evenly_spaced(residual)
        rms_norm_launch(hidden, residual, weight, eps, offset, out, total).run()
        return out, total
    return add_rms_norm_reference(hidden, residual, weight, eps, offset)
