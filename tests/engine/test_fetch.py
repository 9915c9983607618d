"""The fetcher waits for a slower tier only where no request can run meanwhile."""

from types import SimpleNamespace
from typing import Any

from kvchat.core.types import SamplingParams
from kvchat.engine.fetch import Fetcher
from kvchat.engine.request import Request, RequestSpec, State


class _SlowConnector:
    """A tier that has something of every prompt, and never delivers it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def begin(self, ids: object, is_prefetch: bool = False, is_one_shot: bool = False) -> Any:
        return SimpleNamespace(is_over=False, num_front=0, num_arrived=0, give_up=lambda: None)

    def settle(self, restore: object) -> None:
        """Deliver nothing."""

    def wait_for_news(self) -> None:
        self.num_waits += 1


def _request(num_computed: int) -> Request:
    request = Request.from_spec(1, RequestSpec((1, 2, 3), SamplingParams()), 0.0)
    request.num_computed = num_computed
    return request


def test_a_prefetch_does_not_hold_up_a_request_that_can_run() -> None:
    """The prefetch was counted as one of the requests: a single one that decoded beside it waited
    a moment in every step.
    """
    connector: Any = _SlowConnector()
    fetcher = Fetcher(connector, None)
    fetcher.prefetch((7, 8, 9))
    decoding = _request(num_computed=2)
    decoding.state = State.RUNNING

    fetcher.settle([decoding])

    assert connector.num_waits == 0


def test_a_prefetch_alone_and_requests_that_all_wait_are_waited_for() -> None:
    connector: Any = _SlowConnector()
    fetcher = Fetcher(connector, None)
    fetcher.prefetch((7, 8, 9))
    fetcher.settle([])
    assert connector.num_waits == 1

    waiting = _request(num_computed=0)
    fetcher.begin(waiting)
    fetcher.settle([waiting])
    assert connector.num_waits == 2
