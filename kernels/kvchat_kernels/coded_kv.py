"""CodedKv: the KV of a layer in few bits, as a KvCode says, and attention over it.

With 8 bits 32 numbers take 34 bytes: 1.88 times the tokens that 16 bits hold in the same memory.
Keys of 8 bits beside values of 4 hold 2.46 times the tokens, both of 4
bits 3.56 times. `kvchat bench kv` measures what that does to a model.

The compiled step writes and reads these tensors too (`cpu/rotation.py`, `cpu/attention.py`), to
the bit like `NumberCode.quantised`, and a GPU's kernels (those of `coded_kv_write` and of
`paged_attention`).
"""

from dataclasses import dataclass, replace

import torch

from kvchat_kernels.coded_kv_write import CodedPools, coded_kv_write, turn_queries
from kvchat_kernels.key_rotation import ChangeKeys
from kvchat_kernels.kv_code import INT8, KvCode, NumberCode, group_size
from kvchat_kernels.paged_attention import (
    AttentionSpan,
    DeviceSequences,
    LayerShape,
    PagedSequences,
    Scoring,
    Sequences,
    implementation_for,
    paged_attention,
)


@dataclass(frozen=True, slots=True)
class CodedKv:
    """KV of a layer in few bits, on a CPU or a GPU.

    keys           [num_blocks, block_size, num_kv_heads, code.keys.width(key_dim)]
    key_scales     [num_blocks, block_size, num_kv_heads, key_dim / group] bfloat16
    values         [num_blocks, block_size, num_kv_heads, code.values.width(value_dim)]
    value_scales   [num_blocks, block_size, num_kv_heads, value_dim / group] bfloat16
    """

    keys: torch.Tensor
    key_scales: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor
    code: KvCode = INT8

    @property
    def dims(self) -> tuple[int, int]:
        """The dims of a key and of a value."""
        sides = (self.keys, self.code.keys), (self.values, self.code.values)
        key_dim, value_dim = (numbers.shape[3] * 8 // code.bits for numbers, code in sides)
        return key_dim, value_dim

    @property
    def tensors(self) -> CodedPools:
        return self.keys, self.key_scales, self.values, self.value_scales

    @property
    def groups(self) -> tuple[int, int]:
        """How many numbers share a scale, of a key and of a value."""
        key_dim, value_dim = self.dims
        return group_size(key_dim), group_size(value_dim)

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store new keys and values, rounded; a token at slot -1 is not written."""
        coded_kv_write(key, value, self.tensors, self.code, slot_mapping)

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return keys as they were before they were turned, but for rounding."""
        keys, scales = self.keys.flatten(0, 1), self.key_scales.flatten(0, 1)
        return self.code.keys.plain(keys[slots], scales[slots])

    def kv_of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of slots as they were, but for rounding, in float32."""
        values, scales = self.values.flatten(0, 1), self.value_scales.flatten(0, 1)
        return self.keys_of(slots), self.code.values.plain(values[slots], scales[slots])

    def copy_slots(
        self, sources: torch.Tensor, targets: torch.Tensor, change: ChangeKeys | None
    ) -> None:
        """Copy slots; changed keys are restored and rounded again, values keep their bytes."""
        for tensor in self.tensors:
            slots = tensor.flatten(0, 1)
            slots[targets] = slots[sources]
        if change is not None:
            keys, scales = self.keys.flatten(0, 1), self.key_scales.flatten(0, 1)
            moved = self.code.keys.changed(keys[sources], scales[sources], change)
            keys[targets], scales[targets] = moved

    def _runs_kernels(self, query: torch.Tensor) -> bool:
        if query.device.type == "cpu":
            return False
        num_heads = query.shape[1], self.keys.shape[2]
        shape = LayerShape(*num_heads, *self.dims, query.dtype, self.code)
        return implementation_for(query.device, shape).name == "triton"

    def attend(self, query: torch.Tensor, sequences: Sequences, scoring: Scoring) -> torch.Tensor:
        """Attend in the query's dtype on a GPU, by kernels that restore a tile of keys at a time.

        Otherwise over a copy of the visible blocks, in float32 for float16. The copy is the size of
        what the step sees in this layer; all layers use the same memory.
        """
        runs_kernels = self._runs_kernels(query)
        if self.code.keys.turns(query.shape[2]):
            query = turn_queries(query)
        if runs_kernels:
            from kvchat_kernels.paged_attention.triton_gpu import paged_attention_coded_triton

            return self._turned_back(
                paged_attention_coded_triton(query, self.tensors, self.code, sequences, scoring)
            )
        if isinstance(sequences, DeviceSequences):
            sequences = sequences.read()
        dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
        blocks, copied = _visible(sequences, scoring.span)
        keys, values = (
            _copied(name, code, numbers, scales, blocks, copied, dtype)
            for name, code, numbers, scales in (
                ("restored keys", self.code.keys, self.keys, self.key_scales),
                ("restored values", self.code.values, self.values, self.value_scales),
            )
        )
        return self._turned_back(paged_attention(query.to(dtype), keys, values, copied, scoring))

    def _turned_back(self, attended: torch.Tensor) -> torch.Tensor:
        """Return sums of values [rows, heads, value dim] as they would be of values not turned."""
        is_turned = self.code.values.turns(attended.shape[2])
        return turn_queries(attended) if is_turned else attended


def _copied(
    name: str,
    code: NumberCode,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    blocks: torch.Tensor,
    sequences: PagedSequences,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return blocks of keys or values as floats, [len(blocks), block_size, heads, dim]."""
    shape = (len(blocks), *numbers.shape[1:3], numbers.shape[3] * 8 // code.bits)
    out = sequences.room(name, shape, dtype)
    return code.restored(numbers.index_select(0, blocks), scales.index_select(0, blocks), out)


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
