"""ModelSpec: the facts about a model that other packages use.

The probe computes it, and the cache takes its shapes from it. It holds no modules and no tensors.
`attention_in_words` describes which paged attention implementation its layers use on a device.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvchat_kernels.kv_code import KvCode
from kvchat_kernels.paged_attention import (
    AttentionSpan,
    Implementation,
    LayerShape,
    implementation_for,
)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as the probe recorded it.

    `module_name` is the attention module's path in the model. `pool_index` is the KV pool the layer
    reads. A layer that shares the KV of an earlier layer has `stores_kv` false and writes no KV.
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

    def shape(self, dtype: torch.dtype, code: KvCode | None = None) -> LayerShape:
        """Return the sizes that decide what computes the layer's attention.

        `code` is that of KV in few bits; queries then are of `dtype`.
        """
        heads, dims = (self.num_heads, self.num_kv_heads), (self.key_dim, self.value_dim)
        return LayerShape(*heads, *dims, dtype, code)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of constant size that a recurrent layer keeps for each sequence.

    `kind` says where transformers' cache object has it (`model/state.py`), in layer `layer` under
    number `index`. `dtype` is None if it has the model's dtype. The first dimension is 1.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def num_bytes(self, own_dtype: torch.dtype) -> int:
        return math.prod(self.shape) * (self.dtype or own_dtype).itemsize


@dataclass(frozen=True, slots=True)
class CacheCall:
    """A call to transformers' cache: the keys and values of a layer, or the keys of its index."""

    layer: int
    is_index: bool


@dataclass(frozen=True, slots=True)
class Gathered:
    """How a model runs on the gathered path (`model/hf/gathered.py`), and why.

    `reason` completes "it ...". `calls[i]` is the cache call that layer i of the spec stores.
    `num_layers` is the number of layers of the cache.
    """

    reason: str
    calls: tuple[CacheCall, ...]
    num_layers: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A supported model: its layers in execution order, its sizes and limits (in tokens).

    `layers` are those with attention; `state` is what the recurrent layers keep for each sequence,
    empty for a model without such layers. `read_elsewhere` names those of its linear layers whose
    weights other code than their own reads; they must stay as they are.
    `gathered` is None for a model that runs on paged attention. Otherwise `layers` are what the
    model keeps in transformers' cache: they have no module of their own, and a span where that
    cache keeps no more.
    """

    architecture: str
    model_type: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_context: int
    num_parameters: int
    gathered: Gathered | None = None
    state: tuple[StateTensor, ...] = ()
    read_elsewhere: tuple[str, ...] = ()

    @property
    def storing_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that own a KV pool, by pool index."""
        return tuple(layer for layer in self.layers if layer.stores_kv)


_NAMES = {"triton": "Triton kernels", "cpu": "compiled code", "reference": "torch"}


def attention_in_words(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[..., Implementation] = implementation_for,
) -> str:
    """Return one phrase: `Triton kernels`, or how many layers run on what, and why."""
    if spec.gathered is not None:
        return f"transformers' own, over KV copied out of the pages: it {spec.gathered.reason}"
    counts = Counter(choose(device, layer.shape(dtype)) for layer in spec.layers)
    if len(counts) == 1:
        return _in_words(next(iter(counts)))
    return "; ".join(
        f"{number} layer{'s' if number > 1 else ''}: {_in_words(chosen)}"
        for chosen, number in counts.items()
    )


def slow_attention(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[..., Implementation] = implementation_for,
    code: KvCode | None = None,
) -> tuple[str, ...]:
    """Return a note for the user if a GPU runs some layers without kernels; () otherwise."""
    if device.type == "cpu" or spec.gathered is not None:
        return ()
    chosen = [choose(device, layer.shape(dtype, code)) for layer in spec.layers]
    refusals = dict.fromkeys(x.refusal for x in chosen if x.refusal is not None)
    return tuple(f"Attention runs in plain torch, which is slow: {why}." for why in refusals)


def _in_words(chosen: Implementation) -> str:
    name = _NAMES[chosen.name]
    return name if chosen.refusal is None else f"{name} ({chosen.refusal})"
