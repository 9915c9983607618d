"""Engines of a model and what drafts for it, and their answers."""

from collections.abc import Sequence
from pathlib import Path

from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, SamplingParams
from kvchat.engine.assembly import AssembledEngine, build_engine
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.model.checkpoint.source import find_model
from support.said import said_by


def build(
    target: Path,
    head: Path | None,
    kv: Path | None = None,
    num_bytes: int = 32 << 20,
    kv_dtype: str = "auto",
    **model: str,
) -> AssembledEngine:
    """Without a head, the model drafts with what it has."""
    return build_engine(
        find_model(str(target)),
        ModelConfig(**{"dtype": "float32", **model}),
        CacheConfig(device_bytes=Size(num_bytes=num_bytes), kv_dtype=kv_dtype, directory=kv),
        EngineConfig(max_context=400, max_step_tokens=32),
        NO_MEMORY,
        lambda event: None,
        SpeculationConfig("auto"),
        find_model(str(head)) if head is not None else None,
    )


def answer(
    engine: Engine, prompt: Sequence[int], num_tokens: int, heat: float = 0.0, num_samples: int = 1
) -> list[list[int]]:
    sampling = SamplingParams(temperature=heat, seed=7)
    spec = RequestSpec(tuple(prompt), sampling, max_tokens=num_tokens, num_samples=num_samples)
    return said_by(engine, spec)


def answers_at_once(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Return the greedy answer to each prompt; all are requests at the same time."""
    greedy = SamplingParams(temperature=0.0)
    return said_by(engine, *(RequestSpec(tuple(p), greedy, max_tokens=num_tokens) for p in prompts))
