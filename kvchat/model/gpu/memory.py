"""Which form of a model's weights fits in a GPU's memory."""

from typing import Any

import torch

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.model.device import free_bytes
from kvchat.model.packed.quantise import is_packed, weight_bytes
from kvchat.model.spec import ModelSpec

# What KV, activations and torch's own contexts need of a GPU's memory at the least.
_LEAST_BESIDE_WEIGHTS = 512 << 20
_SHARE_BESIDE_WEIGHTS = 0.1


class NoRoom(ModelError):
    """The weights do not fit in a GPU's memory."""


def runs_fused(spec: ModelSpec) -> bool:
    """Whether layers may be fused: fused layers know paged attention only."""
    return spec.gathered is None and not spec.state


def weights_on_gpu(
    module: Any, spec: ModelSpec, config: ModelConfig, device: torch.device, name: str
) -> tuple[str, tuple[str, ...]]:
    """Return the format of the weights on a GPU, and a note if that is a choice of fewer bits.

    With `auto` the checkpoint's own if they fit, or else 8 or 4 bits. What is in a file's blocks is
    on the GPU already. Raises NoRoom if nothing fits.
    """
    needed, free = weight_bytes(module, spec), free_bytes(device)
    room = free - max(_LEAST_BESIDE_WEIGHTS, int(free * _SHARE_BESIDE_WEIGHTS))
    can_pack = runs_fused(spec) and not is_packed(module)
    if config.weights != "auto" and can_pack:
        wanted: tuple[str, ...] = (config.weights,)
    else:
        wanted = ("auto", "int8", "int4") if can_pack else ("auto",)
    chosen = next((weights for weights in wanted if needed.of(weights) <= room), None)
    if chosen is None:
        raise _no_room(name, needed.of(wanted[-1]), free, wanted[-1])
    if chosen == config.weights or not can_pack:
        return chosen, ()
    return chosen, (
        f"The weights of {name} take {needed.own >> 20:,} MiB, and {free >> 20:,} MiB of the GPU's "
        f"memory are free: they are rounded to {chosen}, {needed.of(chosen) >> 20:,} MiB.",
    )


def _no_room(name: str, needed: int, free: int, weights: str) -> NoRoom:
    bits = "" if weights == "auto" else f" in {weights}"
    return NoRoom(
        f"The weights of {name} take {needed >> 20:,} MiB{bits}, and {free >> 20:,} MiB of the "
        "GPU's memory are free.",
        "Use a smaller model or --device cpu.",
    )
