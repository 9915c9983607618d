"""KvLayer: the KV of one layer in device memory, and what attention does with it.

How keys and values are stored (their dtype, their scales) is the layer's own business. Knows slots
and blocks; not which sequence owns them.
"""

from typing import NamedTuple, Protocol

import torch

from kvchat_kernels.key_rotation import ChangeKeys
from kvchat_kernels.kv_write import kv_write
from kvchat_kernels.paged_attention import Scoring, Sequences, paged_attention


class KvLayer(Protocol):
    """One layer's KV. What holds it belongs to the layer's owner, who copies whole blocks."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that holds a block: contiguous tensors [num_blocks, block_size, ...] of one device.

        Row i of each is a part of block i, and zeros in a slot are KV that is all zeros.
        """

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store new keys and values in their slots; shapes and slots as of `kv_write`."""

    def attend(self, query: torch.Tensor, sequences: Sequences, scoring: Scoring) -> torch.Tensor:
        """Attend every row of `query` to its sequence; arguments as of `paged_attention`.

        Returns [num_tokens, num_heads, value_dim], in a dtype of the layer's choice.
        """

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the keys of slots, [num_slots] int64, as [num_slots, num_kv_heads, key_dim]
        float32.
        """

    def copy_slots(
        self, sources: torch.Tensor, targets: torch.Tensor, change: ChangeKeys | None
    ) -> None:
        """Store the KV of slots `sources` in slots `targets`, with keys as `change` returns them.

        Both are [num_slots] int64 and share no slot. `change` takes float32 [num_slots,
        num_kv_heads, key_dim].
        """


class PlainKv(NamedTuple):
    """KV in two tensors of the same floating dtype, which fused layers and kernels read directly.

    keys     [num_blocks, block_size, num_kv_heads, key_dim]
    values   [num_blocks, block_size, num_kv_heads, value_dim]
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store new keys and values, cast to the tensors' dtype."""
        kv_write(key, value, self.keys, self.values, slot_mapping)

    def attend(self, query: torch.Tensor, sequences: Sequences, scoring: Scoring) -> torch.Tensor:
        """Attend in the tensors' dtype."""
        query = query.to(self.keys.dtype)
        return paged_attention(query, self.keys, self.values, sequences, scoring)

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return keys in float32."""
        return self.keys.flatten(0, 1)[slots].float()

    def kv_of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of slots, [num_slots] int64, each [num_slots,
        num_kv_heads, dim].
        """
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]

    def copy_slots(
        self, sources: torch.Tensor, targets: torch.Tensor, change: ChangeKeys | None
    ) -> None:
        """Copy slots; changed keys are rounded once."""
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        moved = keys[sources]
        keys[targets] = moved if change is None else change(moved.float()).to(keys.dtype)
        values[targets] = values[sources]
