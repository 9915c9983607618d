"""Contexts on a device tier whose KV is known: computed by hand, without a model.

The key and the value of a token are two numbers that depend on it and all before it, so a block
that is handed to the wrong context shows as a wrong number.
"""

import zlib
from collections.abc import Sequence

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.kv_pool import LayerGeometry
from kvchat_kernels.kv_layer import KvLayer

CPU = torch.device("cpu")


def expected_kv(ids: Sequence[int], position: int) -> tuple[float, float]:
    """Return what stands in every element of the token's key, and of its value."""
    number = zlib.crc32(bytes(ids[: position + 1]))
    return float(number & 0xFFFF), float(number >> 16)


def write_kv(manager: CacheManager, table: BlockTable, ids: Sequence[int], start: int) -> None:
    """Compute the KV of the tokens from `start` on, in blocks that were reserved."""
    slots = torch.tensor(table.slots(start, len(ids)), dtype=torch.int64)
    pool = manager.kv_pool
    for layer, shape in zip(pool.layers, pool.geometry.layers, strict=True):
        _write(layer, shape, ids, start, slots)


def _write(
    layer: KvLayer, shape: LayerGeometry, ids: Sequence[int], start: int, slots: torch.Tensor
) -> None:
    numbers = torch.tensor([expected_kv(ids, place) for place in range(start, len(ids))])
    for_all = numbers.view(-1, 2, 1, 1)
    key, value = (
        for_all[:, part].expand(-1, shape.num_kv_heads, dim)
        for part, dim in enumerate((shape.key_dim, shape.value_dim))
    )
    layer.write(key, value, slots)


def compute(manager: CacheManager, ids: Sequence[int]) -> int:
    """Compute what of a context is not cached and leave it cached; return how much was."""
    table = manager.match(ids)
    assert manager.reserve(table, table.cached_len, len(ids))
    write_kv(manager, table, ids, table.cached_len)
    manager.release(table, ids)
    return table.cached_len


def assert_kv_is_right(manager: CacheManager, table: BlockTable, ids: Sequence[int]) -> None:
    """Hold all that is stored of a table's first len(ids) tokens against what it has to be."""
    if not ids:
        return
    slots = torch.tensor(table.slots(0, len(ids)), dtype=torch.int64)
    geometry = manager.kv_pool.geometry
    num_blocks = -(-len(ids) // geometry.block_size)
    for layer, shape in zip(manager.kv_pool.layers, geometry.layers, strict=True):
        right = geometry.format.new_layer(shape, geometry, num_blocks, CPU)
        _write(right, shape, ids, 0, torch.arange(len(ids)))
        for found, expected in zip(layer.tensors, right.tensors, strict=True):
            assert torch.equal(found.flatten(0, 1)[slots], expected.flatten(0, 1)[: len(ids)])


def images_of(manager: CacheManager, ids: Sequence[int], first: int, last: int) -> bytes:
    """Return the images of a context's blocks `first` to `last - 1`, which must be there."""
    return b"".join(_image_of(manager, ids, block) for block in range(first, last))


def _image_of(manager: CacheManager, ids: Sequence[int], block: int) -> bytes:
    images = manager.export(ids, block, block + 1)
    assert images is not None
    try:
        return bytes(images.read())
    finally:
        images.release()
