"""Builds an engine that speculates: the target as `assembly` builds it, and what drafts for it.

The draft's KV shares the device budget with the target's, block for block, and lies in the same
store under an identity of its own. A draft that cannot be used costs a sentence, never the answer.
"""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvchat.cache.manager import CacheManager
from kvchat.core.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Size,
    SpeculationConfig,
)
from kvchat.core.errors import KvchatError, ModelError
from kvchat.core.events import LoadProgress
from kvchat.engine.assembly import (
    AssembledEngine,
    device_budget,
    engine_around,
    kv_geometry,
    load_trusted,
    model_ready,
    new_graphs,
    new_kv_pool,
    new_persistence,
    new_rehearsal,
    new_threads,
)
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.drafters import Drafter
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.speculation import Mode, Speculation
from kvchat.model.fuse_linear import MAX_PACKED_ROWS
from kvchat.model.loader import LoadedModel, Progress
from kvchat.model.paged_model import PagedModel
from kvchat.model.source import ModelSource
from kvchat.model.vocabulary import same_vocabulary

_log = logging.getLogger(__name__)

_HELD_BY_A_CACHE = 4 << 20  # bytes of weights


def build_speculating_engine(
    source: ModelSource,
    draft_source: ModelSource | None,
    model_config: ModelConfig,
    cache_config: CacheConfig,
    engine_config: EngineConfig,
    speculation_config: SpeculationConfig,
    state_directory: Path | None,
    progress: Progress,
) -> AssembledEngine:
    """Load a model, and a draft model where there is one, and build the engine around them.

    As `build_engine`; what keeps the draft from being used is told in the notes of the model.
    """
    began_s = time.perf_counter()
    target = load_trusted(
        source, model_config, engine_config.max_context, state_directory, progress
    )
    build = _DraftBuild(target, model_config, cache_config, engine_config, state_directory)
    try:
        draft = build.drafter(draft_source) if draft_source is not None else None
    except Exception as error:  # whatever is wrong with a draft, the target can answer
        _log.warning("no draft model", exc_info=error)
        note = f"Answers come without the draft model: {_sentence(error)}"
        target = replace(target, notes=(*target.notes, note))
        draft = None
    drafters: list[Drafter] = [NgramDrafter(), *([draft.drafter] if draft is not None else [])]
    speculation = Speculation(drafters, Mode(speculation_config.mode))
    target_cache = draft.target_cache if draft is not None else cache_config
    engine = engine_around(target, target_cache, engine_config, state_directory, speculation)
    ready = model_ready(target, engine, began_s)
    if draft is not None and draft_source is not None:
        ready = replace(ready, draft=draft_source.name)
    return AssembledEngine(engine, target, ready)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What drafts, and the budget that is left to the target."""

    drafter: ModelDrafter
    target_cache: CacheConfig


@dataclass(frozen=True, slots=True)
class _DraftBuild:
    """Everything a draft model for `target` is built from."""

    target: LoadedModel
    model_config: ModelConfig
    cache_config: CacheConfig
    engine_config: EngineConfig
    state_directory: Path | None

    def drafter(self, source: ModelSource) -> _Draft:
        """Load a draft model and give it its share of the budget; raises where that cannot be."""
        target = self.target
        if not same_vocabulary(target.source, source):
            raise ModelError(f"{source.name} has another vocabulary than {target.source.name}.")
        loaded = load_trusted(
            source, self.model_config, target.max_context, self.state_directory, _say_nothing
        )
        geometry = kv_geometry(loaded.spec, self.cache_config, loaded.dtype)
        target_geometry = kv_geometry(target.spec, self.cache_config, target.dtype)
        both_bytes = geometry.block_bytes + target_geometry.block_bytes
        num_blocks = device_budget(self.cache_config, target.device) // both_bytes
        own_config = self._limited(num_blocks * geometry.block_bytes)
        cache = CacheManager(
            new_kv_pool(geometry, own_config, loaded.device), self.cache_config.reuse
        )
        model = PagedModel(loaded, cache.kv_pool.layers)
        drafter = ModelDrafter(
            model,
            cache,
            loaded.spec.vocab_size,
            loaded.max_context,
            new_persistence(loaded, cache, own_config, self.state_directory, is_draft=True),
            graphs=new_graphs(model, cache, self.engine_config),
            threads=new_threads(loaded.device),
            rehearsal=new_rehearsal(model, cache),
            piece_rows=_piece_rows(loaded),
        )
        return _Draft(drafter, self._limited(num_blocks * target_geometry.block_bytes))

    def _limited(self, num_bytes: int) -> CacheConfig:
        return replace(self.cache_config, device_bytes=Size(num_bytes=num_bytes))


def _piece_rows(loaded: LoadedModel) -> int | None:
    """Return how many rows a fused step has, where one after the other is faster than all at once.

    All at once takes transformers' own forward pass, and reads the weights once; a cache holds
    those of a tiny model, so that reading them again costs next to nothing.
    """
    num_bytes = sum(p.numel() * p.element_size() for p in loaded.module.parameters())
    is_tiny = num_bytes <= _HELD_BY_A_CACHE
    return MAX_PACKED_ROWS if loaded.weights == "float16" and is_tiny else None


def _say_nothing(event: LoadProgress) -> None:
    """Loading a draft takes no time worth a bar of its own."""


def _sentence(error: Exception) -> str:
    if isinstance(error, KvchatError):
        return error.message
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "there is no memory for it."
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}."
