"""What engines say to requests that run together."""

from collections.abc import Callable, Sequence

from kvchat.core.events import RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import FinishReason
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec

Said = dict[tuple[int, int], list[int]]
Ends = dict[tuple[int, int], FinishReason]


def run(
    engine: Engine,
    specs: Sequence[RequestSpec],
    between: Callable[[Said], None] = lambda said: None,
) -> tuple[Said, Ends]:
    """Return what each sample says and how it ends, by request and sample.

    Checks the cache after every step; then `between` runs.
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
        engine.chain.check()
        tables = [request.table for request in engine.running() if request.table is not None]
        engine.cache.check([*tables, *engine.chain.tables()])
        between(said)
    return said, ends


def said_by(engine: Engine, *specs: RequestSpec) -> list[list[int]]:
    """Return what each sample of each request says."""
    return [tokens for _, tokens in sorted(run(engine, specs)[0].items())]
