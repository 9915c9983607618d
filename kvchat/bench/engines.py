"""Builds engines for benchmarks and runs requests on them to their end, without threads."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig
from kvchat.core.errors import GenerationError
from kvchat.core.events import RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import NO_MEMORY, Memory, SamplingParams
from kvchat.engine.assembly import AssembledEngine, build_engine
from kvchat.engine.engine import Engine
from kvchat.engine.kv_storage import small_kv
from kvchat.engine.request import RequestSpec
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.loader import LoadedModel
from kvchat_kernels.kv_layer import KvLayer

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of one request, and its usage and timing."""

    token_ids: tuple[int, ...]
    finished: SampleFinished


def new_engine(
    source: ModelSource,
    model: ModelConfig,
    cache: CacheConfig,
    engine: EngineConfig | None = None,
    memory: Memory = NO_MEMORY,
) -> AssembledEngine:
    """Build an engine. It stores facts about the model in `memory`."""
    return build_engine(source, model, cache, engine or EngineConfig(), memory, lambda event: None)


def kv_of_a_text(assembled: AssembledEngine, num_blocks: int) -> Sequence[KvLayer]:
    """Return KV for a text in blocks of the engine's size, block 0 not in use: the engine's own,
    after clearing it, or other KV where layers with a window have fewer blocks.
    """
    pool = assembled.engine.cache.kv_pool
    if isinstance(pool, WindowedKvPool):
        return small_kv(pool.geometry, pool.device, num_blocks, pool.geometry.block_size)
    assert num_blocks <= pool.num_blocks
    assembled.engine.cache.clear()
    return pool.layers


def model_facts(source: ModelSource, loaded: LoadedModel) -> dict[str, object]:
    """Return the settings of a result that say which model was measured, and how it was loaded."""
    return {
        "model": source.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weights": loaded.weights,
        "device": loaded.device.type,
    }


def free_memory() -> None:
    """Free the memory of engines that are no longer referenced, before the next is built."""
    gc.collect()
    torch.cuda.empty_cache()


def complete(engine: Engine, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
    """Run one greedy request to its end."""
    return complete_all(engine, [prompt_ids], max_tokens)[0]


def complete_all(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Completion]:
    """Run greedy requests together to their end; return completions in the prompts' order."""
    specs = [RequestSpec(tuple(prompt), GREEDY, max_tokens=max_tokens) for prompt in prompts]
    return complete_requests(engine, specs)


def complete_requests(engine: Engine, specs: Sequence[RequestSpec]) -> list[Completion]:
    """Run requests together to their end; return completions in the same order.

    Raises GenerationError if a request fails.
    """
    ids = [engine.submit(spec) for spec in specs]
    generated: dict[int, list[int]] = {request_id: [] for request_id in ids}
    finished: dict[int, SampleFinished] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensGenerated):
                generated[event.request_id].extend(event.token_ids)
            elif isinstance(event, SampleFinished):
                finished[event.request_id] = event
            elif isinstance(event, RequestFailed):
                raise GenerationError(f"A measured request failed: {event.error}")
    return [Completion(tuple(generated[i]), finished[i]) for i in ids]


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Return `count` random token ids; the same seed gives the same ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return ids
