"""The tensors that together hold a block, and the torch reference of the block copies."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import gcd

import torch

# Ids on the host, or [num_blocks] int64 on the device of the pools.
BlockIds = Sequence[int] | torch.Tensor


class PoolTensors:
    """Contiguous tensors of `num_blocks` rows each, on one device, in the order of the image.

    Row i of every tensor is a part of block i. The image of a block is its rows, one tensor after
    another, without gaps. Keeps references to the tensors, so that the addresses stay valid.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        assert tensors
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert len({(tensor.shape[0], tensor.device) for tensor in tensors}) == 1
        self.num_blocks = tensors[0].shape[0]
        self.device = tensors[0].device
        self._rows = tuple(tensor.view(self.num_blocks, -1).view(torch.uint8) for tensor in tensors)

    @property
    def image_bytes(self) -> int:
        return sum(rows.shape[1] for rows in self._rows)

    @property
    def num_tensors(self) -> int:
        return len(self._rows)

    @property
    def largest_row(self) -> int:
        """The bytes of the longest row."""
        return max(rows.shape[1] for rows in self._rows)

    def columns(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield (tensor as [num_blocks, row_bytes] uint8, its start and its end in the image)."""
        start = 0
        for rows in self._rows:
            yield rows, start, start + rows.shape[1]
            start += rows.shape[1]

    @cached_property
    def table(self) -> torch.Tensor:
        """[num_tensors, 3] int64 on the device: a tensor's address, bytes of a row, image start."""
        entries = [(rows.data_ptr(), rows.shape[1], start) for rows, start, _ in self.columns()]
        return torch.tensor(entries, dtype=torch.int64, device=self.device)

    @cached_property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides every address and every row's bytes."""
        numbers = [number for rows in self._rows for number in (rows.data_ptr(), rows.shape[1])]
        return gcd(16, *numbers)


def copy_blocks_reference(pools: PoolTensors, sources: BlockIds, targets: BlockIds) -> None:
    """Copy blocks to other blocks; see `copy_blocks`."""
    for rows, _, _ in pools.columns():
        rows[_selector(targets)] = rows[_selector(sources)]


def gather_blocks_reference(pools: PoolTensors, blocks: BlockIds, images: torch.Tensor) -> None:
    """Fill images from blocks; see `gather_blocks`."""
    for rows, start, end in pools.columns():
        images[:, start:end] = rows[_selector(blocks)]


def scatter_blocks_reference(pools: PoolTensors, blocks: BlockIds, images: torch.Tensor) -> None:
    """Fill blocks from images; see `scatter_blocks`."""
    for rows, start, end in pools.columns():
        rows[_selector(blocks)] = images[:, start:end]


def _selector(blocks: BlockIds) -> slice | list[int] | torch.Tensor:
    """Return an index for `blocks`: a slice if they are adjacent, which is much faster."""
    if isinstance(blocks, torch.Tensor):
        return blocks
    first, last = blocks[0], blocks[-1] + 1
    is_run = list(blocks) == list(range(first, last))
    return slice(first, last) if is_run else list(blocks)
