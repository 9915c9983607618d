"""ModelSpec: the facts about a model that the other floors plan with.

Knows numbers. Does not know modules or tensors; the probe reads the facts, the cache is shaped by
them.
"""

from dataclasses import dataclass

from kvchat_kernels.paged_attention import AttentionSpan


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
