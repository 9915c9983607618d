"""KvPool: the tensors of the device tier, one K and one V per layer.

Knows geometry, bytes and devices. Does not know which block belongs to whom.
"""

from dataclasses import dataclass

import torch

from kvchat.cache.page_memory import fresh_memory
from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks, scatter_blocks

_SMALLEST_SQUARE = 1e-30
# Of images that are copied together to see whether they hold numbers.
_LOOKED_AT_BYTES = 32 << 20


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
        self._tensors = PoolTensors([tensor for pair in self.layers for tensor in pair])

    def _allocate(self, layer: LayerGeometry, dim: int) -> torch.Tensor:
        geometry = self.geometry
        shape = (self.num_blocks, geometry.block_size, layer.num_kv_heads, dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=geometry.dtype, device=self.device)
        num_elements = self.num_blocks * geometry.block_size * layer.num_kv_heads * dim
        num_bytes = num_elements * geometry.dtype.itemsize
        memory = fresh_memory(num_bytes, is_for_all=False)
        return torch.frombuffer(memory, dtype=geometry.dtype).view(shape)

    def warm_up(self) -> None:
        """Copy a block in every way there is, onto itself.

        A GPU's kernels are compiled where they are first run, which takes longer than whoever
        waits for KV to come up has patience.
        """
        self.copy_block(0, 0)
        self.unstage([0], self.stage([0]))

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in every layer, for copy-on-write."""
        copy_blocks(self._tensors, [source], [target])

    def kv_error(self, block: int, other: int, slot: int) -> torch.Tensor:
        """Return how slot `slot` of block `other` differs from that of `block`: float32
        [num_tensors, 3] on the CPU, for each tensor the square of the distance, the product of the
        difference and what `block` holds, and the square of that; all over the square of the usual
        length of a token's key or value in `block`.

        The usual length, not the token's own: some tokens have values of next to nothing, whose
        rounding errors come of greater terms.
        """
        images = torch.frombuffer(self.gather([block, other]), dtype=self.geometry.dtype)
        widths = [tensor[0, 0].numel() for tensors in self.layers for tensor in tensors]
        size = self.geometry.block_size
        if len(set(widths)) == 1:  # all at once
            pairs = [images.view(2, len(widths), size, widths[0])]
        else:
            parts = images.view(2, -1).split([size * width for width in widths], dim=1)
            pairs = [p.view(2, 1, size, w) for p, w in zip(parts, widths, strict=True)]
        return torch.cat(
            [_kv_error(pair[0].float(), pair[1, :, slot].float(), slot) for pair in pairs]
        )

    def zero(self, block: int, first_slot: int) -> None:
        """Zero a block from a slot on, as it was at birth."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor[block, first_slot:] = 0

    def num_finite(self, blocks: list[int]) -> int:
        """Return how many leading blocks hold numbers in every slot, neither NaN nor infinity.

        Images of many blocks are looked at together: tensor by tensor, a long context would be a
        hundred thousand questions to a GPU.
        """
        size = max(1, _LOOKED_AT_BYTES // self.geometry.block_bytes)
        for start in range(0, len(blocks), size):
            images = self.stage(blocks[start : start + size]).view(self.geometry.dtype)
            are_finite: list[bool] = images.isfinite().all(dim=1).tolist()
            if not all(are_finite):
                return start + are_finite.index(False)
        return len(blocks)

    def is_finite(self, block: int, num_slots: int) -> bool:
        """Whether the first slots of a block hold numbers, neither NaN nor infinity."""
        return all(
            bool(tensor[block, :num_slots].isfinite().all())
            for tensors in self.layers
            for tensor in tensors
        )

    def gather(self, blocks: list[int]) -> memoryview:
        """Return the images of `blocks`, one after another, as bytes of the caller's own.

        An image is what a block holds: layer after layer, K then V.
        """
        image = bytearray(len(blocks) * self.geometry.block_bytes)
        if blocks:
            rows = torch.frombuffer(image, dtype=torch.uint8).view(len(blocks), -1)
            if rows.device == self.device:
                gather_blocks(self._tensors, blocks, rows)
            else:
                rows.copy_(self.stage(blocks))
        return memoryview(image)

    def scatter(self, blocks: list[int], image: bytearray | memoryview) -> None:
        """Fill `blocks` with images that `gather` made; `image` must be writable memory."""
        assert len(image) == len(blocks) * self.geometry.block_bytes
        if blocks:
            rows = torch.frombuffer(image, dtype=torch.uint8).view(len(blocks), -1)
            self.unstage(blocks, rows.to(self.device))

    def stage(self, blocks: list[int], staging: torch.Tensor | None = None) -> torch.Tensor:
        """Return the images of `blocks` on the device: [len(blocks), block_bytes] bytes, in
        `staging` where that is given.

        On a CUDA device this is only queued, before whatever is computed afterwards: the blocks may
        be given away at once.
        """
        if staging is None:
            shape = (len(blocks), self.geometry.block_bytes)
            staging = torch.empty(shape, dtype=torch.uint8, device=self.device)
        gather_blocks(self._tensors, blocks, staging)
        return staging

    def unstage(self, blocks: list[int], staging: torch.Tensor) -> None:
        """Fill `blocks` with images on the device that `stage` made."""
        assert staging.shape == (len(blocks), self.geometry.block_bytes)
        scatter_blocks(self._tensors, blocks, staging)
        if staging.is_cuda:  # it may come from another stream, whose next tensor must not be there
            staging.record_stream(torch.cuda.current_stream(staging.device))


def _kv_error(known: torch.Tensor, token: torch.Tensor, slot: int) -> torch.Tensor:
    """Return the error of each tensor: `known` is [num_tensors, block_size, width], `token` without
    the middle."""
    usual = known.square().sum(dim=2).mean(dim=1, keepdim=True).clamp_min(_SMALLEST_SQUARE)
    own = known[:, slot]
    off = token - own
    products = (off * off, off * own, own * own)
    return torch.stack([product.sum(dim=1) for product in products], dim=1) / usual
