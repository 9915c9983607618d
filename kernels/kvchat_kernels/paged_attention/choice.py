"""Which implementation of paged attention a layer runs with, and why not a faster one.

Knows devices, head dims and dtypes. Imports Triton only where a layer is run with it: it is slow to
import, and not there on every system.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from kvchat_kernels.launch import kernel_refusal
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from kvchat_kernels.paged_attention.tiles import unsupported
from kvchat_kernels.paged_attention.torch_cpu import paged_attention_cpu

# Implementations that launch the same whatever the lengths are: steps with them can be captured.
READS_LENGTHS_ON_DEVICE = frozenset({"triton", "shapes"})


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation of a layer's attention.

    name      triton, cpu, reference or shapes
    refusal   why the device's fast one is not used; None where it is
    """

    name: str
    refusal: str | None = None


@cache
def implementation_for(
    device: torch.device, key_dim: int, value_dim: int, dtype: torch.dtype
) -> Implementation:
    """Choose by device: Triton on CUDA where it can run the layer, torch's own everywhere else.

    On torch's meta device there are no values, so rows of the right shape are all there is.
    """
    if device.type in ("cpu", "meta"):
        return Implementation("cpu" if device.type == "cpu" else "shapes")
    if device.type != "cuda":
        return Implementation("reference", f"there are no kernels for {device.type}")
    refusal = kernel_refusal(device) or unsupported(key_dim, value_dim, dtype)
    return Implementation("triton" if refusal is None else "reference", refusal)


def implementation(name: str) -> Callable[..., torch.Tensor]:
    """Return the function behind a name; its parameters are those of `reference.py`."""
    if name == "triton":
        from kvchat_kernels.paged_attention.triton_gpu import paged_attention_triton

        return paged_attention_triton
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "cpu": paged_attention_cpu,
        "reference": paged_attention_reference,
        "shapes": _rows_without_values,
    }
    return functions[name]


def _rows_without_values(
    query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, *rest: object
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value_pool.shape[3])
