"""Int8Kv: the KV of a layer in 8 bits a number, and a scale for each group of at most 32 numbers.

A group is a part of one head of one token, so a token can be written and read without the tokens
beside it. That is what a slot needs, and why a scale for each channel is not possible here. Keys
have a few channels that are far larger than the others (KIVI, Liu et al. 2024). With one scale for
a whole head, such a channel would take the precision of the head's other numbers. With a scale for
32 it takes that of its group only, which is what llama.cpp's q8_0 does: perplexity 6.2344 against
6.2322 with 16 bits (llama.cpp#7412). On the demo model the error of a key is 0.57 % of its length
with groups of 32, 0.62 % with one scale for a head of 64, and 0.17 % in bfloat16. Scales are
bfloat16: they have the range of float32, and the error of rounding them is in the numbers, which
are divided by the rounded scale.

32 numbers take 34 bytes: 1.88 times the tokens that 16 bits hold in the same memory. The demo
model's perplexity of 3,080 tokens of `sessions` is 22.72, in bfloat16 22.68. Attention over 4,096
tokens is hardly faster: its time goes into arithmetic rather than into reading (0.4b shape, 24
layers, one thread of a busy AMD Zen 1, least of 25: 30.5 ms a row, in bfloat16 35.1; for a verify
of 5 rows 146 and 145).

The compiled step writes and reads these tensors too (`cpu/rotation.py`, `cpu/attention.py`), to
the bit like `quantised`, and so does a GPU (`int8_kv_write`, and the kernels of `paged_attention`).
None of these figures are of a GPU, where no kernel has run yet.
"""

from dataclasses import dataclass, replace

import torch

from kvchat_kernels.int8_kv_write import Int8Pools, group_size, int8_kv_write, quantised, restored
from kvchat_kernels.paged_attention import (
    AttentionSpan,
    DeviceSequences,
    LayerShape,
    PagedSequences,
    Sequences,
    implementation_for,
    paged_attention,
)
from kvchat_kernels.paged_attention.cpu import scratch

__all__ = ["SCALE_BYTES", "Int8Kv", "group_size", "quantised", "restored"]

SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Int8Kv:
    """KV of a layer in 8 bits, on a CPU or a GPU: the same bytes on both.

    keys           [num_blocks, block_size, num_kv_heads, key_dim] int8
    key_scales     [num_blocks, block_size, num_kv_heads, key_dim / group] bfloat16
    values         [num_blocks, block_size, num_kv_heads, value_dim] int8
    value_scales   [num_blocks, block_size, num_kv_heads, value_dim / group] bfloat16
    """

    keys: torch.Tensor
    key_scales: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor

    @property
    def tensors(self) -> Int8Pools:
        return self.keys, self.key_scales, self.values, self.value_scales

    @property
    def groups(self) -> tuple[int, int]:
        """How many numbers share a scale, of a key and of a value."""
        return group_size(self.keys.shape[3]), group_size(self.values.shape[3])

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store new keys and values, rounded; a token at slot -1 is not written."""
        int8_kv_write(key, value, self.tensors, slot_mapping)

    def _runs_kernels(self, query: torch.Tensor) -> bool:
        if query.device.type == "cpu":
            return False
        dims = self.keys.shape[3], self.values.shape[3]
        shape = LayerShape(query.shape[1], self.keys.shape[2], *dims, query.dtype, is_int8=True)
        return implementation_for(query.device, shape).name == "triton"

    def attend(
        self,
        query: torch.Tensor,
        sequences: Sequences,
        *,
        span: AttentionSpan,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend in the query's dtype on a GPU, by kernels that restore a tile of keys at a time.

        Otherwise over a copy of the visible blocks, in float32 for float16. The copy is the size of
        what the step sees in this layer; all layers use the same memory.
        """
        if self._runs_kernels(query):
            from kvchat_kernels.paged_attention.triton_gpu import paged_attention_int8_triton

            settings = span, scale, softcap, sinks
            return paged_attention_int8_triton(query, *self.tensors, sequences, *settings)
        if isinstance(sequences, DeviceSequences):
            sequences = sequences.read()
        dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
        blocks, copied = _visible(sequences, span)
        keys, values = (
            _copied(name, numbers, scales, blocks, copied, dtype)
            for name, numbers, scales in (
                ("restored keys", self.keys, self.key_scales),
                ("restored values", self.values, self.value_scales),
            )
        )
        return paged_attention(
            query.to(dtype),
            keys,
            values,
            copied,
            span=span,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )


def _copied(
    name: str,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    blocks: torch.Tensor,
    sequences: PagedSequences,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return blocks of keys or values as floats, [len(blocks), block_size, heads, dim]."""
    shape = (len(blocks), *numbers.shape[1:])
    out = scratch(sequences.scratch, name, shape, dtype)
    return restored(numbers.index_select(0, blocks), scales.index_select(0, blocks), out)


def _visible(sequences: PagedSequences, span: AttentionSpan) -> tuple[torch.Tensor, PagedSequences]:
    """Return the blocks that any row sees, and the sequences over a copy of these; cached for the
    step. A block that several sequences share is copied once.
    """
    size = sequences.block_size
    firsts = [
        span.first_visible(end - count) // size if sequences.positions is None else 0
        for count, end in zip(sequences.query_lens, sequences.context_lens, strict=True)
    ]
    key = ("visible blocks", *firsts)
    found: tuple[torch.Tensor, PagedSequences] | None = sequences.plans.get(key)
    if found is None:
        tables = [sequences.blocks_of(i, first * size) for i, first in enumerate(firsts)]
        blocks, places = torch.unique(torch.cat(tables), return_inverse=True)
        copied = torch.zeros_like(sequences.block_tables)
        parts = places.int().split([len(table) for table in tables])
        for index, (first, part) in enumerate(zip(firsts, parts, strict=True)):
            copied[index, first : first + len(part)] = part
        own = replace(sequences, block_tables=copied)
        found = sequences.plans[key] = (blocks.long(), own)
    return found
