"""The fetcher waits for a slower tier only where no request can run meanwhile."""

from collections.abc import Iterator

import pytest

from kvchat.cache.arrivals import Arrivals
from kvchat.cache.feed import FeedReader
from kvchat.core.types import SamplingParams
from kvchat.engine.fetch import Fetcher
from kvchat.engine.request import Request, RequestSpec, State
from support.chains import new_chain
from support.memory_tier import MemoryTier
from support.remembering_model import new_cache


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each wait for news."""
    made: list[int] = []
    monkeypatch.setattr(Arrivals, "wait_for_news", lambda arrivals: made.append(1))
    monkeypatch.setattr(FeedReader, "read", lambda *_: None)  # a tier that never delivers
    return made


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    chain = new_chain(new_cache(40), lambda: MemoryTier(4, 32))
    assert chain.flush(60.0)
    yield Fetcher(chain)
    chain.close()


PROMPT = tuple(range(1, 10))


def _request(num_computed: int) -> Request:
    request = Request.from_spec(1, RequestSpec(PROMPT, SamplingParams()), 0.0)
    request.num_computed = num_computed
    return request


def test_a_prefetch_does_not_hold_up_a_request_that_can_run(fetcher, waits):
    """The prefetch was counted as one of the requests: a single one that decoded beside it waited
    a moment in every step.
    """
    fetcher.prefetch((7, 8, 9, 10))
    decoding = _request(num_computed=2)
    decoding.state = State.RUNNING

    fetcher.settle([decoding])

    assert not waits


def test_a_prefetch_alone_and_requests_that_all_wait_are_waited_for(fetcher, waits):
    fetcher.prefetch((7, 8, 9, 10))
    fetcher.settle([])
    assert len(waits) == 1

    waiting = _request(num_computed=0)
    fetcher.begin(waiting)
    fetcher.settle([waiting])
    assert len(waits) == 2
