"""Reads the Hugging Face cache on this machine: which models it has, and in which snapshots.

The cache is read as it lies, without the hub's client, which does not know what other programs
leave: refs that end in a line feed, refs to snapshots that are gone, and snapshots without refs.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PREFIX = "models--"
_MAX_REF_BYTES = 256


def hub_directory() -> Path:
    """Return the directory of the cache, whether or not it exists."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_models() -> Iterator[tuple[str, list[Path]]]:
    """Yield the models that have a snapshot, by name, with their snapshots as `snapshots` does."""
    with suppress(OSError):
        for path in sorted(hub_directory().iterdir()):
            if path.name.startswith(_PREFIX) and (found := _snapshots_in(path)):
                yield path.name.removeprefix(_PREFIX).replace("--", "/"), found


def repository_directory(name: str) -> Path:
    """Return the directory of a model in the cache, whether or not it exists."""
    return hub_directory() / f"{_PREFIX}{name.replace('/', '--')}"


def snapshots(name: str) -> list[Path]:
    """Return the snapshots of a model: that of its ref `main` first, then the newest."""
    return _snapshots_in(repository_directory(name))


def main_snapshot(name: str) -> Path | None:
    """Return the snapshot of the ref `main`, None where there is no ref or no such snapshot."""
    path = repository_directory(name)
    return next((each for each in _snapshots_in(path) if each.name == _main_ref(path)), None)


def _snapshots_in(repository: Path) -> list[Path]:
    with suppress(OSError):
        found = [path for path in (repository / "snapshots").iterdir() if path.is_dir()]
        main = _main_ref(repository)
        return sorted(found, key=lambda path: (path.name != main, -path.stat().st_mtime, path.name))
    return []


def _main_ref(repository: Path) -> str:
    with suppress(OSError, ValueError), (repository / "refs" / "main").open("rb") as file:
        return file.read(_MAX_REF_BYTES).decode().strip()
    return ""


def file_sizes(directories: list[Path]) -> dict[str, int]:
    """Return the bytes of the files in snapshots, by their paths in these; links to nothing are
    none.
    """
    sizes: dict[str, int] = {}
    for directory in reversed(directories):
        for folder, _, names in os.walk(directory):
            for name in names:
                path = Path(folder, name)
                with suppress(OSError):
                    sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes
