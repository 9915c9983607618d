"""EngineThread with an engine that ends by itself, as a server may: another one follows."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvchat.core.errors import EngineEnded, GenerationError, ModelError
from kvchat.core.events import (
    EngineLost,
    LoadEvent,
    LoadFailed,
    LoadProgress,
    ModelReady,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.types import FinishReason, Timing, Usage
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import EngineThread
from support.engine_harness import EngineHarness
from support.remembering_model import GREEDY, complete_without_cache

READY = ModelReady("fake", "s1-0", "cpu", "float32", 120, 0.0)
WAIT_S = 60.0
SPEC = RequestSpec((1, 2, 3), GREEDY, max_tokens=5)


class EndingEngine:
    """Tells `heard` of its first request, then ends. Has what an EngineThread asks here."""

    idle_s = 0.001

    def __init__(self, heard: tuple[RequestEvent, ...] = (), ends_idle: bool = False) -> None:
        self._events: list[RequestEvent] = []
        self._heard = heard
        self._has_ended = ends_idle

    @property
    def has_work(self) -> bool:
        return bool(self._events)

    def abandon_steps(self, is_unwanted: object, is_awaited: object) -> None:
        """No step takes long."""

    def prepare(self) -> None:
        """It is prepared."""

    def submit(self, spec: RequestSpec, submitted_s: float | None = None) -> int:
        self._events += [*self._heard, RequestFailed(1, EngineEnded("It ended."))]
        return 1

    def step(self) -> list[RequestEvent]:
        events, self._events = self._events, []
        if not events and self._has_ended:
            raise EngineEnded("It has ended.")
        self._has_ended |= bool(events)
        return events

    def close(self) -> None:
        """Nothing runs."""


class Inbox:
    def __init__(self) -> None:
        self._events: queue.Queue[Any] = queue.Queue()

    def __call__(self, event: Any) -> None:
        self._events.put(event)

    def until(self, *kinds: type) -> list[Any]:
        events = [self._events.get(timeout=WAIT_S)]
        while not isinstance(events[-1], kinds):
            events.append(self._events.get(timeout=WAIT_S))
        return events


class Threads:
    """Starts engine threads with an engine that ends, and a way to the next one."""

    def __init__(self) -> None:
        self.loads = Inbox()
        self.started: list[EngineThread] = []

    def start(self, engine: Any, rebuild: Callable[[], Any] | None) -> EngineThread:
        def again(progress: Callable[[LoadProgress], None]) -> Any:
            assert rebuild is not None
            return rebuild(), READY

        thread = EngineThread(
            lambda progress: (engine, READY), self.loads, again if rebuild is not None else None
        )
        self.started.append(thread)
        return thread


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    for thread in threads.started:
        thread.close(timeout_s=WAIT_S)


def ids_of(events: list[RequestEvent]) -> list[int]:
    return [t for e in events if isinstance(e, TokensGenerated) for t in e.token_ids]


def test_a_request_without_a_token_is_answered_by_the_next_engine(threads: Threads) -> None:
    inbox = Inbox()
    threads.start(EndingEngine(), lambda: EngineHarness().engine).submit(SPEC, inbox)

    events = inbox.until(SampleFinished, RequestFailed)

    assert ids_of(events) == complete_without_cache(SPEC, 0, 120)
    heard: list[LoadEvent] = threads.loads.until(EngineLost)
    assert heard[-1] == EngineLost("It has ended.")
    assert isinstance(threads.loads.until(ModelReady)[-1], ModelReady)


def test_a_request_that_has_tokens_fails_and_the_next_is_answered(threads: Threads) -> None:
    first, second = Inbox(), Inbox()
    tokens = TokensGenerated(1, 0, (7, 8))
    thread = threads.start(EndingEngine((tokens,)), lambda: EngineHarness().engine)
    thread.submit(SPEC, first)
    events = first.until(SampleFinished, RequestFailed)
    threads.loads.until(EngineLost)
    thread.submit(SPEC, second)

    assert ids_of(events) == [7, 8]
    assert isinstance(events[-1], RequestFailed)
    answer = second.until(SampleFinished, RequestFailed)
    assert ids_of(answer) == complete_without_cache(SPEC, 0, 120)


def test_a_sample_without_a_token_does_not_end_twice(threads: Threads) -> None:
    """Another sample broke off before its first token: the request began again, with both."""
    inbox = Inbox()
    silent = SampleFinished(1, 0, FinishReason.STOP, Usage(3), Timing(), stop_token=9)
    thread = threads.start(EndingEngine((silent,)), lambda: EngineHarness().engine)
    thread.submit(replace(SPEC, num_samples=2), inbox)

    assert inbox.until(SampleFinished, RequestFailed) == [silent]
    assert isinstance(inbox.until(SampleFinished, RequestFailed)[-1], RequestFailed)


def test_an_engine_that_ends_while_idle_is_replaced_before_it_is_asked(threads: Threads) -> None:
    threads.start(EndingEngine(ends_idle=True), lambda: EngineHarness().engine)

    assert isinstance(threads.loads.until(EngineLost)[-1], EngineLost)
    threads.loads.until(ModelReady)


def test_a_request_begins_again_only_once(threads: Threads) -> None:
    """A server that ends at every request would otherwise be asked for ever."""
    inbox = Inbox()
    threads.start(EndingEngine(), EndingEngine).submit(SPEC, inbox)

    [failed] = inbox.until(SampleFinished, RequestFailed)

    assert isinstance(failed.error, EngineEnded)


def test_a_request_that_waits_for_the_next_engine_is_cancelled_at_once(threads: Threads) -> None:
    building, gate, inbox = threading.Event(), threading.Event(), Inbox()

    def rebuild() -> Any:
        building.set()
        assert gate.wait(WAIT_S)
        return EngineHarness().engine

    thread = threads.start(EndingEngine(), rebuild)
    ticket = thread.submit(SPEC, inbox)
    assert building.wait(WAIT_S)
    thread.cancel(ticket)

    [ended] = inbox.until(SampleFinished, RequestFailed)
    gate.set()

    assert (ended.reason, ended.usage.prefilled_tokens) == (FinishReason.CANCELLED, 0)
    thread.call(lambda engine: None).result(WAIT_S)
    assert not thread._running


def test_requests_fail_if_the_next_engine_cannot_be_built(threads: Threads) -> None:
    inbox = Inbox()

    def rebuild() -> Any:
        raise ModelError("There is no memory.")

    threads.start(EndingEngine(), rebuild).submit(SPEC, inbox)

    [failed] = inbox.until(RequestFailed)

    assert str(failed.error) == "There is no memory."
    assert isinstance(threads.loads.until(LoadFailed)[-1], LoadFailed)


def test_without_another_engine_the_end_is_told_and_requests_are_refused(threads: Threads) -> None:
    thread = threads.start(EndingEngine(ends_idle=True), None)
    [*_, failed] = threads.loads.until(LoadFailed)

    assert str(failed.error) == "It has ended."
    with pytest.raises(GenerationError):
        thread.call(lambda engine: None).result(WAIT_S)
