"""The torch reference of the RMS norm: the formula in float32, rounded as in transformers."""

import torch


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
