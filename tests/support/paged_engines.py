"""Engines on a tiny model in blocks of 8 tokens."""

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.kv_pool import KvPool
from kvchat.core.config import CacheConfig
from kvchat.core.types import SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.kv_storage import kv_geometry
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Runner
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import PagedModel
from support.paged_scene import MAX_CONTEXT
from support.specimens import random_ids

BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, seed=4)


def paged(loaded: LoadedModel, num_blocks: int = 300) -> tuple[PagedModel, CacheManager]:
    geometry = kv_geometry(loaded.spec, CacheConfig(block_size=BLOCK_SIZE), loaded.dtype)
    pool = KvPool(geometry, num_blocks, loaded.device)
    return PagedModel(loaded, pool.layers), CacheManager(pool)


def engine_over(
    runner: Runner, cache: CacheManager, loaded: LoadedModel, **settings: object
) -> Engine:
    return Engine(
        runner,
        cache,
        max_context=MAX_CONTEXT,
        max_step_tokens=64,
        max_running=20,
        vocab_size=loaded.spec.vocab_size,
        **settings,  # type: ignore[arg-type]
    )


def conversations() -> list[RequestSpec]:
    return [
        RequestSpec((5, 6, 7) * 9, GREEDY, max_tokens=30),
        RequestSpec(tuple(random_ids(70, seed=1)), SAMPLED, max_tokens=24),
        RequestSpec(tuple(random_ids(3, seed=2)), SAMPLED, max_tokens=40, num_samples=3),
        RequestSpec(tuple(random_ids(200, seed=3)), GREEDY, max_tokens=10),
    ]
