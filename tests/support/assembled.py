"""Engines on checkpoints, assembled as the program does."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvchat.cache.disk.memory import DiskMemory
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from kvchat.core.events import LoadProgress
from kvchat.core.stats import TierStatus
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, CachedTokens, Memory
from kvchat.engine.assembly import AssembledEngine, build_engine
from kvchat.engine.engine import Engine
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT, ModelSource, find_model
from support.greedy_answer import greedy_answer

MEBIBYTE = 1 << 20


def assemble(
    checkpoint: Path,
    dtype: str = "float32",
    cache: CacheConfig | None = None,
    engine: EngineConfig | None = None,
    memory: Memory = NO_MEMORY,
    hear: Callable[[LoadProgress], None] = lambda _: None,
    **model: object,
) -> AssembledEngine:
    """Return an engine on a checkpoint; without `cache` its KV has one MiB. `model` are further
    fields of ModelConfig.
    """
    return build_engine(
        find_model(str(checkpoint)),
        ModelConfig(dtype=dtype, **model),  # type: ignore[arg-type]
        cache or CacheConfig(device_bytes=Size(num_bytes=MEBIBYTE)),
        engine or EngineConfig(),
        memory,
        hear,
    )


def assemble_demo_pair(
    cache: CacheConfig | None = None, draft: ModelSource | None = None
) -> AssembledEngine:
    """Return the demo model, guided by its own draft or another."""
    return build_engine(
        find_model(DEMO),
        ModelConfig(dtype="float32"),
        cache or CacheConfig(device_bytes=Size(num_bytes=64 * MEBIBYTE)),
        EngineConfig(),
        NO_MEMORY,
        lambda _: None,
        SpeculationConfig("auto"),
        draft or find_model(DEMO_DRAFT),
    )


@dataclass
class Life:
    """One engine, and what it has been asked."""

    engine: Engine

    def answer(self, prompt: list[int], count: int = 20) -> tuple[list[int], CachedTokens]:
        return greedy_answer(self.engine, prompt, count)

    def disk(self) -> TierStatus:
        assert self.engine.chain.flush(60.0)
        status = self.engine.status().tier("disk")
        assert status is not None
        return status


def begin_life(
    checkpoint: Path, home: Path | None, dtype: str = "float32", block_size: int = 16
) -> Life:
    """Begin a life in a directory that survives it; without one nothing is kept."""
    cache = CacheConfig(
        block_size,
        device_bytes=Size(num_bytes=8 * MEBIBYTE),
        disk_bytes=Size(num_bytes=64 * MEBIBYTE),
        directory=home / "kv" if home is not None else None,
    )
    memory = DiskMemory(home / "state") if home is not None else NO_MEMORY
    return Life(assemble(checkpoint, dtype, cache, memory=memory).engine)
