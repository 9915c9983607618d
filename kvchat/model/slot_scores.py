"""How much the rows of a step attend to each slot of their sequence: SlotScores, `score_slots`.

Where a model has a compiled step, another one scores slots, which is compiled when it is first
wanted. Otherwise the modules run over KV that reports what attends to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvchat.model.batch import ForwardBatch
from kvchat.model.hf.module_adapter import bind, binding_of, binding_to
from kvchat.model.paged_model import PagedModel
from kvchat.model.spec import LayerSpec, ModelSpec
from kvchat_kernels.attention_scores import attention_scores
from kvchat_kernels.key_rotation import ChangeKeys
from kvchat_kernels.kv_layer import KvLayer
from kvchat_kernels.paged_attention import PagedSequences, Scoring, Sequences

# Gets the layer's KV, the queries, the sequences as the layer's pool has them, and the scoring.
_Observer = Callable[[KvLayer, torch.Tensor, Sequences, Scoring], None]


class SlotScores:
    """What each of the first `num_slots` slots of one sequence gets of attention, by KV head.

    Layers with a window say nothing of what is behind it: only the others are scored, unless a
    model has no others.

    sums, highest   float32 [KV heads of the scored layers, num_slots] on the CPU: the weights added
                    over rows, and the largest; their mean, or largest, over a KV head's query heads
    """

    def __init__(self, spec: ModelSpec, num_slots: int) -> None:
        self.first_heads: dict[str, int] = {}
        num_heads = 0
        for layer in _scored(spec):
            self.first_heads[layer.module_name] = num_heads
            num_heads += layer.num_kv_heads
        self.sums, self.highest = torch.zeros(2, num_heads, num_slots)

    def observe(
        self,
        first_head: int,
        kv: KvLayer,
        query: torch.Tensor,
        sequences: Sequences,
        scoring: Scoring,
    ) -> None:
        """Add what slots get of a layer's attention, in the rows from `first_head` on."""
        assert isinstance(sequences, PagedSequences)
        blocks = sequences.blocks_of(0, 0).long()
        slots = blocks[:, None] * sequences.block_size
        slots = slots + torch.arange(sequences.block_size, device=blocks.device)
        keys = kv.keys_of(slots.flatten()[: sequences.context_lens[0]])
        scores = attention_scores(query, keys, sequences, scoring)
        total, highest = (each[:, : self.sums.shape[1]].cpu() for each in scores)
        rows = slice(first_head, first_head + len(total))
        self.sums[rows] += total
        torch.maximum(self.highest[rows], highest, out=self.highest[rows])


def _scored(spec: ModelSpec) -> list[LayerSpec]:
    whole = [layer for layer in spec.layers if layer.span.num_visible is None]
    return whole or list(spec.layers)


@dataclass(frozen=True, slots=True)
class ObservedKv:
    """A layer's KV; `observer` is called with every attention over it.

    With `writes` false the rows of a step must have their KV already: it is not written again.
    """

    kv: KvLayer
    observer: _Observer
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


def score_slots(
    model: PagedModel, batch: ForwardBatch, scores: SlotScores, *, writes: bool
) -> None:
    """Compute the rows of a batch's only sequence, and add what they attend to to `scores`.

    With `writes` false their KV must be there, and stays as it is. Not for a model on the gathered
    path, whose layers have no modules, nor with recurrent layers.
    """
    step = model.scoring_step(scores.first_heads)
    if step is None:
        with _observing(model, scores, writes):
            model.forward(batch)
        return
    step.score(batch if writes else _without_slots(batch), scores.sums, scores.highest)


def _without_slots(batch: ForwardBatch) -> ForwardBatch:
    """Return a batch whose rows write no KV."""
    windowed = batch.windowed
    if windowed is not None:
        windowed = replace(windowed, slot_mapping=torch.full_like(windowed.slot_mapping, -1))
    nowhere = torch.full_like(batch.slot_mapping, -1)
    return replace(batch, slot_mapping=nowhere, windowed=windowed)


@contextmanager
def _observing(model: PagedModel, scores: SlotScores, writes: bool) -> Iterator[None]:
    """Run the block's steps by the modules, whose layers are observed."""
    layers, compiled = model.loaded.spec.layers, model.compiled
    modules = [model.loaded.module.get_submodule(layer.module_name) for layer in layers]
    bindings = [binding_of(module) for module in modules]
    model.compiled = None
    try:
        for module, own, layer in zip(modules, bindings, layers, strict=True):
            head = scores.first_heads.get(layer.module_name)
            observer = _ignore if head is None else partial(scores.observe, head)
            kv = ObservedKv(own.kv, observer, writes)
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
