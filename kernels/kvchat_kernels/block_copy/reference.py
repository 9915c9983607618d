"""The torch reference of the block copies: one copy per tensor.

It is fast on a CPU, where a copy of adjacent blocks is one memcpy.
"""

import torch

from kvchat_kernels.block_copy.pool_tensors import BlockIds, PoolTensors


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
