"""Deletes downloaded models: what lies in the hub's cache, and nothing else.

Files in other places are the user's own or another program's. Links are not followed: a file of the
cache is deleted only inside its repository's directory.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvchat.core.errors import StoreError, UsageError
from kvchat.core.text import one_line
from kvchat.model.checkpoint.local_models import LocalModel
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT, HUB_ID
from kvchat.model.files.hub_cache import repository_directory, snapshots
from kvchat.model.gguf.source import OLLAMA, choose, gguf_names, parts_of


@dataclass(frozen=True, slots=True)
class Removable:
    """What a model has in the hub's cache: its repository's directory, and the paths in it that go.

    paths       links and the files behind them; none where the whole directory goes
    num_bytes   what that frees
    words       what goes, for the user
    """

    repository: Path
    paths: tuple[Path, ...]
    num_bytes: int
    words: str


def removable(name: str, model: LocalModel | None) -> Removable:
    """Return what deleting a model would remove; raises UsageError for one that is not ours."""
    shown = one_line(name, 80)
    if name in (DEMO, DEMO_DRAFT):
        raise UsageError("The demo is a part of kvchat.", "Uninstalling kvchat removes it.")
    if name.startswith(OLLAMA):
        raise UsageError(f"{shown} is ollama's.", f"`ollama rm {name[len(OLLAMA) :]}` deletes it.")
    if os.path.isabs(name):
        raise UsageError(
            f"{shown} is a file of yours, which kvchat did not write.", "Delete it by hand."
        )
    place, _, quant = name.partition(":")
    repository = repository_directory(place)
    is_here = HUB_ID.match(place) and repository.is_dir() and not repository.is_symlink()
    if model is None or not is_here:
        raise UsageError(f"There is no downloaded model {shown}.", "`kvchat models` lists them.")
    if not quant:
        num_bytes = sum(_size(path) for path in _files_below(repository))
        return Removable(repository, (), num_bytes, "its whole repository")
    paths = tuple(_of_format(name, place, quant, repository))
    num_bytes = sum(_size(path) for path in paths if not path.is_symlink())
    if {path for path in _files_below(repository) if path.suffix == ".gguf"} <= set(paths):
        return Removable(repository, (), num_bytes, "its whole repository")
    return Removable(repository, paths, num_bytes, f"its files of {one_line(quant, 32)}")


def _of_format(name: str, place: str, quant: str, repository: Path) -> Iterator[Path]:
    """Yield the files of one format in all snapshots, and what their links point to."""
    for snapshot in snapshots(place):
        names = [path.relative_to(snapshot).as_posix() for path in _files_below(snapshot)]
        first = choose(name, gguf_names(names), quant)
        for each in parts_of(first, names):
            path = snapshot / each
            yield path
            target = Path(os.path.realpath(path))
            if path.is_symlink() and target.is_relative_to(repository.resolve()):
                yield target


def remove(found: Removable) -> None:
    """Delete it; raises StoreError for what cannot be deleted."""
    try:
        if not found.paths:
            shutil.rmtree(found.repository)  # follows no link
            return
        for path in found.paths:
            with suppress(FileNotFoundError):
                path.unlink()
    except OSError as error:
        raise StoreError(
            f"{error.filename} cannot be deleted: {error.strerror}.", "Check its permissions."
        ) from error


def _files_below(directory: Path) -> Iterator[Path]:
    """Yield the files and links below a directory; links to directories are not followed."""
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)


def _size(path: Path) -> int:
    """Return the bytes of a file, 0 of a link."""
    try:
        return 0 if path.is_symlink() else path.stat().st_size
    except OSError:
        return 0
