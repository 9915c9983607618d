"""Engines on a tiny model in blocks of 8 tokens, and what they say."""

from collections.abc import Callable

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.kv_pool import KvPool
from kvchat.core.config import CacheConfig
from kvchat.core.events import RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import FinishReason, SamplingParams
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
Said = dict[tuple[int, int], list[int]]
Ends = dict[tuple[int, int], FinishReason]


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


def run(
    engine: Engine, specs: list[RequestSpec], between: Callable[[Said], None] = lambda said: None
) -> tuple[Said, Ends]:
    """Return what each sample says and how it ends, all run together; `between` runs after every
    step. Checks the cache after each.
    """
    said: Said = {}
    ends: Ends = {}
    for spec in specs:
        engine.submit(spec)
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, TokensGenerated):
                said.setdefault((event.request_id, event.sample), []).extend(event.token_ids)
            if isinstance(event, SampleFinished):
                ends[event.request_id, event.sample] = event.reason
        engine.cache.check([r.table for r in engine.running() if r.table is not None])
        between(said)
    return said, ends


def said_by(engine: Engine, *specs: RequestSpec) -> list[list[int]]:
    """Return what each sample of each request says."""
    return [tokens for _, tokens in sorted(run(engine, list(specs))[0].items())]
