"""KvPool: the tensors of the device tier, one K and one V per layer.

Knows geometry, bytes and devices. Does not know which block belongs to whom.
"""

import mmap
from dataclasses import dataclass

import torch

from kvchat_kernels.block_copy import block_copy


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's KV: heads, and the dimensions of a key and of a value."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def token_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of a whole model's KV: its storing layers, dtype, and tokens per block."""

    layers: tuple[LayerGeometry, ...]
    dtype: torch.dtype
    block_size: int

    @property
    def token_bytes(self) -> int:
        return sum(layer.token_elements for layer in self.layers) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size


class KvPool:
    """Device memory for `num_blocks` blocks, zeroed at birth so that no slot ever holds a NaN.

    `layers[i]` is the pair of layer i's tensors, `[num_blocks, block_size, num_kv_heads, dim]`,
    owned by the pool. On a CPU the memory is anonymous and zero-filled by the kernel: a page costs
    nothing until a token is written to it.
    """

    def __init__(self, geometry: KvGeometry, num_blocks: int, device: torch.device) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.device = device
        self.layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = tuple(
            (self._allocate(layer, layer.key_dim), self._allocate(layer, layer.value_dim))
            for layer in geometry.layers
        )

    def _allocate(self, layer: LayerGeometry, dim: int) -> torch.Tensor:
        geometry = self.geometry
        shape = (self.num_blocks, geometry.block_size, layer.num_kv_heads, dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=geometry.dtype, device=self.device)
        num_elements = self.num_blocks * geometry.block_size * layer.num_kv_heads * dim
        memory = mmap.mmap(-1, num_elements * geometry.dtype.itemsize)
        return torch.frombuffer(memory, dtype=geometry.dtype).view(shape)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in every layer, for copy-on-write."""
        sources = torch.tensor([source], device=self.device)
        targets = torch.tensor([target], device=self.device)
        for keys, values in self.layers:
            block_copy(keys, sources, targets)
            block_copy(values, sources, targets)
