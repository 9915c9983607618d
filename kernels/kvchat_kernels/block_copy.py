"""Copies whole blocks, of all layers at once: to other blocks, into images, and from images.

Copy-on-write and the host and disk tiers use it.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import gcd

import torch

from kvchat_kernels.launch import Launch, on_device, uses_triton

# Ids on the host, or [num_blocks] int64 on the device of the pools.
BlockIds = Sequence[int] | torch.Tensor
# Bytes of a row that a program of the kernels copies.
_PART_BYTES = 8192


class PoolTensors:
    """Contiguous tensors of `num_blocks` rows each, on one device, in the order of the image.

    Row i of every tensor is a part of block i. The image of a block is its rows, one tensor after
    another, without gaps. With `starts` they are a part of it: rows begin at these bytes of an
    image of `image_bytes`. Keeps references to the tensors, so that the addresses stay valid.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        starts: Sequence[int] | None = None,
        image_bytes: int | None = None,
    ) -> None:
        assert tensors
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert len({(tensor.shape[0], tensor.device) for tensor in tensors}) == 1
        self.num_blocks = tensors[0].shape[0]
        self.device = tensors[0].device
        self._rows = tuple(tensor.view(self.num_blocks, -1).view(torch.uint8) for tensor in tensors)
        ends = list(accumulate((rows.shape[1] for rows in self._rows), initial=0))
        self._starts = ends[:-1] if starts is None else list(starts)
        self.image_bytes: int = ends[-1] if image_bytes is None else image_bytes

    @property
    def num_tensors(self) -> int:
        return len(self._rows)

    @property
    def largest_row(self) -> int:
        """The bytes of the longest row."""
        return max(rows.shape[1] for rows in self._rows)

    def columns(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield (tensor as [num_blocks, row_bytes] uint8, its start and its end in the image)."""
        for rows, start in zip(self._rows, self._starts, strict=True):
            yield rows, start, start + rows.shape[1]

    @cached_property
    def table(self) -> torch.Tensor:
        """[num_tensors, 3] int64 on the device: a tensor's address, bytes of a row, image start."""
        entries = [(rows.data_ptr(), rows.shape[1], start) for rows, start, _ in self.columns()]
        return torch.tensor(entries, dtype=torch.int64, device=self.device)

    @cached_property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides every address and number of bytes."""
        numbers = [number for rows in self._rows for number in (rows.data_ptr(), rows.shape[1])]
        return gcd(16, self.image_bytes, *self._starts, *numbers)


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


def copy_launch(pools: PoolTensors, sources: torch.Tensor, targets: torch.Tensor) -> Launch:
    """Return the launch that copies blocks; ids are [num_copies] int64 on the device."""
    from kvchat_kernels.block_copy_kernels import copy_kernel

    values = {"table_ptr": pools.table, "sources_ptr": sources, "targets_ptr": targets}
    words = _words(pools.alignment)
    return Launch(copy_kernel, _grid(pools, len(sources)), {**values, **words})


def image_launch(
    pools: PoolTensors, blocks: torch.Tensor, images: torch.Tensor, *, is_gather: bool
) -> Launch:
    """Return the launch that fills images from blocks, or blocks from images.

    blocks   [num_images] int64 on the device
    images   [num_images, image_bytes] uint8 on the device, contiguous
    """
    from kvchat_kernels.block_copy_kernels import image_kernel

    is_aligned = images.device.type == "meta" or images.data_ptr() % 16 == 0
    values = {
        "table_ptr": pools.table,
        "blocks_ptr": blocks,
        "images_ptr": images,
        "image_bytes": pools.image_bytes,
        "IS_GATHER": is_gather,
    }
    words = _words(pools.alignment if is_aligned else 1)
    return Launch(image_kernel, _grid(pools, len(blocks)), {**values, **words})


def _grid(pools: PoolTensors, num_blocks: int) -> tuple[int, int, int]:
    return num_blocks, pools.num_tensors, -(-pools.largest_row // _PART_BYTES)


def _words(alignment: int) -> dict[str, int]:
    """Return a kernel's constants; `alignment` (bytes) divides all its addresses and lengths."""
    word = min(alignment, 4)
    return {"WORD": word, "ALIGNED": alignment // word, "BLOCK": _PART_BYTES // word}
