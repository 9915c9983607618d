"""The changes to a transformers model that make it run on a paged KV cache.

Attention modules call kvchat's attention function, which is registered with transformers. A binding
on each attention module holds its layer and the running step. Rotary frequencies that depend on the
longest position of a batch (longrope, dynamic NTK) are fixed to the longest context, so that a
cached key is valid in every batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvchat.model.batch import ForwardBatch, StepAbandoned, WindowSlots
from kvchat.model.spec import LayerSpec
from kvchat_kernels.kv_layer import KvLayer, PlainKv
from kvchat_kernels.paged_attention import AttentionSpan, Scoring

# Must not look like a kernel repository ("a/b") or contain sdpa, flash or flex: transformers treats
# such names specially.
PAGED = "kvchat_paged"
_BINDING = "_kvchat_binding"

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]


class StepContext:
    """The batch of the running forward pass; one object per model, shared by its layers.

    `memo` caches values that several layers need in the same pass. `check_if_asked` is `check`, or
    None if the running pass cannot be abandoned.
    """

    def __init__(self) -> None:
        self.batch: ForwardBatch | None = None
        self.memo: dict[int, Any] = {}
        self.check_if_asked: Callable[[], None] | None = None
        self._is_unwanted: Callable[[], bool] | None = None

    def ask_in(self, module: nn.Module) -> None:
        """Let every part of a model that has weights of its own ask, before it runs.

        A layer of a large step is seven products, and on a slow processor takes half a second.
        """
        for part in module.modules():
            if next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(lambda *_: self.check())

    @contextmanager
    def stopping(self, is_unwanted: Callable[[], bool]) -> Iterator[None]:
        """Let the parts of `ask_in` ask `is_unwanted` in the passes of the block."""
        self._is_unwanted, self.check_if_asked = is_unwanted, self.check
        try:
            yield
        finally:
            self._is_unwanted = self.check_if_asked = None

    def check(self) -> None:
        """Raise StepAbandoned if the running pass is not wanted any more."""
        if self._is_unwanted is not None and self._is_unwanted():
            raise StepAbandoned

    @contextmanager
    def running(self, batch: ForwardBatch) -> Iterator[None]:
        """Set `batch` for the duration of a forward pass; clear it and `memo` afterwards."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None
            self.memo.clear()


@dataclass(frozen=True, slots=True)
class KvBinding:
    """The data an attention module needs: its layer, its layer's KV and the running step.

    `has_window_blocks` says that the layer's KV is in window blocks.
    """

    layer: LayerSpec
    kv: KvLayer
    context: StepContext
    has_window_blocks: bool

    def slots_of(self, batch: ForwardBatch) -> ForwardBatch | WindowSlots:
        """Return the slots and sequences of the layer's KV in a step."""
        if not self.has_window_blocks:
            return batch
        assert batch.windowed is not None
        return batch.windowed


@dataclass(frozen=True, slots=True)
class LayerBinding(KvBinding):
    """The binding of a layer whose KV is plain: fused layers write its two tensors directly."""

    keys: torch.Tensor
    values: torch.Tensor


def binding_to(
    layer: LayerSpec, kv: KvLayer, context: StepContext, *, has_window_blocks: bool = False
) -> KvBinding:
    """Return a layer's binding: a LayerBinding if its KV is plain."""
    if isinstance(kv, PlainKv):
        return LayerBinding(layer, kv, context, has_window_blocks, kv.keys, kv.values)
    return KvBinding(layer, kv, context, has_window_blocks)


def bind(module: nn.Module, binding: KvBinding) -> None:
    """Attach a binding to an attention module; replaces an earlier one.

    It is stored on the module, because some models drop keyword arguments on the way to attention.
    It is written to `__dict__`, so nn.Module does not register it as a parameter or submodule.
    """
    module.__dict__[_BINDING] = binding


def binding_of(module: nn.Module) -> KvBinding:
    """Return the binding of an attention module."""
    binding: KvBinding = module.__dict__[_BINDING]
    return binding


def paged_attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's KV to its slots and attend over the pools.

    query            [1, num_heads, num_tokens, key_dim], after position encoding
    key, value       [1, num_kv_heads, num_tokens, key_dim or value_dim]
    attention_mask   ignored; the probe read the layer's span from the model's own mask

    Returns [1, num_tokens, num_heads, value_dim] in the query's dtype, and None as the weights.
    """
    binding: KvBinding = module.__dict__[_BINDING]
    batch, layer = binding.context.batch, binding.layer
    assert batch is not None, "attention outside of a step"
    slots = binding.slots_of(batch)
    if layer.stores_kv:
        binding.kv.write(key[0].transpose(0, 1), value[0].transpose(0, 1), slots.slot_mapping)
    scoring = Scoring(
        scale=layer.key_dim**-0.5 if scaling is None else float(scaling),
        span=layer.span,
        softcap=kwargs.get("softcap") if layer.has_softcap else None,
        sinks=find_sinks(module, kwargs) if layer.has_sinks else None,
    )
    out = binding.kv.attend(query[0].transpose(0, 1), slots.sequences, scoring)
    # Contiguous, because some models change its shape by `view`.
    return out.to(query.dtype)[None].contiguous(), None


def find_sinks(module: nn.Module, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the layer's sink logits, [num_heads], from the call or the module; None if absent."""
    sinks = kwargs.get("s_aux")
    return sinks if sinks is not None else getattr(module, "sinks", None)


def register_attention() -> None:
    """Register the attention function with transformers. May be called again.

    No mask function is registered under this name, so transformers builds no masks.
    """
    AttentionInterface.register(PAGED, paged_attention_function)


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """An attention class that does not use transformers' attention interface.

    class_name   of the attention module; its method `_attn(query, key, value, mask)` is replaced on
                 each instance
    scaling      the factor the class multiplies scores by
    span         returns an instance's span
    """

    class_name: str
    scaling: float
    span: Callable[[nn.Module], AttentionSpan]


def _gpt_neo_span(module: Any) -> AttentionSpan:
    is_local = module.attention_type == "local"
    return AttentionSpan(window=module.config.window_size if is_local else None)


OWN_ATTENTION = {
    "gpt_neo": OwnAttention("GPTNeoSelfAttention", 1.0, _gpt_neo_span),
}


def replace_own_attention(model: Any, own: OwnAttention, function: AttentionFunction) -> None:
    """Route every instance of an attention class through `function`, and build no masks."""
    model.config._attn_implementation_internal = PAGED
    for module in model.modules():
        if type(module).__name__ == own.class_name:
            module.__dict__["_attn"] = _routed(module, own.scaling, function)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Inside this context the model runs its own eager attention, as the reference for ours.

    A model on the gathered path runs no other.
    """
    if model.config._attn_implementation == "eager":
        yield
        return
    own = OWN_ATTENTION.get(model.config.model_type)
    replaced = {}
    if own is not None:
        for module in model.modules():
            if "_attn" in module.__dict__:
                replaced[module] = module.__dict__.pop("_attn")
        model.config._attn_implementation_internal = "eager"
    else:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for module, function in replaced.items():
            module.__dict__["_attn"] = function
        if own is not None:
            model.config._attn_implementation_internal = PAGED
        else:
            model.set_attn_implementation(PAGED)


def _routed(
    module: nn.Module, scaling: float, function: AttentionFunction
) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object = None
    ) -> tuple[torch.Tensor, None]:
        out, _ = function(module, query, key, value, mask, scaling=scaling)
        return out.transpose(1, 2), None

    return attend


_FLOATING = frozenset({"longrope", "dynamic"})


def freeze_rope(model: nn.Module, max_context: int) -> tuple[str, ...]:
    """Fix length-dependent frequencies to `max_context` tokens, in place.

    Returns the rope types that were fixed, sorted.
    """
    frozen = set()
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in _FLOATING:
            _freeze(module, rope_type, max_context, None)
            module.rope_type = "default"  # type: ignore[assignment]
            frozen.add(rope_type)
        elif isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                if kind in _FLOATING:
                    _freeze(module, kind, max_context, layer_type)
                    rope_type[layer_type] = "default"
                    frozen.add(kind)
    return tuple(sorted(frozen))


def _freeze(module: Any, kind: str, max_context: int, layer_type: str | None) -> None:
    prefix = f"{layer_type}_" if layer_type is not None else ""
    buffer = getattr(module, f"{prefix}inv_freq")
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, buffer.device, seq_len=max_context, **arguments
    )
    # Register a new tensor instead of copying into the old one: the probe's forward pass may have
    # left an inference-mode tensor there, which must not be written.
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(buffer.dtype), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
