"""WindowedKvPool: a KvPool whose layers with a window have fewer blocks, the window blocks.

An image of a block has all layers, as of every pool. Where the block has no window block, bytes
that no KV has stand for the layers with a window: `has_windows` tells such images from others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvchat.cache.kv_pool import KvGeometry, KvPool
from kvchat.cache.window_blocks import WindowBlocks
from kvchat_kernels.kv_layer import KvLayer

# All bits are set, in numbers and scales: a NaN in every floating dtype.
_ABSENT = 0xFF


@dataclass(frozen=True, slots=True)
class Windows:
    """Which storing layers of a model have a window, and how many tokens the longest has."""

    layers: frozenset[int]
    num_tokens: int

    def num_blocks(self, block_size: int) -> int:
        """Return how many blocks a sequence sees after any number of tokens, at the most, beside
        that of its next token. Enough also to compute its last token again.
        """
        return -(-self.num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class _Column:
    """A tensor as rows of bytes, and its place in an image."""

    rows: torch.Tensor
    start: int
    end: int
    has_window: bool


class WindowedKvPool(KvPool):
    """`num_blocks` blocks in the layers without a window, `num_window_blocks` in the others.

    `blocks` says which block has which window block. For host memory only.
    """

    def __init__(
        self, geometry: KvGeometry, windows: Windows, num_blocks: int, num_window_blocks: int
    ) -> None:
        self.geometry = geometry
        self.windows = windows
        self.num_blocks = num_blocks
        self.device = torch.device("cpu")
        self.blocks = WindowBlocks(num_blocks, num_window_blocks)
        self.layers = tuple(
            geometry.format.new_layer(
                layer,
                geometry,
                num_window_blocks if index in windows.layers else num_blocks,
                self.device,
            )
            for index, layer in enumerate(geometry.layers)
        )
        self._columns = _columns(self.layers, windows)
        assert self._columns[-1].end == geometry.block_bytes
        self._copies = None

    @property
    def window_block_bytes(self) -> int:
        """Bytes of a window block."""
        return sum(column.end - column.start for column in self._columns if column.has_window)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in every layer in which both have it."""
        numbers = self.blocks.of_block
        for column in self._columns:
            if not column.has_window:
                column.rows[target] = column.rows[source]
            elif numbers[source] and numbers[target]:
                column.rows[numbers[target]] = column.rows[numbers[source]]

    def _in_layer(self, places: torch.Tensor, index: int) -> torch.Tensor:
        if index not in self.windows.layers:
            return places
        size = self.geometry.block_size
        numbers = self.blocks.of_block[places // size].long()
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
        """Return the images of `blocks`, [len(blocks), block_bytes] uint8, in `staging` if any."""
        return self._staged(blocks, staging, _ABSENT)

    def _staged(
        self, blocks: list[int], staging: torch.Tensor | None = None, absent: int = _ABSENT
    ) -> torch.Tensor:
        if staging is None:
            staging = torch.empty(len(blocks), self.geometry.block_bytes, dtype=torch.uint8)
        own, there, numbers = self._rows_of(blocks)
        for column in self._columns:
            part = staging[:, column.start : column.end]
            if not column.has_window:
                part[:] = column.rows[own]
            elif len(there) == len(blocks):
                part[:] = column.rows[numbers]
            else:
                part.fill_(absent)
                part[there] = column.rows[numbers]
        return staging

    def unstage(self, blocks: list[int], staging: torch.Tensor) -> None:
        """Fill `blocks` with images; a block without a window block leaves out those layers."""
        assert staging.shape == (len(blocks), self.geometry.block_bytes)
        own, there, numbers = self._rows_of(blocks)
        for column in self._columns:
            part = staging[:, column.start : column.end]
            if column.has_window:
                column.rows[numbers] = part[there]
            else:
                column.rows[own] = part

    def _rows_of(self, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the blocks, which of them have a window block, and its numbers: [...] int64."""
        own = torch.tensor(blocks, dtype=torch.int64)
        numbers = self.blocks.of_block[own].long()
        there = numbers.nonzero()[:, 0]
        return own, there, numbers[there]

    def has_windows(
        self, images: torch.Tensor | bytearray | memoryview
    ) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Return [num_images] bool: which images have KV in the layers with a window."""
        if not isinstance(images, torch.Tensor):
            images = torch.frombuffer(images, dtype=torch.uint8)
        images = images.view(-1, self.geometry.block_bytes)
        first = min(self.windows.layers)
        parts = self._columns_of_layer(first)
        is_absent = (images[:, parts[0].start : parts[-1].end] == _ABSENT).all(dim=1)
        return np.asarray(~is_absent.numpy())

    def _columns_of_layer(self, index: int) -> list[_Column]:
        before = sum(len(layer.tensors) for layer in self.layers[:index])
        return self._columns[before : before + len(self.layers[index].tensors)]


def _columns(layers: Sequence[KvLayer], windows: Windows) -> list[_Column]:
    columns, start = [], 0
    for index, layer in enumerate(layers):
        for tensor in layer.tensors:
            rows = tensor.view(tensor.shape[0], -1).view(torch.uint8)
            columns.append(_Column(rows, start, start + rows.shape[1], index in windows.layers))
            start += rows.shape[1]
    return columns
