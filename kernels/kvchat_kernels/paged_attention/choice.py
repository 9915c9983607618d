"""Selects the implementation of paged attention for a layer, and says why a faster one cannot run.

Imports Triton only if a layer runs with it, because the import is slow and Triton may be missing.
"""

from dataclasses import dataclass
from functools import cache

import torch

from kvchat_kernels.launch import kernel_refusal
from kvchat_kernels.paged_attention.cpu import paged_attention_cpu
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from kvchat_kernels.paged_attention.sequences import AttentionFunction
from kvchat_kernels.paged_attention.tiles import LayerShape, unsupported

# Implementations whose launches do not depend on the lengths, so that their steps can be captured.
READS_LENGTHS_ON_DEVICE = frozenset({"triton", "shapes"})


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation of a layer's attention.

    name      triton, cpu, reference or shapes
    refusal   why the device's fast implementation cannot run; None if it is used
    """

    name: str
    refusal: str | None = None


@cache
def implementation_for(device: torch.device, shape: LayerShape) -> Implementation:
    """Choose by device: Triton on CUDA if it can run the layer, compiled code on a CPU, or torch.

    On the meta device, `shapes` returns uninitialised rows of the right shape. The first call for a
    CUDA device and a shape runs every tile that the layer may need, and compiles it if necessary.
    """
    if device.type in ("cpu", "meta"):
        return Implementation("cpu" if device.type == "cpu" else "shapes")
    if device.type != "cuda":
        return Implementation("reference", f"there are no kernels for {device.type}")
    refusal = kernel_refusal(device) or _refusal_of_tiles(device, shape)
    return Implementation("triton" if refusal is None else "reference", refusal)


def _refusal_of_tiles(device: torch.device, shape: LayerShape) -> str | None:
    from kvchat_kernels.paged_attention.trial import trial_error
    from kvchat_kernels.paged_attention.triton_gpu import card_of

    refusal = unsupported(shape, card_of(device))
    return refusal or trial_error(device, shape)


def implementation(name: str) -> AttentionFunction:
    """Return the function of an implementation, with the parameters of `reference.py`'s."""
    if name == "triton":
        from kvchat_kernels.paged_attention.triton_gpu import paged_attention_triton

        return paged_attention_triton
    functions: dict[str, AttentionFunction] = {
        "cpu": paged_attention_cpu,
        "reference": paged_attention_reference,
        "shapes": _rows_without_values,
    }
    return functions[name]


def _rows_without_values(
    query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, *rest: object
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value_pool.shape[3])
