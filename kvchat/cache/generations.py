"""Generations: the directories of a store, one for each identity, and how old and large they are.

Knows files and their times; knows no packs. What vanishes while it is looked at counts as nothing.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from kvchat.cache import own_directory
from kvchat.cache.own_directory import DATABASE, IDENTITY_NAME, PIN_MARK
from kvchat.core.errors import StoreError

# A file's tail fills a page of the disk, and its name some of a directory.
FILE_OVERHEAD_BYTES = 4096 + 256
# No file system's times are coarser.
_CLOCK_STEP_S = 2.0


def generations(directory: Path) -> list[Path]:
    """Return the directories in a store that belong to it."""
    with suppress(OSError):
        return [path for path in directory.iterdir() if own_directory.is_ours(path)]
    return []


def strangers(directory: Path) -> list[Path]:
    """Return what looks like a generation and is not ours, as those of an earlier kvchat do."""
    with suppress(OSError):
        return [
            path
            for path in directory.iterdir()
            if IDENTITY_NAME.fullmatch(path.name)
            and os.path.lexists(path / DATABASE)
            and not own_directory.is_ours(path)
        ]
    return []


def has_pins(generation: Path) -> bool:
    """Whether a generation is not to be dropped without need."""
    return os.path.lexists(generation / PIN_MARK)


class Sizes:
    """How large generations are; one is looked through again only where its table has changed.

    A file that a killed process left in it is not in the table: who learns of one calls `forget`.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, int]] = {}

    def of(self, generation: Path) -> int:
        """Return what the files of a generation take at most."""
        stamp = _stamp(generation)
        known = self._known.get(generation)
        if known is not None and known[0] == stamp:
            return known[1]
        num_bytes = tree_bytes(generation)
        # A table changed this moment could change again at what the clock calls the same time.
        if time.time() - last_used(generation) > _CLOCK_STEP_S:
            self._known[generation] = stamp, num_bytes
        return num_bytes

    def forget(self) -> None:
        self._known.clear()


def _stamp(generation: Path) -> object:
    """Return what changes whenever something is written to a generation's table."""
    return tuple(_times(generation / f"{DATABASE}{end}") for end in ("", "-wal"))


def _times(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


def drop(generation: Path) -> int:
    """Delete what is ours of a generation; return how many bytes that took."""
    before = tree_bytes(generation)
    own_directory.remove(generation)
    return before - tree_bytes(generation)


def last_used(generation: Path) -> float:
    """Return when a generation's table last changed, in seconds; 0 where it has none."""
    times = [0.0]
    for end in ("", "-wal"):
        with suppress(OSError):
            times.append((generation / f"{DATABASE}{end}").lstat().st_mtime)
    return max(times)


def set_last_used(generation: Path, used_s: float) -> None:
    """Have a generation last used at a time, in seconds, where that can be."""
    with suppress(OSError, StoreError), own_directory.held(generation) as descriptor:
        os.utime(DATABASE, (used_s, used_s), dir_fd=descriptor, follow_symlinks=False)


def tree_bytes(generation: Path) -> int:
    """Return what the files of a generation take at most; what others put there does not count."""
    return sum(size + FILE_OVERHEAD_BYTES for size in own_directory.sizes(generation).values())


def beside_packs_bytes(generation: Path) -> int:
    """Return what the files of a generation take at most that hold no pack, without a search."""
    paths = [generation / name for name in own_directory.names_beside_packs(generation)]
    return sum(file_bytes(p) + FILE_OVERHEAD_BYTES for p in paths if os.path.lexists(p))


def file_bytes(path: Path) -> int:
    """Return the length of a file, 0 where there is none."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def file_number(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of the same name, None where there is none."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_dev, info.st_ino
