"""UsedModels: which models were loaded here and when, and where the file of one was moved to.

They are facts of the memory: a model is known by its name, and found again by its digest.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvchat.core.errors import ModelError
from kvchat.core.types import Fact, Memory
from kvchat.model.checkpoint.identity import sample_digest
from kvchat.model.checkpoint.source import ModelSource, find_model

_FACT = ("used models", "all")
_MAX_MODELS = 256
# The most files whose samples are read to find one that moved.
_MAX_CANDIDATES = 32


@dataclass(frozen=True, slots=True)
class UsedModel:
    """A model that was loaded. `num_bytes` is the size of its weights, `digest` a `sample_digest`.

    `used_s` is when it was loaded last, in seconds since the epoch.
    """

    digest: str
    num_bytes: int
    used_s: float


class UsedModels:
    """The models in a memory that were loaded; `home` is the user's directory."""

    def __init__(self, memory: Memory, home: Path | None = None) -> None:
        self._memory = memory
        self._home = home if home is not None else Path.home()

    def read(self) -> dict[str, UsedModel]:
        """Return the models by their names, the one used last at the end."""
        return _models(self._memory.get(*_FACT))

    def note(self, source: ModelSource) -> None:
        """Remember that a model was loaded now."""
        try:
            num_bytes = sum(path.stat().st_size for path in source.weight_files)
            used = UsedModel(sample_digest(source), num_bytes, time.time())
        except (ModelError, OSError):
            return  # its files were changed meanwhile

        def with_newest(fact: Fact) -> Fact:
            others = [item for item in _models(fact).items() if item[0] != source.name]
            newest = [*others, (source.name, used)][-_MAX_MODELS:]
            return {name: asdict(each) for name, each in newest}

        self._memory.update(*_FACT, with_newest)

    def moved_to(self, name: str) -> str | None:
        """Return the path of the model that was at another one; None if it is not found.

        Looks where models were used before, in `~/models`, `~/Downloads` and the working directory,
        for a file or directory of that name and for a file of that size, and compares digests.
        """
        known = self.read()
        if name not in known:
            return None
        candidates = [path for path in self._candidates(Path(name), known) if path.exists()]
        for path in candidates[:_MAX_CANDIDATES]:
            with suppress(ModelError, OSError):
                if sample_digest(find_model(str(path))) == known[name].digest:
                    return str(path)
        return None

    def _candidates(self, gone: Path, known: dict[str, UsedModel]) -> Iterator[Path]:
        used = [Path(path) for path in known if os.path.isabs(path) and path != str(gone)]
        yield from (path for path in used if known[str(path)].digest == known[str(gone)].digest)
        own = (gone.parent, self._home / "models", self._home / "Downloads", Path.cwd())
        directories = list(dict.fromkeys((*own, *(path.parent for path in used))))
        yield from (directory / gone.name for directory in directories)
        for directory in directories:
            yield from _of_size(directory, gone.suffix, known[str(gone)].num_bytes)


def _of_size(directory: Path, suffix: str, num_bytes: int) -> Iterator[Path]:
    """Return the files of a directory with this suffix and size."""
    with suppress(OSError):
        for path in sorted(directory.iterdir()):
            if suffix and path.suffix == suffix and path.stat().st_size == num_bytes:
                yield path


def _models(fact: Fact) -> dict[str, UsedModel]:
    models = fact if isinstance(fact, dict) else {}
    kinds = {"digest": str, "num_bytes": int, "used_s": float}
    return {
        name: UsedModel(**model)
        for name, model in models.items()
        if isinstance(model, dict)
        and model.keys() == kinds.keys()
        and all(type(model[key]) is kind for key, kind in kinds.items())
    }
