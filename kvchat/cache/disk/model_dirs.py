"""The directories of a store, one for each model identity: which are ours, how old and how large.

The user may name any directory for the store, and other programs also use names of 32 hexadecimal
digits. So a directory is ours only if it holds a marker file with the directory's own name in its
name, and only files with names of ours are deleted in it. A directory is held by its descriptor, so
nothing outside is reached if its name is given to something else. A file that vanishes meanwhile
counts as nothing; one that cannot be looked at raises OSError, or a failing disk would look empty.
"""

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private

DATABASE = "cache.db"
MISS_LOG = "fates"
# A directory with this file has pins: it is not deleted to make room for others.
PIN_MARK = "pinned"
# The name of a payload's file: `.kv` as it is, `.kvz` coded as of `pack_code.py`.
PACK_FILE = re.compile(r"[0-9a-f]{32}\.kvz?")
PLAIN, CODED = ".kv", ".kvz"
IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
# The directory of packed weights, beside those of models.
WEIGHTS = "weights"

_TABLE_FILES = tuple(f"{DATABASE}{end}" for end in ("", "-wal", "-shm", "-journal"))
# Errors of looking for a file that does not exist.
_ABSENT = (FileNotFoundError, NotADirectoryError)
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_ours(path: Path) -> bool:
    """Whether a directory is one that a store has made."""
    return IDENTITY_NAME.fullmatch(path.name) is not None and _is_directory(path) and _is_mark(path)


def _is_directory(path: Path) -> bool:
    with suppress(*_ABSENT, PermissionError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def _is_mark(path: Path, descriptor: int | None = None) -> bool:
    """Whether the mark is in the directory `path`, or in the one held by `descriptor`."""
    name = mark_name(path)
    try:
        info = os.stat(
            name if descriptor is not None else path / name,
            dir_fd=descriptor,
            follow_symlinks=False,
        )
    except (*_ABSENT, PermissionError):
        return False
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()


def mark_name(path: Path) -> str:
    """Return the name of the mark: a copy of it in another directory marks nothing."""
    return f"{path.name}.kvchat"


def make(path: Path) -> None:
    """Make and mark a directory of ours, if there is none.

    An empty directory becomes ours: a process that is killed here leaves one. Raises StoreError if
    it is not ours, OSError if the disk fails.
    """
    if path.is_symlink():
        raise StoreError(f"{path} is a symbolic link.", "Remove it.")
    with suppress(FileExistsError):
        path.mkdir(0o700)
    descriptor = os.open(path, _FLAGS)
    try:
        if not _is_mark(path, descriptor):
            has_others = bool(os.listdir(descriptor)) and not _is_mark(path, descriptor)
            if os.fstat(descriptor).st_uid != os.getuid() or has_others:
                raise StoreError(
                    f"{path} was not made by this kvchat, and is left alone.",
                    "Move it, or choose another directory with --cache-dir.",
                )
            _mark(path, descriptor)
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _mark(path: Path, descriptor: int) -> None:
    name = mark_name(path)
    os.close(open_private(Path(name), os.O_WRONLY | os.O_CREAT, dir_fd=descriptor))
    os.fsync(descriptor)  # after a power cut, packs without a mark would never be deleted


@contextmanager
def hold(path: Path) -> Iterator[int]:
    """Yield a descriptor of a directory of ours, to look at and change what is in it.

    Raises StoreError where it is not ours, OSError where it is none or cannot be opened.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        if not _is_mark(path, descriptor):
            raise StoreError(f"{path} was not made by this kvchat, and is left alone.")
        yield descriptor
    finally:
        os.close(descriptor)


def open_in(path: Path, name: str, flags: int) -> int:
    """Open a file in a directory of ours as `open_private` does.

    A file that has another name too, which may be anywhere, loses ours first.
    """
    with hold(path) as directory:
        with suppress(FileNotFoundError):
            if os.stat(name, dir_fd=directory, follow_symlinks=False).st_nlink > 1:
                os.unlink(name, dir_fd=directory)
        return open_private(Path(name), flags, dir_fd=directory)


def sizes(path: Path) -> dict[str, int]:
    """Return the files of ours in a directory of ours and their lengths; nothing elsewhere.

    Files of others do not count. Raises OSError if the directory cannot be read.
    """
    found = {}
    with suppress(*_ABSENT, StoreError), hold(path) as descriptor:
        for name in os.listdir(descriptor):
            if _is_our_name(name, path):
                with suppress(FileNotFoundError):
                    info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if not stat.S_ISDIR(info.st_mode):
                        found[name] = info.st_size
    return found


def names_beside_packs(path: Path) -> list[str]:
    """Return the names of the files of ours in a directory that hold no pack."""
    return [*_TABLE_FILES, MISS_LOG, PIN_MARK, mark_name(path)]


def _is_our_name(name: str, path: Path) -> bool:
    return PACK_FILE.fullmatch(name) is not None or name in names_beside_packs(path)


def empty(path: Path) -> None:
    """Delete the files of ours in a directory of ours, and the mark not; nothing elsewhere."""
    with suppress(OSError, StoreError), hold(path) as descriptor:
        _empty(path, descriptor)


def _empty(path: Path, descriptor: int) -> None:
    """Delete the table before its logs, and keep the logs if the table cannot be deleted.

    A process that has the table open would go on with logs that have no name, and the next process
    to open the table would begin new ones.
    """
    names = {n for n in os.listdir(descriptor) if _is_our_name(n, path) and n != mark_name(path)}
    if DATABASE in names:
        names.remove(DATABASE)
        try:
            os.unlink(DATABASE, dir_fd=descriptor)
        except OSError:
            names.difference_update(_TABLE_FILES)
    _unlink(names, descriptor)


def _unlink(names: Iterable[str], descriptor: int) -> None:
    for name in names:
        with suppress(OSError):
            os.unlink(name, dir_fd=descriptor)


def remove(path: Path) -> None:
    """Delete the files of ours in a directory of ours, and it too where it then is empty."""
    with suppress(OSError, StoreError), hold(path) as descriptor:
        _empty(path, descriptor)
        if os.listdir(descriptor) != [mark_name(path)]:
            return
        os.unlink(mark_name(path), dir_fd=descriptor)
        try:
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                path.rmdir()
        except OSError:  # a file of others has just come into it
            _mark(path, descriptor)


def has_only_files(path: Path) -> bool:
    """Whether nothing but files stands where a table of ours and its logs belong, and none of them
    has another name, which may be anywhere.

    SQLite opens all of them by name: a file put there after this check is not noticed.
    """
    for name in _TABLE_FILES:
        with suppress(FileNotFoundError):
            info = (path / name).lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
                return False
    return True


def clear_the_way(path: Path) -> None:
    """Remove everything that is no file from the places of a table of ours and its logs.

    A link, a pipe or a file with another name elsewhere is unlinked, a directory is given another
    name. Logs without a table, which a new one would take for its own, are unlinked too. Raises as
    `held` does.
    """
    with hold(path) as descriptor:
        if DATABASE not in os.listdir(descriptor):
            _unlink(_TABLE_FILES, descriptor)
        for name in _TABLE_FILES:
            with suppress(FileNotFoundError):
                info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    aside = f"{name}.aside-{os.urandom(4).hex()}"
                    os.rename(name, aside, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                elif not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
                    os.unlink(name, dir_fd=descriptor)


# A file's tail fills a page of the disk, and its name some of a directory.
FILE_OVERHEAD_BYTES = 4096 + 256
# No file system's times are coarser.
_CLOCK_STEP_S = 2.0


def find_model_dirs(directory: Path) -> list[Path]:
    """Return the directories in a store that belong to it; none where it cannot be looked at."""
    with suppress(OSError):
        return list_model_dirs(directory)
    return []


def list_model_dirs(directory: Path) -> list[Path]:
    """Return the directories in a store that belong to it, all of them, or raise OSError."""
    with suppress(*_ABSENT):
        return [path for path in directory.iterdir() if is_ours(path)]
    return []


def strangers(directory: Path) -> list[Path]:
    """Return what looks like a model directory and is not ours."""
    with suppress(OSError):
        return [
            path
            for path in directory.iterdir()
            if IDENTITY_NAME.fullmatch(path.name)
            and os.path.lexists(path / DATABASE)
            and not is_ours(path)
        ]
    return []


def has_pins(model_dir: Path) -> bool:
    """Whether a model directory has pins that do not end."""
    return _info(model_dir / PIN_MARK) is not None


class Sizes:
    """How large model directories are; one is looked through again only where its table has
    changed.

    A file that a killed process left in it is not in the table: a caller that finds one must call
    `forget`.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, int]] = {}

    def of(self, model_dir: Path) -> int:
        """Return what the files of a model directory take at most."""
        stamp = _stamp(model_dir)
        known = self._known.get(model_dir)
        if known is not None and known[0] == stamp:
            return known[1]
        num_bytes = tree_bytes(model_dir)
        # A table changed this moment could change again at what the clock calls the same time.
        if time.time() - last_used(model_dir) > _CLOCK_STEP_S:
            self._known[model_dir] = stamp, num_bytes
        return num_bytes

    def forget(self) -> None:
        self._known.clear()


def _stamp(model_dir: Path) -> object:
    """Return a value that changes with every write to a model directory's table."""
    return tuple(_times(model_dir / f"{DATABASE}{end}") for end in ("", "-wal"))


def _times(path: Path) -> tuple[int, int, int] | None:
    info = _info(path)
    return (info.st_ino, info.st_size, info.st_mtime_ns) if info is not None else None


def _info(path: Path) -> os.stat_result | None:
    """Return the status of a file, None if there is none."""
    with suppress(*_ABSENT):
        return path.lstat()
    return None


def drop(model_dir: Path) -> int:
    """Delete our files of a model directory; return how many bytes they took."""
    before = tree_bytes(model_dir)
    remove(model_dir)
    return before - tree_bytes(model_dir)


def last_used(model_dir: Path) -> float:
    """Return when a model directory's table last changed, in seconds; 0 where it has none."""
    found = (_info(model_dir / f"{DATABASE}{end}") for end in ("", "-wal"))
    return max((info.st_mtime for info in found if info is not None), default=0.0)


def set_last_used(model_dir: Path, used_s: float) -> None:
    """Have a model directory last used at a time, in seconds, where that can be."""
    with suppress(OSError, StoreError), hold(model_dir) as descriptor:
        os.utime(DATABASE, (used_s, used_s), dir_fd=descriptor, follow_symlinks=False)


def tree_bytes(model_dir: Path) -> int:
    """Return what the files of a model directory take at most; what others put there does not
    count.
    """
    return sum(size + FILE_OVERHEAD_BYTES for size in sizes(model_dir).values())


def beside_packs_bytes(model_dir: Path) -> int:
    """Return what the files of a model directory take at most that hold no pack, without a
    search.
    """
    found = (_info(model_dir / name) for name in names_beside_packs(model_dir))
    return sum(info.st_size + FILE_OVERHEAD_BYTES for info in found if info is not None)


def file_bytes(path: Path) -> int:
    """Return the length of a file, 0 where there is none."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def file_number(path: Path) -> tuple[int, int] | None:
    """Return numbers that another file of the same name would not have; None without a file."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_dev, info.st_ino
