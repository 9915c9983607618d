"""Says in words which implementation of paged attention a model's layers run with on a device.

Knows specs. The choice itself is made layer by layer in `kvchat_kernels.paged_attention`.
"""

from collections import Counter
from collections.abc import Callable

import torch

from kvchat.model.spec import ModelSpec
from kvchat_kernels.paged_attention import Implementation, implementation_for

_NAMES = {"triton": "Triton kernels", "cpu": "torch, as is fastest on a CPU", "reference": "torch"}


def attention_in_words(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[..., Implementation] = implementation_for,
) -> str:
    """Return one phrase: `Triton kernels`, or which layers run otherwise and why."""
    counts = Counter(choose(device, layer.key_dim, layer.value_dim, dtype) for layer in spec.layers)
    if len(counts) == 1:
        return _in_words(next(iter(counts)))
    return "; ".join(
        f"{number} layer{'s' if number > 1 else ''}: {_in_words(chosen)}"
        for chosen, number in counts.items()
    )


def _in_words(chosen: Implementation) -> str:
    name = _NAMES[chosen.name]
    return name if chosen.refusal is None else f"{name} ({chosen.refusal})"
