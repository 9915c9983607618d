"""Greedy answers of an engine that has time to wait for its disk. Knows no model and no store."""

from kvchat.core.events import RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import CachedTokens, SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec


def greedy_answer(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], CachedTokens]:
    """Return the ids that follow a prompt, and where its KV came from."""
    if engine._connector is not None:  # a busy machine must not make it lose patience
        engine._connector.planner.prefill_tokens_per_s = 1e-3
    sampling = SamplingParams(temperature=0.0)
    engine.submit(RequestSpec(tuple(prompt), sampling, max_tokens=count))
    ids: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, TokensGenerated):
                ids.extend(event.token_ids)
            if isinstance(event, SampleFinished):
                cached = event.usage.cached
    return ids, cached
