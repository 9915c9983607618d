"""Contexts cut into packs, whose images say which tokens they stand for.

A block's image is derived from its chain key, so that a block handed to another context shows.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import chain_keys, encode_ids
from kvchat.cache.tier import BlockRun, Layout, PackHead

LAYOUT = Layout(identity=b"model of a test.", block_size=2, block_bytes=40_000)
# What the tier sets aside for its tables is more than most tests keep.
ROOM = 8 << 20


def open_tier(
    directory: Path, limit_bytes: int = ROOM, layout: Layout = LAYOUT, **settings: Any
) -> DiskTier:
    return DiskTier(directory, layout, limit_bytes, **{"min_free_bytes": 0, **settings})


def keys_of(tier: DiskTier, ids: Sequence[int], layout: Layout = LAYOUT) -> list[bytes]:
    return chain_keys(tier.root, encode_ids(ids), layout.ids_bytes)


def image_of(keys: Sequence[bytes], layout: Layout = LAYOUT) -> bytes:
    return b"".join((key * (layout.block_bytes // len(key))) for key in keys)


def find(tier: DiskTier, ids: Sequence[int], layout: Layout = LAYOUT) -> list[BlockRun]:
    return tier.find(keys_of(tier, ids, layout), encode_ids(ids))


def num_found(tier: DiskTier, ids: Sequence[int]) -> int:
    return sum(found.num_blocks for found in find(tier, ids))


def save(
    tier: DiskTier, ids: Sequence[int], layout: Layout = LAYOUT, is_one_shot: bool = False
) -> bool:
    """Write what the tier has not of a context, as one pack."""
    keys = keys_of(tier, ids, layout)
    found = tier.find(keys, encode_ids(ids), is_one_shot)
    known = sum(run.num_blocks for run in found)
    if known == len(keys):
        return True
    parent = keys[known - 1] if known else tier.root
    head = PackHead(
        parent, encode_ids(ids)[known * layout.ids_bytes : len(keys) * layout.ids_bytes]
    )
    return tier.write(head, memoryview(image_of(keys[known:], layout)), is_one_shot)


def restored(tier: DiskTier, ids: Sequence[int], layout: Layout = LAYOUT) -> int:
    """Read all a tier has of a context; return how many blocks, each of them the right one."""
    keys = keys_of(tier, ids, layout)
    count = 0
    for found in find(tier, ids, layout):
        assert found.start_block == count
        image = bytes(tier.read(found))
        count += found.num_blocks
        assert image == image_of(keys[found.start_block : count], layout), "another context's KV"
    return count


def used_bytes(directory: Path) -> int:
    """Return what a directory takes on the disk, as `du` says."""
    total = 0
    for top, _, names in os.walk(directory):
        for path in [Path(top), *(Path(top) / name for name in names)]:
            try:
                total += path.lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def payload_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("**/*.kv"))
