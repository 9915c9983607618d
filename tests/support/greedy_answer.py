"""Greedy answers of an engine that has time to wait for its disk. Knows no model and no store."""

from kvchat.core.events import RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import CachedTokens, SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from support.chains import be_patient


def greedy_answer(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], CachedTokens]:
    """Return the ids that follow a prompt, and where its KV came from."""
    be_patient(engine.chain)  # a busy machine must not make it lose patience
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
