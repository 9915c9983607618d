"""StoreLookup: what the disk has of conversations, and why not more, while no model is loaded.

An identity is a digest, and tells nothing of the model. Each engine notes its own in KnownModels, a
file of the state directory, when it opens its store.

The identity of a model is known only once it is loaded. Until then a conversation is looked up
under the identities that the model of its name had, and under those that are not known.
"""

import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvchat.cache.disk.inventory import num_kept_blocks, stored_model_dirs
from kvchat.cache.disk.miss_log import MissReasonLog
from kvchat.cache.keys import TOKEN_BYTES, chain_keys, encode_ids, root_key
from kvchat.cache.rates import RateMemory, kept_prefill_rate
from kvchat.core.config import INT8_KV
from kvchat.core.cost import ASSUMED_BYTES_PER_S, KvPlaces, ReadRates
from kvchat.core.errors import StoreError
from kvchat.core.paths import read_state, write_state
from kvchat.core.types import CachedTokens, MissReason, TokenIds

_NAME = "models.json"
_VERSION = 1
_MAX_MODELS = 256


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model as it was last run with one identity. `rates` names its rates in a RateMemory.

    `kv_dtype` is the dtype of its KV as the settings spell it, "" where it is the model's own.
    """

    name: str
    rates: str
    block_size: int
    block_bytes: int
    is_draft: bool = False
    kv_dtype: str = ""


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
    kinds["kv_dtype"] = str
    model = {"kv_dtype": "", **model}  # what was noted before it was
    if model.keys() != kinds.keys() or any(type(model[k]) is not kind for k, kind in kinds.items()):
        return None
    return KnownModel(**model) if min(model["block_size"], model["block_bytes"]) > 0 else None


_log = logging.getLogger(__name__)


class StoreLookup:
    """Looks up contexts in the store in `directory`; `state` has what is known of its models.

    `block_size` is assumed of identities that are not known. The name "" stands for any model.
    KV of another dtype than the setting `kv_dtype` is not looked at. May be used from any thread.
    """

    def __init__(
        self, directory: Path, state: Path | None, block_size: int, kv_dtype: str = "auto"
    ) -> None:
        self._directory = directory
        self._state = state
        self._block_size = block_size
        self._kv_dtype = kv_dtype

    def locate(self, contexts: Sequence[tuple[str, TokenIds]]) -> list[KvPlaces]:
        """Return where the KV of contexts is, each given by its model's name and its token ids."""
        known = KnownModels(self._state).read()
        paths = self._paths()
        return [self._located(known, paths, name, ids) for name, ids in contexts]

    def why(self, name: str, token_ids: TokenIds) -> MissReason | None:
        """Return why the disk does not have more of a context; None if it has all full blocks."""
        known = KnownModels(self._state).read()
        encoded = encode_ids(token_ids)
        paths = self._paths()
        found = self._most_kept(known, self._usable(known, paths, name), encoded)
        if found is None or not found[2]:
            others = self._of_other_dtypes(known, paths, name)
            if any(self._num_kept(path, encoded, known[path.name].block_size) for path in others):
                return MissReason.OTHER_MODEL
        if found is None:
            return MissReason.NEVER_WRITTEN
        path, block_size, count = found
        keys = chain_keys(root_key(bytes.fromhex(path.name)), encoded, block_size * TOKEN_BYTES)
        if count >= len(keys):
            return None
        return MissReasonLog(path).why(keys[count], encoded, count, block_size)

    def _paths(self) -> list[Path]:
        try:
            return stored_model_dirs(self._directory)
        except StoreError as error:
            _log.info("cannot look up what is kept: %s", error)
            return []

    def _located(
        self, known: dict[str, KnownModel], paths: list[Path], name: str, token_ids: TokenIds
    ) -> KvPlaces:
        usable = self._usable(known, paths, name)
        found = self._most_kept(known, usable, encode_ids(token_ids))
        num_kept, model, block_size = 0, _newest(known, name), self._block_size
        if found is not None:
            path, block_size, count = found
            num_kept, model = count * block_size, known.get(path.name, model)
        rates = self._rates(model) if model is not None else ReadRates()
        return KvPlaces(len(token_ids), CachedTokens(disk=num_kept), rates, block_size)

    def _most_kept(
        self, known: dict[str, KnownModel], paths: list[Path], encoded: bytes
    ) -> tuple[Path, int, int] | None:
        """Return the model directory that has most of a context, its block size, and the number of
        blocks; the one used last of several.
        """
        best = None
        for path in paths:
            model = known.get(path.name)
            block_size = model.block_size if model is not None else self._block_size
            count = self._num_kept(path, encoded, block_size)
            if best is None or count * block_size > best[1] * best[2]:
                best = path, block_size, count
        return best

    def _usable(self, known: dict[str, KnownModel], paths: list[Path], name: str) -> list[Path]:
        """Return the directories of KV that a model may use, and of KV that is not known."""
        others = self._of_other_dtypes(known, paths, name)
        mine = [path for path in paths if path not in others]
        return [p for p in mine if p.name not in known or _is_of(known[p.name], name)]

    def _of_other_dtypes(
        self, known: dict[str, KnownModel], paths: list[Path], name: str
    ) -> list[Path]:
        """Return the directories of a model's KV in another dtype than that of the settings."""
        wanted = {"auto": ("",), INT8_KV: (INT8_KV,)}.get(self._kv_dtype, ("", self._kv_dtype))
        named = [path for path in paths if path.name in known and _is_of(known[path.name], name)]
        return [path for path in named if known[path.name].kv_dtype not in wanted]

    def _num_kept(self, path: Path, encoded: bytes, block_size: int) -> int:
        try:
            return num_kept_blocks(path, encoded, block_size)
        except (StoreError, OSError, ValueError, sqlite3.Error) as error:
            _log.info("cannot look into %s: %s", path.name, error)
            return 0

    def _rates(self, model: KnownModel) -> ReadRates:
        rates = RateMemory(self._state, model.rates).read()
        num_bytes = rates.get("read", ASSUMED_BYTES_PER_S)
        return ReadRates(kept_prefill_rate(rates), num_bytes * model.block_size / model.block_bytes)


def _is_of(model: KnownModel, name: str) -> bool:
    """Return whether KV is that of the model `name`, and not of a draft model."""
    return not model.is_draft and name in ("", model.name)


def _newest(known: dict[str, KnownModel], name: str) -> KnownModel | None:
    """Return the model of a name that was run last; None if none is known."""
    return next((model for model in reversed(known.values()) if name in ("", model.name)), None)
