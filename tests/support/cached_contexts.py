"""Contexts on a device tier whose KV is known: computed by hand, without a model.

The KV of a token is a number that depends on it and all before it, so a block that is handed to the
wrong context shows as a wrong number.
"""

import zlib
from collections.abc import Sequence

import torch

from kvchat.cache.block_manager import BlockTable, CacheManager

CPU = torch.device("cpu")


def expected_kv(ids: Sequence[int], position: int) -> float:
    """Return what stands in every element of the token's KV."""
    return float(zlib.crc32(bytes(ids[: position + 1])) & 0xFFFF)


def write_kv(manager: CacheManager, table: BlockTable, ids: Sequence[int], start: int) -> None:
    """Compute the KV of the tokens from `start` on, in blocks that were reserved."""
    for position in range(start, len(ids)):
        [slot] = table.slots(position, position + 1)
        for tensors in manager.kv_pool.layers:
            for tensor in tensors:
                tensor.flatten(0, 1)[slot] = expected_kv(ids, position)


def compute(manager: CacheManager, ids: Sequence[int]) -> int:
    """Compute what of a context is not cached and leave it cached; return how much was."""
    table = manager.match(ids)
    assert manager.reserve(table, table.cached_len, len(ids))
    write_kv(manager, table, ids, table.cached_len)
    manager.release(table, ids)
    return table.cached_len


def assert_kv_is_right(manager: CacheManager, table: BlockTable, ids: Sequence[int]) -> None:
    """Hold every element of the first len(ids) tokens of a table against what it has to be."""
    slots = torch.tensor(table.slots(0, len(ids)), dtype=torch.int64)
    expected = torch.tensor([expected_kv(ids, position) for position in range(len(ids))])
    for tensors in manager.kv_pool.layers:
        for tensor in tensors:
            found = tensor.flatten(0, 1)[slots].flatten(1).float()
            assert torch.equal(found, expected[:, None].expand_as(found))


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
