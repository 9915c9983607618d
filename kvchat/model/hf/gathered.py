"""The gathered path: a model's own attention over KV that is gathered from the pages.

Some models cannot run on paged attention: they compute with the mask themselves, count positions
from the length of their cache, or choose their keys by an index. They run here one sequence at a
time, on a cache object of transformers. Its `update` writes the new keys and values to their slots
and returns those of the whole context, copied out of the pages; of a layer with a window those that
the new tokens may see, as transformers' own cache does. So the pages hold all that the model keeps,
and the model's own code does everything else. It is slower than paged attention: every step copies
its contexts, and sequences do not share a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Cache, DynamicCache, cache_utils

from kvchat.model.batch import ForwardBatch
from kvchat.model.spec import CacheCall, ModelSpec
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.kv_layer import KvLayer, PlainKv
from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences

# Older versions of transformers have no layers with an index.
_LayerBase: Any = getattr(cache_utils, "DynamicIndexedLayer", cache_utils.DynamicLayer)
# Types whose masks fit a cache that holds a window, as tests/matrix/test_windowed_models.py shows.
# Others keep everything: Qwen3-Omni's configuration has a window that its masks have not.
WITH_WINDOWS = frozenset({"doge", "gemma4_unified", "llama4", "llama4_text"})


def spans_of(config: Any) -> dict[int, AttentionSpan]:
    """Return what layers with a window or with chunks see, by their index in the model's cache."""
    if config.model_type not in WITH_WINDOWS:
        return {}
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None)
    spans = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if (count := getattr(layer, "sliding_window", None)) is not None:
            is_chunked = kinds is not None and kinds[index] == "chunked_attention"
            spans[index] = AttentionSpan(chunk=count) if is_chunked else AttentionSpan(window=count)
    return spans


class CacheSequence(Protocol):
    """The cached tokens of one sequence, to which a forward pass adds its own."""

    @property
    def start(self) -> int:
        """The number of tokens before this pass."""

    def extend(
        self, call: CacheCall, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the pass's keys and values; return those of the context from token `first` on.

        All are [1, num_kv_heads, num_tokens, dim].
        """


class _GatheredLayer(_LayerBase):
    """One layer of transformers' cache. It passes keys and values on to a CacheSequence.

    With `num_visible`, a layer of tokens that see so many, it has what the pass's first token sees
    and what comes after it.
    """

    def __init__(self, index: int, sequence: CacheSequence, num_visible: int | None) -> None:
        super().__init__()
        self.is_sliding = num_visible is not None
        self._index = index
        self._sequence = sequence
        self._num_new = 0
        self._first = 0 if num_visible is None else max(0, sequence.start - num_visible + 1)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = CacheCall(self._index, is_index=False)
        self.keys, self.values = self._sequence.extend(call, key_states, value_states, self._first)
        self._num_new = key_states.shape[-2]
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the keys of an index, [1, num_tokens, dim]: one half as keys, one as values."""
        halves = indexer_key_states[:, None].chunk(2, dim=-1)
        if len(halves) != 2:
            raise ValueError("an index of one number per token")
        call = CacheCall(self._index, is_index=True)
        return torch.cat(self._sequence.extend(call, *halves, first=0), dim=-1)[:, 0]

    def get_seq_length(self, *args: Any) -> int:
        return self._sequence.start + self._num_new

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + count - self._first, self._first


def cache_over(sequence: CacheSequence, num_layers: int, num_visible: Mapping[int, int]) -> Cache:
    """Return a cache of `num_layers` layers for one forward pass of a sequence.

    `num_visible` says how many tokens those see, itself included, that do not see all.
    """
    layers = [_GatheredLayer(i, sequence, num_visible.get(i)) for i in range(num_layers)]
    return Cache(layers=layers)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A layer's KV. `has_window_blocks` as of `bind`."""

    kv: PlainKv | CodedKv
    has_window_blocks: bool


@dataclass(frozen=True, slots=True)
class _PagedSequence:
    """A sequence of a step.

    `slots` are those of its context, [num_tokens] int64, and `in_windows` those of layers that have
    window blocks.
    """

    start: int
    slots: torch.Tensor
    in_windows: torch.Tensor
    layers: dict[CacheCall, _Storage]

    def extend(
        self, call: CacheCall, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.layers[call].kv
        slots = self.in_windows if self.layers[call].has_window_blocks else self.slots
        kv.write(key[0].transpose(0, 1), value[0].transpose(0, 1), slots[self.start :])
        keys, values = (part.transpose(0, 1)[None] for part in kv.kv_of(slots[first:]))
        return keys.to(key.dtype), values.to(value.dtype)


class GatheredSteps:
    """Runs steps of a module on the gathered path.

    `layers[i]` is the KV of storing layer i of the spec, plain or in few bits; `windowed` are those
    that have window blocks.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        layers: Sequence[KvLayer],
        windowed: frozenset[int],
    ) -> None:
        assert spec.gathered is not None
        calls = spec.gathered.calls
        readable = [
            _Storage(kv, index in windowed)
            for index, kv in enumerate(layers)
            if isinstance(kv, PlainKv | CodedKv)
        ]
        assert len(readable) == len(layers), "KV that cannot be gathered"
        self._module = module
        self._layers = dict(zip(calls, readable, strict=True))
        self._num_layers = spec.gathered.num_layers
        spans = zip(calls, (layer.span.num_visible for layer in spec.layers), strict=True)
        self._num_visible = {call.layer: count for call, count in spans if count is not None}

    def logits(self, batch: ForwardBatch, keeps_rows: bool) -> torch.Tensor:
        """Run a step, one sequence after another; return the logits of `batch.logit_rows`.

        `keeps_rows` says whether the module takes `logits_to_keep`.
        """
        sequences = batch.sequences
        assert isinstance(sequences, PagedSequences)
        assert sequences.positions is None, "these models take a slot's number for its position"
        windowed = None if batch.windowed is None else batch.windowed.sequences
        assert windowed is None or isinstance(windowed, PagedSequences)
        wanted: list[int] = batch.logit_rows.tolist()
        first, logits = 0, []
        for number, count in enumerate(sequences.query_lens):
            ids = batch.token_ids[first : first + count]
            rows = [row - first for row in wanted if first <= row < first + count]
            slots = _slots(sequences, number)
            in_windows = slots if windowed is None else _slots(windowed, number)
            sequence = _PagedSequence(len(slots) - count, slots, in_windows, self._layers)
            logits.append(self._run(ids, sequence, rows, keeps_rows))
            first += count
        return torch.cat(logits)

    def _run(
        self, ids: torch.Tensor, sequence: _PagedSequence, rows: list[int], keeps_rows: bool
    ) -> torch.Tensor:
        # A model that takes rows gets one at least: none would mean all to some of them.
        kept = torch.tensor(rows or [len(ids) - 1], device=ids.device)
        output = self._module(
            input_ids=ids[None],
            past_key_values=cache_over(sequence, self._num_layers, self._num_visible),
            use_cache=True,
            **({"logits_to_keep": kept} if keeps_rows else {}),
        )
        logits: torch.Tensor = output.logits[0] if keeps_rows else output.logits[0][kept]
        return logits[: len(rows)].float()


def _slots(sequences: PagedSequences, number: int) -> torch.Tensor:
    """Return the pool's slots of a sequence's context, in order."""
    size, length = sequences.block_size, sequences.context_lens[number]
    blocks = sequences.block_tables[number, : -(-length // size)].long()
    offsets = torch.arange(size, device=blocks.device)
    return (blocks[:, None] * size + offsets).flatten()[:length]
