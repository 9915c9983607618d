"""WorkingDirectory: opens what is below a directory, whatever happens to names meanwhile.

Names are walked one by one, from descriptor to descriptor, and no link is followed by the system: a
link is read and walked itself. So none leads out of the directory, not even one that is made
between a look and the opening.
"""

import errno
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvchat.core.paths import read_descriptor, require_regular
from kvchat.tools.toolbox import ToolFailed

_MOST_LINKS = 40
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a named pipe would otherwise wait for its other end.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class WorkingDirectory:
    """A directory, which stays the same one if it is renamed. Owns its descriptor."""

    def __init__(self, path: Path) -> None:
        """Open a directory; raises OSError."""
        self.path = path.resolve()
        self._names = (self.path, Path(os.path.abspath(path)))  # the second may have links in it
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    @contextmanager
    def directory(self, name: object) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of a directory below this one, and its path in it.

        Raises ToolFailed for one that is not there, or not below this directory.
        """
        with self._walked(name) as (walk, last):
            if last and not walk.enter(last):
                raise ToolFailed(f"there is no directory {name}.")
            yield walk.descriptor, walk.path

    def read(self, name: object, most_bytes: int) -> bytes:
        """Return the content of a file below this directory; raises ToolFailed."""
        with self._walked(name) as (walk, last):
            content = walk.read(last, most_bytes) if last else None
            if content is None:
                raise ToolFailed(f"there is no file {name}.")
            return content

    @contextmanager
    def _walked(self, name: object) -> "Iterator[tuple[_Walk, str]]":
        """Yield a walk that has come to where the last part of a name is, and that part.

        The part is empty if the name is that of the directory to which the walk has come.
        """
        if not isinstance(name, str) or "\0" in name:
            raise ToolFailed("the path must be a text.")
        walk = _Walk(self._descriptor, self._names, name)
        try:
            yield walk, walk.go()
        except UnicodeError as error:  # half of a surrogate pair
            raise ToolFailed("the path is not a possible one.") from error
        finally:
            walk.close()


class _Walk:
    """Goes from a directory to what a name says. Owns the descriptors of what is between."""

    def __init__(self, root: int, root_names: Sequence[Path], name: str) -> None:
        self._root = root
        self._root_names = root_names
        self._name = name
        self._entered: list[tuple[str, int]] = []
        self._num_links = 0

    @property
    def descriptor(self) -> int:
        return self._entered[-1][1] if self._entered else self._root

    @property
    def path(self) -> str:
        """Where the walk is, from the root; empty there."""
        return "/".join(name for name, _ in self._entered)

    def go(self) -> str:
        """Enter all directories before the last part of the name; return that part."""
        parts = self._parts(self._name)
        while parts:
            part = parts.pop(0)
            if part == "..":
                self._leave()
                continue
            link = self._link(part)
            if link is not None:
                parts = self._parts(link) + parts
            elif not parts:
                return part
            elif not self.enter(part):
                raise ToolFailed(f"there is no directory on the way to {self._name}.")
        return ""

    def enter(self, part: str) -> bool:
        """Go into a directory; return whether it is one."""
        try:
            self._entered.append((part, os.open(part, _DIRECTORY, dir_fd=self.descriptor)))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise ToolFailed(f"{part} cannot be read: {error.strerror}.") from error
        return True

    def read(self, part: str, most_bytes: int) -> bytes | None:
        """Return the content of a file; None if there is no regular file of that name."""
        return read_below(self.descriptor, part, most_bytes)

    def close(self) -> None:
        while self._entered:
            os.close(self._entered.pop()[1])

    def _parts(self, name: str) -> list[str]:
        """Return the parts of a name; a whole path begins at the root again."""
        if not name.startswith("/"):
            return [part for part in name.split("/") if part not in ("", ".")]
        path = Path(os.path.normpath(name))
        root = next((root for root in self._root_names if path.is_relative_to(root)), None)
        if root is None:
            raise self._outside()
        self.close()
        return list(path.relative_to(root).parts)

    def _leave(self) -> None:
        if not self._entered:
            raise self._outside()
        os.close(self._entered.pop()[1])

    def _link(self, part: str) -> str | None:
        """Return where a link leads; None for what is no link, or is not there."""
        try:
            target = os.readlink(part, dir_fd=self.descriptor)
        except OSError:
            return None
        self._num_links += 1
        if self._num_links > _MOST_LINKS:
            raise ToolFailed(f"{self._name} leads through too many links.")
        return target

    def _outside(self) -> ToolFailed:
        return ToolFailed(f"{self._name} is not below the working directory.")


def read_below(directory: int, name: str, most_bytes: int) -> bytes | None:
    """Return the content of a regular file in an open directory, None for anything else.

    Raises ToolFailed for a file that cannot be read.
    """
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                return None  # a device may act when it is opened
        descriptor = os.open(name, _FILE, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise ToolFailed(f"{name} cannot be read: {error.strerror}.") from error
    try:
        require_regular(descriptor, name)
        return read_descriptor(descriptor, most_bytes, name)
    except OSError as error:
        raise ToolFailed(f"{name} cannot be read: {error.strerror}.") from error
    finally:
        os.close(descriptor)
