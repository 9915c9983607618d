"""Generations: the directories of a store, one for each identity, and how old and large they are.

Knows files and their times; knows no packs. What vanishes while it is looked at counts as nothing.
"""

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

DATABASE = "cache.db"
# A file's tail fills a page of the disk, and its name some of a directory.
FILE_OVERHEAD_BYTES = 8192
# No file system's times are coarser.
_CLOCK_STEP_S = 2.0
FATES = "fates"
# A generation with this file in it has pins: nobody drops it without need.
PIN_MARK = "pinned"
# The directory may be any that the user names, and others call theirs by digests too: what is not
# called like an identity, or holds what we never write, is not ours.
_NAME = re.compile(r"[0-9a-f]{32}")
_CONTENT = re.compile(rf"{re.escape(DATABASE)}(-[a-z]+)?|{FATES}|{PIN_MARK}|[0-9a-f]{{2}}")


def generations(directory: Path) -> list[Path]:
    """Return the directories in a store that belong to it."""
    with suppress(OSError):
        return [path for path in directory.iterdir() if _is_generation(path)]
    return []


def _is_generation(path: Path) -> bool:
    is_ours = _NAME.fullmatch(path.name) is not None
    return is_ours and path.is_dir() and not path.is_symlink() and _holds_ours_alone(path)


def _holds_ours_alone(path: Path) -> bool:
    """Whether a directory has a table, or nothing that anybody but us would have put there."""
    if (path / DATABASE).is_file():
        return True
    with suppress(OSError), os.scandir(path) as entries:
        return all(_CONTENT.fullmatch(entry.name) for entry in entries)
    return False


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
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


def drop(generation: Path) -> int:
    """Delete a generation; return how many bytes it took."""
    num_bytes = tree_bytes(generation)
    shutil.rmtree(generation, ignore_errors=True)
    return num_bytes


def last_used(generation: Path) -> float:
    """Return when a generation's table last changed, in seconds; 0 where it has none."""
    times = [0.0]
    for end in ("", "-wal"):
        with suppress(OSError):
            times.append((generation / f"{DATABASE}{end}").stat().st_mtime)
    return max(times)


def tree_bytes(directory: Path) -> int:
    """Return what the files below a directory take at most."""
    paths = [Path(top) / name for top, _, names in os.walk(directory) for name in names]
    return sum(file_bytes(path) + FILE_OVERHEAD_BYTES for path in paths)


def flat_bytes(directory: Path) -> int:
    """Return what the files of a directory take at most, without those in directories below."""
    with suppress(OSError), os.scandir(directory) as entries:
        names = [entry.path for entry in entries if not entry.is_dir(follow_symlinks=False)]
        return sum(file_bytes(Path(name)) + FILE_OVERHEAD_BYTES for name in names)
    return 0


def file_bytes(path: Path) -> int:
    """Return the length of a file, 0 where there is none."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def file_number(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of the same name, None where there is none."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino
