"""A model and a draft model, both with windows: they share a budget, and answer as the plain twin.

The draft model is a copy of the model, so that each of its guesses is right if its KV is.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvchat.cache.kv_pool import KvPool
from kvchat.cache.windowed_manager import WindowedCacheManager
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from kvchat.core.events import SampleFinished, TokensGenerated
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, SamplingParams, Usage
from kvchat.engine.assembly import build_engine
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Mode
from kvchat.model.checkpoint.source import find_model
from support.checkpoints import save_checkpoint, tiny_model
from support.fixed_drafts import FixedDraftPolicy
from support.specimens import random_ids

GREEDY = SamplingParams(temperature=0.0)
BUDGET = 2 << 20


@pytest.fixture(scope="module", params=["gemma2", "mistral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which every other layer has a window, and one of which each has."""
    model = tiny_model(request.param, sliding_window=8, max_position_embeddings=8192)
    return save_checkpoint(tmp_path_factory.mktemp("m"), model)


def build(checkpoint: Path, directory: Path | None = None, whole: bool = False) -> Engine:
    source, room = find_model(str(checkpoint)), Size(num_bytes=BUDGET)
    cache = CacheConfig(4, room, kv_dtype="float32", directory=directory, whole_windows=whole)
    built = build_engine(
        source,
        ModelConfig(dtype="float32"),
        cache,
        EngineConfig(max_step_tokens=7),
        NO_MEMORY,
        lambda _: None,
        SpeculationConfig("draft"),
        source,
    )
    assert built.ready.draft is not None, built.ready.notes
    speculation = built.engine.speculation
    assert speculation is not None
    speculation.switch(Mode.DRAFT)
    speculation._policy = FixedDraftPolicy(3)  # type: ignore[assignment]
    return built.engine


def drafter_of(engine: Engine) -> ModelDrafter:
    assert engine.speculation is not None
    [drafter] = [x for x in engine.speculation._drafters if isinstance(x, ModelDrafter)]
    return drafter


def bytes_of(pool: KvPool) -> int:
    return sum(tensor.nbytes for layer in pool.layers for tensor in layer.tensors)


def answer(engine: Engine, context: list[int]) -> tuple[list[int], Usage]:
    """Return the answer to a context, whose draft KV has come from the disk before it begins."""
    engine.submit(RequestSpec(tuple(context), GREEDY, max_tokens=24))
    drafter, requests = drafter_of(engine), engine._scheduler.requests()
    drafter.update(requests, 0.0)
    while any(arrival and not arrival.is_over for arrival in drafter._arrivals.values()):
        drafter.update(requests, 0.0)
    ids: list[int] = []
    usage = None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensGenerated):
                ids.extend(event.token_ids)
            if isinstance(event, SampleFinished):
                usage = event.usage
    assert usage is not None
    return ids, usage


def chat(engine: Engine, context: list[int], turns: Sequence[int]) -> tuple[list[int], list[Usage]]:
    usages = []
    for turn in turns:
        ids, usage = answer(engine, context)
        usages.append(usage)
        context = [*context, *ids, turn, 3, 1, 4]
    return context, usages


def test_both_have_windows_and_room_for_as_many_tokens_in_one_budget(checkpoint: Path) -> None:
    engine = build(checkpoint)
    target, draft = engine.cache, drafter_of(engine).cache

    assert isinstance(target, WindowedCacheManager)
    assert isinstance(draft, WindowedCacheManager)
    taken = bytes_of(target.kv_pool) + bytes_of(draft.kv_pool)
    assert 0.97 * BUDGET <= taken <= BUDGET
    for cache in (target, draft):
        assert cache.kv_pool.blocks.num_usable < cache.kv_pool.num_blocks - 1
    assert draft.max_tokens == pytest.approx(target.max_tokens, rel=0.05)


def test_turns_and_a_restart_are_those_of_the_plain_twin(checkpoint: Path, tmp_path: Path) -> None:
    prompt = random_ids(90, 5)
    plain = build(checkpoint, whole=True)
    assert not isinstance(drafter_of(plain).cache.kv_pool, WindowedKvPool)
    expected, _ = chat(plain, prompt, range(4))
    plain.close()

    first = build(checkpoint, tmp_path)
    context, usages = chat(first, prompt, range(2))
    first.close()
    second = build(checkpoint, tmp_path)
    context, more = chat(second, context, range(2, 4))
    second.close()

    assert context == expected
    assert more[0].cached.disk > 100
    for usage in (*usages, *more):
        assert usage.accepted_tokens >= 0.9 * usage.drafted_tokens > 10
