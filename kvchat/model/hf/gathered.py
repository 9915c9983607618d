"""The gathered path: a model's own attention over KV that is gathered from the pages.

Some models cannot run on paged attention: they compute with the mask themselves, count positions
from the length of their cache, or choose their keys by an index. They run here one sequence at a
time, on a cache object of transformers. Its `update` writes the new keys and values to their slots
and returns those of the whole context, copied out of the pages. So the pages hold all that the
model keeps, and the model's own code does everything else. It is slower than paged attention: every
step copies its contexts, and sequences do not share a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Cache, cache_utils

from kvchat.model.batch import ForwardBatch
from kvchat.model.spec import CacheCall, ModelSpec
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.kv_layer import KvLayer, PlainKv
from kvchat_kernels.paged_attention import PagedSequences

# Older versions of transformers have no layers with an index.
_LayerBase: Any = getattr(cache_utils, "DynamicIndexedLayer", cache_utils.DynamicLayer)


class CacheSequence(Protocol):
    """The cached tokens of one sequence, to which a forward pass adds its own."""

    @property
    def start(self) -> int:
        """The number of tokens before this pass."""

    def extend(
        self, call: CacheCall, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the pass's keys and values; return those of the whole context.

        All are [1, num_kv_heads, num_tokens, dim].
        """


class _GatheredLayer(_LayerBase):
    """One layer of transformers' cache. It passes keys and values on to a CacheSequence."""

    is_sliding = False

    def __init__(self, index: int, sequence: CacheSequence) -> None:
        super().__init__()
        self._index = index
        self._sequence = sequence
        self._num_new = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = CacheCall(self._index, is_index=False)
        self.keys, self.values = self._sequence.extend(call, key_states, value_states)
        self._num_new = key_states.shape[-2]
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the keys of an index, [1, num_tokens, dim]: one half as keys, one as values."""
        halves = indexer_key_states[:, None].chunk(2, dim=-1)
        if len(halves) != 2:
            raise ValueError("an index of one number per token")
        call = CacheCall(self._index, is_index=True)
        return torch.cat(self._sequence.extend(call, *halves), dim=-1)[:, 0]

    def get_seq_length(self, *args: Any) -> int:
        return self._sequence.start + self._num_new

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + count, 0


def cache_over(sequence: CacheSequence, num_layers: int) -> Cache:
    """Return a cache of `num_layers` layers for one forward pass of a sequence."""
    return Cache(layers=[_GatheredLayer(index, sequence) for index in range(num_layers)])


@dataclass(frozen=True, slots=True)
class _PagedSequence:
    """A sequence of a step. `slots` are those of its context, [num_tokens] int64."""

    start: int
    slots: torch.Tensor
    layers: dict[CacheCall, PlainKv | CodedKv]

    def extend(
        self, call: CacheCall, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.layers[call]
        kv.write(key[0].transpose(0, 1), value[0].transpose(0, 1), self.slots[self.start :])
        keys, values = (part.transpose(0, 1)[None] for part in kv.kv_of(self.slots))
        return keys.to(key.dtype), values.to(value.dtype)


class GatheredSteps:
    """Runs steps of a module on the gathered path.

    `layers[i]` is the KV of storing layer i of the spec, plain or in few bits.
    """

    def __init__(self, module: nn.Module, spec: ModelSpec, layers: Sequence[KvLayer]) -> None:
        assert spec.gathered is not None
        calls = spec.gathered.calls
        readable = [kv for kv in layers if isinstance(kv, PlainKv | CodedKv)]
        assert len(readable) == len(layers), "KV that cannot be gathered"
        self._module = module
        self._layers = dict(zip(calls, readable, strict=True))
        self._num_layers = spec.gathered.num_layers

    def logits(self, batch: ForwardBatch, keeps_rows: bool) -> torch.Tensor:
        """Run a step, one sequence after another; return the logits of `batch.logit_rows`.

        `keeps_rows` says whether the module takes `logits_to_keep`.
        """
        sequences = batch.sequences
        assert isinstance(sequences, PagedSequences)
        assert sequences.positions is None, "these models take a slot's number for its position"
        wanted: list[int] = batch.logit_rows.tolist()
        first, logits = 0, []
        for number, count in enumerate(sequences.query_lens):
            ids = batch.token_ids[first : first + count]
            rows = [row - first for row in wanted if first <= row < first + count]
            logits.append(self._run(ids, _slots(sequences, number), rows, keeps_rows))
            first += count
        return torch.cat(logits)

    def _run(
        self, ids: torch.Tensor, slots: torch.Tensor, rows: list[int], keeps_rows: bool
    ) -> torch.Tensor:
        sequence = _PagedSequence(len(slots) - len(ids), slots, self._layers)
        # A model that takes rows gets one at least: none would mean all to some of them.
        kept = torch.tensor(rows or [len(ids) - 1], device=ids.device)
        output = self._module(
            input_ids=ids[None],
            past_key_values=cache_over(sequence, self._num_layers),
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
