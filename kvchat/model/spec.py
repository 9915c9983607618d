"""ModelSpec: the facts about a model that other packages plan with.

The probe fills it in, the cache is shaped by it. Holds numbers, no modules and no tensors. Also
says in words which paged attention its layers run with on a device.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvchat_kernels.paged_attention import AttentionSpan, Implementation, implementation_for


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as the probe saw it run.

    `module_name` finds the layer's attention module in the model. `pool_index` names the KV pool
    the layer reads; one that shares the KV of an earlier layer (`stores_kv` false) writes nothing.
    """

    module_name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    span: AttentionSpan
    has_softcap: bool
    has_sinks: bool
    pool_index: int
    stores_kv: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A supported model: its layers in the order they run, its vocabulary and its limits."""

    architecture: str
    model_type: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_context: int
    num_parameters: int

    @property
    def storing_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that own a KV pool, by pool index."""
        return tuple(layer for layer in self.layers if layer.stores_kv)


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
