"""PayloadFiles: the files beside a table that hold the images of its larger packs."""

import logging
import os
import stat
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvchat.cache.disk.model_dirs import CODED, PACK_FILE, PLAIN

_log = logging.getLogger(__name__)

# No pack is nearly as long. A longer file is damaged, and must not fill the memory.
MAX_FILE_BYTES = 1 << 28


class PayloadFiles:
    """Files of mode 0600 in a directory, with names of their own.

    The directory is held by its descriptor as long as this lives: if its name is given to something
    else meanwhile, that is neither read nor written. `has_leftovers` says that there may be files
    that the table does not count, such as those that could not be removed: until a sweep has
    removed all of them, and before the first sweep, only a search tells what the directory takes.
    """

    def __init__(self, directory: Path) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(directory, flags)
        self.has_leftovers = True
        # Closes the descriptor: when it is called, or else when `self` is no longer referenced.
        self._close = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Close the directory, for good: its descriptor's number may soon be another file's."""
        self._close()
        self.descriptor = -1

    def write(self, payload: memoryview, ending: str = PLAIN) -> str:
        """Write a new file; return its name. If that fails, none is left."""
        name = f"{os.urandom(16).hex()}{ending}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                while payload:
                    payload = payload[file.write(payload) :]
        except OSError:
            self.remove(name)
            raise
        return name

    def read(self, name: object, take: Callable[[int], memoryview]) -> memoryview:
        """Return a file's content, in memory that `take` gives.

        A file that is too long, of another user, or of no name that `write` gives, has none. Raises
        OSError where there is no file.
        """
        if not is_pack_file(name):
            return memoryview(b"")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(str(name), flags, dir_fd=self.descriptor)
        try:
            info = os.fstat(descriptor)
            if info.st_uid != os.getuid() or info.st_size > MAX_FILE_BYTES:
                return memoryview(b"")
            memory = take(info.st_size)
            return memory[: _read_all(descriptor, memory)]
        finally:
            os.close(descriptor)

    def drop_pages(self, name: str) -> None:
        """Have the next read of a file come from the disk, where the system can be asked to."""
        with suppress(OSError, AttributeError):
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.descriptor)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def remove(self, name: object) -> None:
        """Remove a file; if that fails, there are leftovers. Another's file is left alone."""
        if not is_pack_file(name):
            return
        try:
            os.unlink(str(name), dir_fd=self.descriptor)
        except FileNotFoundError:  # another process has removed it already
            pass
        except OSError as error:
            self.has_leftovers = True
            _log.warning("a file of a pack could not be removed: %s", error.strerror)

    def remove_all_but(self, known_bytes: Mapping[object, object]) -> None:
        """Remove the files that are not in `known_bytes`, with this name and of this size."""
        names = list(filter(is_pack_file, os.listdir(self.descriptor)))
        unknown = [name for name in names if self._is_unknown(name, known_bytes.get(name))]
        self.has_leftovers = False
        for name in unknown:
            self.remove(name)

    def _is_unknown(self, name: str, known_bytes: object) -> bool:
        """Whether a file is not one of `known_bytes`; a directory is not ours."""
        with suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            return info.st_size != known_bytes and not stat.S_ISDIR(info.st_mode)
        return False


def is_coded(name: str) -> bool:
    """Whether a file's payload is coded as of `pack_code.py`."""
    return name.endswith(CODED)


def is_pack_file(name: object) -> bool:
    """Whether a table's file name is one that PayloadFiles gives."""
    return isinstance(name, str) and PACK_FILE.fullmatch(name) is not None


def _read_all(descriptor: int, memory: memoryview) -> int:
    """Fill `memory` as far as the file reaches; return how far that is."""
    position = 0
    while position < len(memory) and (count := os.readv(descriptor, [memory[position:]])):
        position += count
    return position
