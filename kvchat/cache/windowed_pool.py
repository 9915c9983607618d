"""WindowedKvPool: a KvPool whose layers with a window have fewer blocks, the window blocks.

An image of a block has all layers, as of every pool. Where the block has no window block, bytes
that no KV has stand for the layers with a window: `has_windows` tells such images from others.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch

from kvchat.cache.block_pool import SCRATCH_BLOCK
from kvchat.cache.device_copies import ImageCopies
from kvchat.cache.kv_pool import KvGeometry, KvPool, image_copies
from kvchat.cache.window_blocks import WindowBlocks
from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks, scatter_blocks

# All bits are set, in numbers and scales: a NaN in every floating dtype.
_ABSENT = 0xFF


@dataclass(frozen=True, slots=True)
class Windows:
    """Which storing layers of a model have a window, and how many tokens the longest has.

    A snapshot of the model's recurrent state takes `num_state_blocks` blocks, 0 without any.
    """

    layers: frozenset[int]
    num_tokens: int
    num_state_blocks: int = 0

    def num_blocks(self, block_size: int) -> int:
        """Return how many blocks a sequence sees after any number of tokens, at the most, beside
        that of its next token. Enough also to compute its last token again.
        """
        return -(-self.num_tokens // block_size)


class WindowedKvPool(KvPool):
    """`num_blocks` blocks in the layers without a window, `num_window_blocks` in the others.

    `blocks` says which block has which window block.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        windows: Windows,
        num_blocks: int,
        num_window_blocks: int,
        device: torch.device,
        copies: ImageCopies | None = None,
    ) -> None:
        self.geometry = geometry
        self.windows = windows
        self.num_blocks = num_blocks
        self.device = device
        self.blocks = WindowBlocks(num_blocks, num_window_blocks)
        self.layers = tuple(
            geometry.format.new_layer(
                layer,
                geometry,
                num_window_blocks if index in windows.layers else num_blocks,
                device,
            )
            for index, layer in enumerate(geometry.layers)
        )
        others = frozenset(range(len(self.layers))) - windows.layers
        self._windowed = self._tensors_of(windows.layers)
        self._whole = self._tensors_of(others) if others else None
        self._copies = copies or image_copies(geometry, device)

    def _tensors_of(self, layers: frozenset[int]) -> PoolTensors:
        tensors, starts, start = [], [], 0
        for index, layer in enumerate(self.layers):
            for tensor in layer.tensors:
                if index in layers:
                    tensors.append(tensor)
                    starts.append(start)
                start += tensor[0].nbytes
        assert start == self.geometry.block_bytes
        return PoolTensors(tensors, starts, start)

    @property
    def window_block_bytes(self) -> int:
        """Bytes of a window block."""
        return sum(self._layer_bytes(index) for index in self.windows.layers)

    def _layer_bytes(self, index: int) -> int:
        return self.geometry.format.block_bytes(self.geometry.layers[index], self.geometry)

    def warm_up(self) -> None:
        super().warm_up()
        image = torch.empty(1, self.geometry.block_bytes, dtype=torch.uint8, device=self.device)
        copy_blocks(self._windowed, [SCRATCH_BLOCK], [SCRATCH_BLOCK])
        gather_blocks(self._windowed, [SCRATCH_BLOCK], image)
        scatter_blocks(self._windowed, [SCRATCH_BLOCK], image)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in every layer in which both have it."""
        if self._whole is not None:
            copy_blocks(self._whole, [source], [target])
        numbers = self.blocks.of_block[[source, target]].tolist()
        if all(numbers):
            copy_blocks(self._windowed, numbers[:1], numbers[1:])

    def _in_layer(self, places: torch.Tensor, index: int) -> torch.Tensor:
        if index not in self.windows.layers:
            return places
        size = self.geometry.block_size
        numbers = self.blocks.of_block.to(places.device)[places // size].long()
        return (numbers * size + places % size)[:, numbers.bool().all(dim=0)]

    def zero(self, block: int, first_slot: int) -> None:
        """Zero a block from slot `first_slot` on, in every layer in which it has KV."""
        number = int(self.blocks.of_block[block])
        for index, layer in enumerate(self.layers):
            own = number if index in self.windows.layers else block
            if own or index not in self.windows.layers:
                for tensor in layer.tensors:
                    tensor[own, first_slot:] = 0

    def kv_error(self, block: int, other: int, slot: int) -> torch.Tensor:
        """Compare a slot of two blocks as KvPool does, in the layers in which both have KV."""
        errors = super().kv_error(block, other, slot)
        if self.blocks.has(block) and self.blocks.has(other):
            return errors
        return errors[~torch.from_numpy(self._parts_with_window)]

    @cached_property
    def _parts_with_window(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """[2 * num_layers] bool: keys and values of each layer."""
        return np.repeat([index in self.windows.layers for index in range(len(self.layers))], 2)

    def _read(self, blocks: list[int]) -> list[torch.Tensor]:
        return self.geometry.format.read(self._staged(blocks, absent=0), self.geometry)

    def stage(self, blocks: list[int], staging: torch.Tensor | None = None) -> torch.Tensor:
        """Return the images of `blocks` as KvPool does."""
        return self._staged(blocks, staging, _ABSENT)

    def _staged(
        self, blocks: list[int], staging: torch.Tensor | None = None, absent: int = _ABSENT
    ) -> torch.Tensor:
        if staging is None:
            shape = len(blocks), self.geometry.block_bytes
            staging = torch.empty(shape, dtype=torch.uint8, device=self.device)
        for rows, numbers in self._runs(blocks):
            if numbers:
                gather_blocks(self._windowed, numbers, staging[rows])
            else:
                staging[rows].fill_(absent)
        if self._whole is not None:
            gather_blocks(self._whole, blocks, staging)
        return staging

    def _scatter(self, blocks: list[int], staging: torch.Tensor) -> None:
        """Fill `blocks` with images; a block without a window block leaves out those layers."""
        for rows, numbers in self._runs(blocks):
            if numbers:
                scatter_blocks(self._windowed, numbers, staging[rows])
        if self._whole is not None:
            scatter_blocks(self._whole, blocks, staging)

    def _runs(self, blocks: list[int]) -> Iterator[tuple[slice, list[int]]]:
        """Yield runs of `blocks` with their window blocks, and runs without any."""
        start = 0
        for _, run in groupby(self.blocks.of_block[blocks].tolist(), key=bool):
            numbers = list(run)
            yield slice(start, start + len(numbers)), numbers if numbers[0] else []
            start += len(numbers)

    def has_windows(self, images: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Return [num_images] bool: which images, [num_images, block_bytes] uint8, have KV in the
        layers with a window.
        """
        first = min(self.windows.layers)
        start = sum(self._layer_bytes(index) for index in range(first))
        of_layer = images[:, start : start + self._layer_bytes(first)]
        with _apart_from_steps(images.device):
            return np.asarray(~(of_layer == _ABSENT).all(dim=1).cpu().numpy())


def _apart_from_steps(device: torch.device) -> AbstractContextManager[Any]:
    """Have a GPU compute what follows beside its steps: images are there before they are asked."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))
