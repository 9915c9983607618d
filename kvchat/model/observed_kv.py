"""ObservedKv: the KV of a layer that reports what attends to it; `observing` runs steps over it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvchat.model.hf.module_adapter import bind, binding_of, binding_to
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.key_rotation import ChangeKeys
from kvchat_kernels.kv_layer import KvLayer
from kvchat_kernels.paged_attention import Scoring, Sequences

# Gets the layer's KV, the queries, the sequences as the layer's pool has them, and the scoring.
Observer = Callable[[KvLayer, torch.Tensor, Sequences, Scoring], None]


@dataclass(frozen=True, slots=True)
class ObservedKv:
    """A layer's KV; `observer` is called with every attention over it.

    With `writes` false the rows of a step must have their KV already: it is not written again.
    """

    kv: KvLayer
    observer: Observer
    writes: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.kv.tensors

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if self.writes:
            self.kv.write(key, value, slot_mapping)

    def attend(self, query: torch.Tensor, sequences: Sequences, scoring: Scoring) -> torch.Tensor:
        self.observer(self.kv, query, sequences, scoring)
        return self.kv.attend(query, sequences, scoring)

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        return self.kv.keys_of(slots)

    def copy_slots(
        self, sources: torch.Tensor, targets: torch.Tensor, change: ChangeKeys | None
    ) -> None:
        self.kv.copy_slots(sources, targets, change)


@contextmanager
def observing(model: PagedModel, observer: Observer, writes: bool) -> Iterator[None]:
    """Run the block's steps by the modules, with an observer of the attention that sees furthest.

    Layers with a window say nothing of what is behind it: they are observed only in a model that
    has no others. Not for a model on the gathered path, whose layers have no modules.
    """
    layers, compiled = model.loaded.spec.layers, model.compiled
    modules = [model.loaded.module.get_submodule(layer.module_name) for layer in layers]
    bindings = [binding_of(module) for module in modules]
    whole = any(layer.span.num_visible is None for layer in layers)
    model.compiled = None
    try:
        for module, own, layer in zip(modules, bindings, layers, strict=True):
            is_observed = not whole or layer.span.num_visible is None
            kv = ObservedKv(own.kv, observer if is_observed else _ignore, writes)
            bind(
                module,
                binding_to(layer, kv, own.context, has_window_blocks=own.has_window_blocks),
            )
        yield
    finally:
        model.compiled = compiled
        for module, own in zip(modules, bindings, strict=True):
            bind(module, own)


def _ignore(kv: KvLayer, query: torch.Tensor, sequences: Sequences, scoring: Scoring) -> None:
    """Observe nothing."""
