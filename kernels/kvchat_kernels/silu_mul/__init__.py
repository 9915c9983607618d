"""The gate of a gated feed-forward layer: the activation of one half times the other half."""

import torch

from kvchat_kernels.launch import evenly_spaced, uses_triton
from kvchat_kernels.silu_mul.reference import gelu_tanh_mul_reference, silu_mul_reference

__all__ = ["gelu_tanh_mul", "silu_mul"]


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
        from kvchat_kernels.silu_mul.kernel import gated_mul_launch

        out = gate.new_empty(gate.shape)
        gated_mul_launch(evenly_spaced(gate), evenly_spaced(up), activation, out).run()
        return out
    twin = silu_mul_reference if activation == "silu" else gelu_tanh_mul_reference
    return twin(gate, up)
