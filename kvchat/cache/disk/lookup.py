"""StoreLookup: what the disk has of conversations, and why not more, while no model is loaded.

An identity is a digest, and tells nothing of the model. Each engine notes its own in KnownModels
when it opens its store.

The identity of a model is known only once it is loaded. Until then a conversation is looked up
under the identities that the model of its name had with the present settings, and under those that
are not known. KV that other settings have stored tells why there is not more.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvchat.cache.disk.inventory import num_stored_blocks, stored_model_dirs
from kvchat.cache.disk.miss_log import MissReasonLog
from kvchat.cache.keys import TOKEN_BYTES, chain_keys, encode_ids, root_key
from kvchat.cache.planner import RateMemory, from_tier, known_prefill_rate
from kvchat.core.config import CacheConfig
from kvchat.core.errors import StoreError
from kvchat.core.events import ModelReady
from kvchat.core.parameters import FEWER_BITS, KV_CODES
from kvchat.core.stats import ASSUMED_BYTES_PER_S, KvPlaces, ReadRates
from kvchat.core.types import CachedTokens, Fact, Memory, MissReason, TokenIds

# All in one fact, so that their order is known.
_FACT = ("models", "all")
_MAX_MODELS = 256


@dataclass(frozen=True, slots=True)
class KvSettings:
    """The settings that KV depends on, as the user spells them. `block_size` counts tokens."""

    block_size: int = CacheConfig().block_size
    kv_dtype: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model as it was last run with one identity. `rates` names its rates in a RateMemory.

    `kv_dtype` is the dtype of its KV as the settings spell it, "" where it is the model's own.
    `dtype` is what it computes in, `weights` the form of its weights, "" where it has no other, and
    `asked_weights` the setting that led to it.
    """

    name: str
    rates: str
    block_size: int
    block_bytes: int
    is_draft: bool = False
    kv_dtype: str = ""
    dtype: str = ""
    weights: str = ""
    asked_weights: str = ""

    def difference_to(self, settings: KvSettings) -> MissReason | None:
        """Return which settings the model was run without; None if it may have been run with them.

        The dtype that `auto` chooses is not known here.
        """
        has_dtype = settings.dtype == "auto" or self.dtype in ("", settings.dtype)
        if not (has_dtype and self._has_weights_of(settings.weights)):
            return MissReason.OTHER_WEIGHTS
        is_same = self.block_size == settings.block_size and self._has_kv_of(settings.kv_dtype)
        return None if is_same else MissReason.OTHER_KV

    def _has_weights_of(self, setting: str) -> bool:
        if not self.weights or setting == self.asked_weights:
            return True
        return self.weights not in FEWER_BITS if setting == "auto" else self.weights == setting

    def _has_kv_of(self, setting: str) -> bool:
        if setting in KV_CODES:
            return self._serves(setting)
        if setting == "auto" or self.kv_dtype:
            return self.kv_dtype == ("" if setting == "auto" else setting)
        return self.dtype in ("", setting)

    def _serves(self, code: str) -> bool:
        """Whether KV in a code can be made of what was kept: of itself, or of more bits."""
        return self.kv_dtype in ("", *KV_CODES[: KV_CODES.index(code) + 1])

    def difference_to_loaded(self, ready: ModelReady, block_size: int) -> MissReason | None:
        """Return how the model was run otherwise than the one that is loaded; None if as that."""
        for one, other in ((self.weights, ready.weights), (self.dtype, ready.dtype)):
            if one != other and one and other:
                return MissReason.OTHER_WEIGHTS
        is_coded = ready.kv_dtype in KV_CODES
        has_kv = self._serves(ready.kv_dtype) if is_coded else self.kv_dtype == ready.kv_dtype
        return None if has_kv and self.block_size == block_size else MissReason.OTHER_KV


class KnownModels:
    """The known models in a memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def read(self) -> dict[str, KnownModel]:
        """Return the known models by their identities in hexadecimal, the newest last."""
        return _models(self._memory.get(*_FACT))

    def note(self, identity: str, model: KnownModel) -> None:
        """Remember a model as the newest one."""
        if list(self.read().items())[-1:] == [(identity, model)]:
            return

        def with_newest(fact: Fact) -> Fact:
            others = [(name, each) for name, each in _models(fact).items() if name != identity]
            newest = [*others, (identity, model)][-_MAX_MODELS:]
            return {name: asdict(each) for name, each in newest}

        self._memory.update(*_FACT, with_newest)


def _models(fact: Fact) -> dict[str, KnownModel]:
    found = fact if isinstance(fact, dict) else {}
    models = {identity: _sound(model) for identity, model in found.items()}
    return {identity: model for identity, model in models.items() if model is not None}


def _sound(model: object) -> KnownModel | None:
    """Return a known model as it was written; None for anything else."""
    if not isinstance(model, dict):
        return None
    kinds = {field.name: field.type for field in fields(KnownModel)}
    if model.keys() != kinds.keys() or any(type(model[k]) is not kind for k, kind in kinds.items()):
        return None
    return KnownModel(**model) if min(model["block_size"], model["block_bytes"]) > 0 else None


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StoredContext:
    """What a model directory has of a context, in blocks of `block_size` tokens.

    `difference` tells why the model cannot use it, None if it may.
    """

    path: Path
    num_blocks: int
    block_size: int
    difference: MissReason | None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


# Tells how a known model was run otherwise than the one whose KV is looked for.
_Compare = Callable[[KnownModel], MissReason | None]


class StoreLookup:
    """Looks up contexts in the store in `directory`; `memory` has what is known of its models.

    The block size of `settings` is assumed of identities that are not known. The name "" stands for
    any model. Only KV of these settings counts as kept. May be used from any thread.
    """

    def __init__(self, directory: Path, memory: Memory, settings: KvSettings) -> None:
        self.directory = directory
        self._memory = memory
        self._settings = settings

    def locate(self, contexts: Sequence[tuple[str, TokenIds]]) -> list[KvPlaces]:
        """Return where the KV of contexts is, each given by its model's name and its token ids."""
        known = KnownModels(self._memory).read()
        paths = self._paths()
        return [self._located(known, paths, name, ids) for name, ids in contexts]

    def why(self, name: str, token_ids: TokenIds) -> MissReason | None:
        """Return why the disk does not have more of a context; None if it has all full blocks."""
        known, encoded = KnownModels(self._memory).read(), encode_ids(token_ids)
        kept = self._kept(known, self._paths(), name, encoded, self._difference)
        found = _most(each for each in kept if each.difference is None)
        reason = _why_missing(found, encoded)
        if reason in (MissReason.NEVER_WRITTEN, MissReason.OTHER_MODEL):
            num_found = found.num_tokens if found is not None else 0
            return _why_changed(kept, num_found) or reason
        return reason

    def why_changed(
        self, ready: ModelReady, token_ids: TokenIds, num_cached: int
    ) -> MissReason | None:
        """Return what changed since a run that kept more than `num_cached` tokens of a context.

        `ready` is the loaded model; the run was of the same model. None if there was no such run.
        """
        known, block_size = KnownModels(self._memory).read(), self._settings.block_size
        paths = [
            path for path in self._paths() if (m := known.get(path.name)) and _is_of(m, ready.name)
        ]
        kept = self._kept(
            known,
            paths,
            ready.name,
            encode_ids(token_ids),
            lambda model: model.difference_to_loaded(ready, block_size),
        )
        return _why_changed(kept, num_cached)

    def _difference(self, model: KnownModel) -> MissReason | None:
        return model.difference_to(self._settings)

    def _paths(self) -> list[Path]:
        try:
            return stored_model_dirs(self.directory)
        except StoreError as error:
            _log.info("cannot look up what is kept: %s", error)
            return []

    def _located(
        self, known: dict[str, KnownModel], paths: list[Path], name: str, token_ids: TokenIds
    ) -> KvPlaces:
        kept = self._kept(known, paths, name, encode_ids(token_ids), self._difference)
        found = _most(each for each in kept if each.difference is None)
        num_kept, model, block_size = 0, _newest(known, name), self._settings.block_size
        if found is not None:
            num_kept, block_size = found.num_tokens, found.block_size
            model = known.get(found.path.name, model)
        rates = self._rates(model) if model is not None else ReadRates()
        return KvPlaces(len(token_ids), CachedTokens(disk=num_kept), rates, block_size)

    def _kept(
        self,
        known: dict[str, KnownModel],
        paths: list[Path],
        name: str,
        encoded: bytes,
        compare: _Compare,
    ) -> list[_StoredContext]:
        """Return what each directory of the model `name`, or of one not known, has of a context."""
        kept = []
        name = _present_name(known, name)
        for path in paths:
            model = known.get(path.name)
            if model is not None and not _is_of(model, name):
                continue
            block_size = model.block_size if model is not None else self._settings.block_size
            difference = compare(model) if model is not None else None
            count = num_stored_blocks(path, encoded, block_size)
            kept.append(_StoredContext(path, count, block_size, difference))
        return kept

    def _rates(self, model: KnownModel) -> ReadRates:
        rates = RateMemory(self._memory, model.rates).read()
        num_bytes = rates.get(from_tier("disk"), ASSUMED_BYTES_PER_S)
        computed, half_context = known_prefill_rate(rates)
        from_disk = num_bytes * model.block_size / model.block_bytes
        return ReadRates(computed, from_disk, half_context=half_context)


def _most(kept: Iterable[_StoredContext]) -> _StoredContext | None:
    """Return the directory that has most of a context; the one used last of several."""
    return max(kept, key=lambda each: each.num_tokens, default=None)


def _why_changed(kept: Sequence[_StoredContext], num_found: int) -> MissReason | None:
    """Return why KV of more than `num_found` tokens cannot be used; None if there is none."""
    best = _most(each for each in kept if each.difference is not None)
    return best.difference if best is not None and best.num_tokens > num_found else None


def _why_missing(found: _StoredContext | None, encoded: bytes) -> MissReason | None:
    """Return why a directory does not have more of a context; None if it has all full blocks."""
    if found is None:
        return MissReason.NEVER_WRITTEN
    root = root_key(bytes.fromhex(found.path.name))
    keys = chain_keys(root, encoded, found.block_size * TOKEN_BYTES)
    if found.num_blocks >= len(keys):
        return None
    log = MissReasonLog(found.path)
    return log.why(keys[found.num_blocks], encoded, found.num_blocks, found.block_size)


def _is_of(model: KnownModel, name: str) -> bool:
    """Return whether KV is that of the model `name`, and not of a draft model."""
    return not model.is_draft and name in ("", model.name)


def _present_name(known: dict[str, KnownModel], name: str) -> str:
    """Return the name under which a model was run last, where it is known under no other.

    It may be that of a link to the same file. A file that is gone may be renamed to any of them,
    which "" stands for. What is there and was never run keeps its name, which no KV has.
    """
    names = {model.name for model in known.values() if not model.is_draft}
    if name in names or not os.path.isabs(name):
        return name
    if not os.path.exists(name):
        return ""
    return next((each for each in names if os.path.realpath(each) == os.path.realpath(name)), name)


def _newest(known: dict[str, KnownModel], name: str) -> KnownModel | None:
    """Return the model of a name that was run last; None if none is known."""
    return next((model for model in reversed(known.values()) if name in ("", model.name)), None)
