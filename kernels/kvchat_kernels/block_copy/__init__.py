"""Copies whole blocks, of all layers at once: to other blocks, into images, and from images.

Copy-on-write and the host and disk tiers use it.
"""

import torch

from kvchat_kernels.block_copy.reference import (
    BlockIds,
    PoolTensors,
    copy_blocks_reference,
    gather_blocks_reference,
    scatter_blocks_reference,
)
from kvchat_kernels.launch import on_device, uses_triton

__all__ = ["BlockIds", "PoolTensors", "copy_blocks", "gather_blocks", "scatter_blocks"]


def copy_blocks(
    pools: PoolTensors, sources: BlockIds, targets: BlockIds, *, impl: str = "auto"
) -> None:
    """Copy block `sources[i]` to block `targets[i]` in every tensor, in place.

    Targets are distinct, and none of them is also a source. Ids are numbers on the host, whose
    range is checked, or [num_blocks] int64 tensors on the device, whose range is not checked.
    `impl` is auto, triton or reference. On a GPU one kernel copies all tensors; the call does not
    wait for it.
    """
    assert len(sources) == len(targets)
    _check(pools, sources)
    _check(pools, targets)
    if not len(sources):
        return
    if uses_triton(pools.device, impl):
        from kvchat_kernels.block_copy.kernel import copy_launch

        copy_launch(pools, _on(pools, sources), _on(pools, targets)).run()
    else:
        copy_blocks_reference(pools, sources, targets)


def gather_blocks(
    pools: PoolTensors, blocks: BlockIds, images: torch.Tensor, *, impl: str = "auto"
) -> None:
    """Fill `images`, [len(blocks), image_bytes] uint8 on the pools' device, with blocks' images.

    `images` is contiguous and owned by the caller. On a GPU its address should be a multiple of 16
    bytes; otherwise the kernel copies single bytes.
    """
    _check(pools, blocks)
    _check_images(pools, blocks, images)
    if not len(blocks):
        return
    if uses_triton(pools.device, impl):
        from kvchat_kernels.block_copy.kernel import image_launch

        image_launch(pools, _on(pools, blocks), images, is_gather=True).run()
    else:
        gather_blocks_reference(pools, blocks, images)


def scatter_blocks(
    pools: PoolTensors, blocks: BlockIds, images: torch.Tensor, *, impl: str = "auto"
) -> None:
    """Fill distinct `blocks` from images that `gather_blocks` made; the shapes are the same."""
    _check(pools, blocks)
    _check_images(pools, blocks, images)
    if not len(blocks):
        return
    if uses_triton(pools.device, impl):
        from kvchat_kernels.block_copy.kernel import image_launch

        image_launch(pools, _on(pools, blocks), images, is_gather=False).run()
    else:
        scatter_blocks_reference(pools, blocks, images)


def _on(pools: PoolTensors, blocks: BlockIds) -> torch.Tensor:
    if isinstance(blocks, torch.Tensor):
        return blocks
    return on_device(blocks, torch.int64, pools.device)


def _check(pools: PoolTensors, blocks: BlockIds) -> None:
    if isinstance(blocks, torch.Tensor):
        assert blocks.dtype == torch.int64
        assert blocks.device == pools.device
    else:  # a kernel would write outside the pool for a wrong id
        assert all(0 <= block < pools.num_blocks for block in blocks), blocks


def _check_images(pools: PoolTensors, blocks: BlockIds, images: torch.Tensor) -> None:
    assert images.shape == (len(blocks), pools.image_bytes), images.shape
    assert images.dtype == torch.uint8
    assert images.device == pools.device
    assert images.is_contiguous()
