"""How many bytes of KV a directory may hold. Knows free space; knows no store that is open."""

import os
import shutil
from pathlib import Path

from kvchat.cache.generations import generations, tree_bytes
from kvchat.core.config import Size

_DEFAULT_SHARE = Size(share=0.10)
_MAX_DEFAULT_BYTES = 20 << 30
_MIN_FREE_BYTES = 1 << 30
_MIN_FREE_SHARE = 0.05


def disk_budget(size: Size | None, directory: Path) -> int:
    """Return the bytes KV may take in `directory`, which need not exist yet.

    A share, the default's too, is taken of what would be free without the KV that is there: a
    limit that shrank as the store grew would empty it again.
    """
    if size is not None and size.num_bytes is not None:
        return size.num_bytes
    existing = nearest_existing(directory)
    kept = sum(tree_bytes(path) for path in generations(directory))
    available = shutil.disk_usage(existing).free + kept
    if size is not None:
        return size.resolve(available)
    return min(_DEFAULT_SHARE.resolve(available), _MAX_DEFAULT_BYTES)


def nearest_existing(directory: Path) -> Path:
    """Return a directory, or the nearest above it that exists."""
    around = (directory, *directory.absolute().parents)
    return next((path for path in around if os.path.exists(path)), Path("/"))


def why_nothing_fits(size: Size | None, directory: Path) -> str:
    """Return why KV may take no byte in `directory`, in a sentence; "" where the user says so."""
    if size is not None and not (size.num_bytes or size.share):
        return ""
    return f"There is no free space for KV in {directory}."


def leaves_free(directory: Path, num_bytes: int, min_free_bytes: int | None) -> bool:
    """Return whether the disk keeps what is left alone, None the default, after `num_bytes`."""
    disk = shutil.disk_usage(directory)
    floor = min_free_bytes
    if floor is None:
        floor = min(_MIN_FREE_BYTES, int(disk.total * _MIN_FREE_SHARE))
    return disk.free - num_bytes >= floor
