"""KnownModels: which model each identity of the store is, in a file of the state directory.

An identity is a digest, and tells nothing of the model. Each engine notes its own when it opens its
store, so that the KV on disk can be named, and looked up, while no model is loaded.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from kvchat.core.paths import read_state, write_state

_NAME = "models.json"
_VERSION = 1
_MAX_MODELS = 256


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model as it was last run with one identity. `rates` names its rates in a RateMemory."""

    name: str
    rates: str
    block_size: int
    block_bytes: int
    is_draft: bool = False


class KnownModels:
    """The known models in a state `directory`; with None there are none and none are kept."""

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / _NAME if directory is not None else None

    def read(self) -> dict[str, KnownModel]:
        """Return the known models by their identities in hexadecimal, the newest last."""
        if self._path is None:
            return {}
        found = read_state(self._path, _VERSION, "models")
        models = {identity: _sound(model) for identity, model in found.items()}
        return {identity: model for identity, model in models.items() if model is not None}

    def note(self, identity: str, model: KnownModel) -> None:
        """Remember a model as the newest one."""
        if self._path is None:
            return
        known = self.read()
        if list(known.items())[-1:] == [(identity, model)]:
            return
        known.pop(identity, None)
        newest = [*known.items(), (identity, model)][-_MAX_MODELS:]
        write_state(self._path, _VERSION, "models", {name: asdict(each) for name, each in newest})


def _sound(model: object) -> KnownModel | None:
    """Return a known model as it was written; None for anything else."""
    if not isinstance(model, dict):
        return None
    kinds = {"name": str, "rates": str, "block_size": int, "block_bytes": int, "is_draft": bool}
    if model.keys() != kinds.keys() or any(type(model[k]) is not kind for k, kind in kinds.items()):
        return None
    return KnownModel(**model) if min(model["block_size"], model["block_bytes"]) > 0 else None
