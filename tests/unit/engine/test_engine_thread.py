"""EngineThread: loading, listeners, cancelling and closing, with an engine that needs no model."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvchat.core.errors import GenerationError, ModelError
from kvchat.core.events import (
    LoadEvent,
    LoadFailed,
    LoadProgress,
    ModelReady,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.types import FinishReason, StopWatcher
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import EngineThread
from support.clock import Clock
from support.engine_harness import EngineHarness
from support.remembering_model import GREEDY, complete_without_cache

READY = ModelReady("fake", "s1-0", "cpu", "float32", 120, 0.0)
WAIT_S = 60.0


class Inbox:
    """A listener whose events a test takes out one by one."""

    def __init__(self) -> None:
        self.events: queue.Queue[RequestEvent] = queue.Queue()

    def __call__(self, event: RequestEvent) -> None:
        self.events.put(event)

    def until_end(self) -> list[RequestEvent]:
        events = []
        while True:
            events.append(self.events.get(timeout=WAIT_S))
            if isinstance(events[-1], SampleFinished | RequestFailed):
                return events


class Gate(threading.Event):
    """Holds who enters until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def hold(self, *_: object) -> None:
        self.entered.set()
        self.wait(WAIT_S)


def refusing(error: BaseException) -> Callable[..., tuple[Engine, ModelReady]]:
    """Return what builds no engine, but raises the error."""

    def build(_: object) -> tuple[Engine, ModelReady]:
        raise error

    return build


def broken(_: object) -> None:
    """Listen, and fail."""
    raise ValueError("listener")


@pytest.fixture
def start():  # type: ignore[no-untyped-def]
    """Start engine threads that are closed whatever the test does."""
    threads = []

    def start(
        fails: Callable[[], None] = lambda: None,
        on_load: Callable[[LoadEvent], None] = lambda _: None,
        build: Callable[..., tuple[Engine, ModelReady]] | None = None,
    ) -> EngineThread:
        harness = EngineHarness(fails=fails)
        thread = EngineThread(build or (lambda _: (harness.engine, READY)), on_load)
        threads.append(thread)
        return thread

    yield start
    for thread in threads:
        thread.close(timeout_s=WAIT_S)


def spec(max_tokens: int = 5, num_samples: int = 1) -> RequestSpec:
    return RequestSpec((1, 2, 3), GREEDY, max_tokens=max_tokens, num_samples=num_samples)


def test_a_request_before_the_model_is_there_is_answered_once_it_is(start) -> None:  # type: ignore[no-untyped-def]
    gate = threading.Event()
    harness = EngineHarness()

    def build(progress: Callable[[LoadProgress], None]) -> tuple[Engine, ModelReady]:
        progress(LoadProgress("waiting"))
        gate.wait(WAIT_S)
        return harness.engine, READY

    heard: list[LoadEvent] = []
    thread, inbox = start(build=build, on_load=heard.append), Inbox()
    thread.submit(spec(), inbox)
    assert inbox.events.empty()
    gate.set()

    events = inbox.until_end()

    ids = [t for e in events if isinstance(e, TokensGenerated) for t in e.token_ids]
    assert ids == complete_without_cache(spec(), 0, 120)
    assert heard[:2] == [LoadProgress("waiting"), LoadProgress("preparing to decode")]
    assert [type(event) for event in heard[2:]] == [ModelReady]


@pytest.mark.parametrize(
    ("asked", "is_prepared"), [(None, False), (1, False), (5, True)], ids=["no", "a token", "yes"]
)
def test_what_decoding_needs_is_loading_where_an_answer_is_waited_for(  # type: ignore[no-untyped-def]
    start, monkeypatch: pytest.MonkeyPatch, asked: int | None, is_prepared: bool
) -> None:
    """The first prompt of a process once took eight times as long as others, and `load_s` little:
    weights were laid out for decoding beside its reading."""
    gate, ready = threading.Event(), threading.Event()
    harness, heard, prepared = EngineHarness(), list[ModelReady](), list[int]()
    monkeypatch.setattr(harness.engine, "prepare", lambda: prepared.append(len(heard)))

    def build(progress: object) -> tuple[Engine, ModelReady]:
        gate.wait(WAIT_S)
        return harness.engine, READY

    def hear(event: LoadEvent) -> None:
        if isinstance(event, ModelReady):
            heard.append(event)
            ready.set()

    thread = start(build=build, on_load=hear)
    if asked is not None:
        thread.submit(spec(max_tokens=asked), Inbox())
    gate.set()
    assert ready.wait(WAIT_S)

    assert (heard[0].load_s > READY.load_s) is is_prepared
    assert (prepared[:1] == [0]) is is_prepared, "before it is said to be ready"


@pytest.mark.parametrize(
    ("error", "message"),
    [(ModelError("No such model."), "No such model."), (OSError(12, "no memory"), "no memory")],
    ids=["typed", "unforeseen"],
)
def test_a_model_that_does_not_load_refuses_everything(start, error, message) -> None:  # type: ignore[no-untyped-def]
    heard: list[LoadEvent] = []
    thread, inbox = start(build=refusing(error), on_load=heard.append), Inbox()
    for _ in range(2):
        thread.submit(spec(), inbox)
        [failed] = inbox.until_end()
        assert message in str(failed.error)
    with pytest.raises(Exception, match=message):
        thread.call(lambda engine: engine.status()).result(WAIT_S)
    assert isinstance(heard[-1], LoadFailed)


def test_a_listener_that_raises_hurts_nobody(start) -> None:  # type: ignore[no-untyped-def]
    thread, inbox = start(on_load=broken), Inbox()
    thread.submit(spec(max_tokens=3), broken)
    thread.submit(spec(), inbox)

    assert isinstance(inbox.until_end()[-1], SampleFinished)


def test_a_listener_that_raises_while_being_refused_hurts_nobody(start) -> None:  # type: ignore[no-untyped-def]
    """Listeners were only guarded in the middle of answering: one that failed on hearing of a
    failed load, or of a refused prompt, ended the thread, and later requests waited for ever."""
    for thread in (start(build=refusing(ModelError("No such model.")), on_load=broken), start()):
        thread.submit(RequestSpec(tuple(range(30)) * 20, GREEDY), broken)
        inbox = Inbox()
        thread.submit(RequestSpec(tuple(range(30)) * 20, GREEDY), inbox)
        assert isinstance(inbox.until_end()[-1], RequestFailed)


def test_progress_that_nobody_can_show_does_not_keep_a_model_from_loading(start) -> None:  # type: ignore[no-untyped-def]
    """Where the line on stderr could not be written, the model was said not to load."""

    def broken(_: object) -> None:
        raise BrokenPipeError

    def build(progress: Callable[[LoadProgress], None]) -> tuple[Engine, ModelReady]:
        progress(LoadProgress("loading weights"))
        return EngineHarness().engine, READY

    thread, inbox = start(build=build, on_load=broken), Inbox()
    thread.submit(spec(), inbox)

    assert isinstance(inbox.until_end()[-1], SampleFinished)


def test_a_request_that_cannot_be_begun_fails_alone(start) -> None:  # type: ignore[no-untyped-def]
    """A stop watcher that could not be made once stopped the engine for everybody."""

    def no_watcher() -> StopWatcher:
        raise ValueError("no such character")

    thread, first, second = start(), Inbox(), Inbox()
    thread.submit(RequestSpec((1, 2), GREEDY, new_stop_watcher=no_watcher), first)
    thread.submit(spec(), second)

    assert "no such character" in first.until_end()[-1].error.message  # type: ignore[union-attr]
    assert isinstance(second.until_end()[-1], SampleFinished)


class Panic(BaseException):
    """What a Rust library's panic looks like: no Exception."""


def test_a_panic_while_loading_is_a_model_that_does_not_load(start) -> None:  # type: ignore[no-untyped-def]
    """Only Exceptions were caught: the thread ended without a word, and a caller that waited
    for the model or for an answer waited for ever."""
    heard: list[LoadEvent] = []
    thread, inbox = start(build=refusing(Panic("header too large")), on_load=heard.append), Inbox()
    thread.submit(spec(), inbox)

    assert "header too large" in inbox.until_end()[-1].error.message  # type: ignore[union-attr]
    assert isinstance(heard[-1], LoadFailed)


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_an_engine_that_breaks_fails_what_runs_and_refuses_the_rest(  # type: ignore[no-untyped-def]
    start, kind: type[BaseException]
) -> None:
    harness = EngineHarness()

    def broken_commit(*_: object) -> None:
        raise kind("commit")

    harness.cache.commit = broken_commit  # type: ignore[method-assign]
    heard: list[LoadEvent] = []
    thread = start(build=lambda _: (harness.engine, READY), on_load=heard.append)
    first, second = Inbox(), Inbox()
    thread.submit(spec(), first)

    assert "The engine stopped" in first.until_end()[-1].error.message  # type: ignore[union-attr]
    thread.submit(spec(), second)
    assert "The engine stopped" in second.until_end()[-1].error.message  # type: ignore[union-attr]
    assert isinstance(heard[-1], LoadFailed)


def test_cancelling_ends_an_endless_answer_and_is_harmless_twice(start) -> None:  # type: ignore[no-untyped-def]
    thread, inbox = start(), Inbox()
    endless = RequestSpec((1, 2, 3), GREEDY)
    ticket = thread.submit(endless, inbox)
    inbox.events.get(timeout=WAIT_S)

    thread.cancel(ticket, FinishReason.TIMEOUT)
    ending = inbox.until_end()[-1]
    thread.cancel(ticket)

    assert isinstance(ending, SampleFinished)
    assert ending.reason in (FinishReason.TIMEOUT, FinishReason.LENGTH)
    other = Inbox()
    thread.submit(spec(), other)
    assert isinstance(other.until_end()[-1], SampleFinished)


def test_every_sample_reports_its_end_and_the_listener_is_let_go(start) -> None:  # type: ignore[no-untyped-def]
    thread, inbox = start(), Inbox()
    thread.submit(spec(num_samples=3), inbox)

    ended = [inbox.until_end()[-1] for _ in range(3)]

    assert sorted(event.sample for event in ended) == [0, 1, 2]  # type: ignore[union-attr]
    thread.call(lambda engine: None).result(WAIT_S)
    assert not thread._running
    assert not thread._request_ids


def test_samples_cancelled_before_they_fork_let_the_listener_go(start) -> None:  # type: ignore[no-untyped-def]
    """Three samples, one ending: the two that had not forked never reported, and a reply that
    waited for them never finished."""
    gate = Gate()
    thread, inbox = start(fails=gate.hold), Inbox()
    ticket = thread.submit(RequestSpec(tuple(range(40)), GREEDY, num_samples=3), inbox)
    gate.entered.wait(WAIT_S)
    thread.cancel(ticket)
    gate.set()

    endings = [inbox.until_end()[-1] for _ in range(3)]

    assert [event.reason for event in endings] == [FinishReason.CANCELLED] * 3  # type: ignore[union-attr]
    thread.call(lambda engine: None).result(WAIT_S)
    assert not thread._running


class OneLongStep:
    """An engine that has one step to make, which asks once whether it is still wanted."""

    idle_s = None

    def __init__(self) -> None:
        self.has_work = True
        self.begun, self.may_ask, self.has_asked, self.may_end = (
            threading.Event() for _ in range(4)
        )

    def abandon_steps(
        self, is_unwanted: Callable[[frozenset[int]], bool], is_awaited: Callable[[], bool]
    ) -> None:
        self._is_unwanted, self.is_awaited = is_unwanted, is_awaited

    def step(self) -> list[RequestEvent]:
        self.begun.set()
        assert self.may_ask.wait(WAIT_S)
        assert not self._is_unwanted(frozenset({1}))
        self.has_asked.set()
        assert self.may_end.wait(WAIT_S)
        self.has_work = False
        return []

    def close(self) -> None:
        """Nothing runs."""


@contextmanager
def one_long_step(
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[OneLongStep, EngineThread]]:
    """An engine in its step, and its thread, which is closed in the end."""
    engine = OneLongStep()
    thread = EngineThread(lambda _: (engine, READY), lambda _: None, clock=clock)  # type: ignore[arg-type,return-value]
    try:
        assert engine.begun.wait(WAIT_S)
        yield engine, thread
    finally:
        engine.may_ask.set()
        engine.may_end.set()
        thread.close(WAIT_S)


def test_a_query_is_answered_within_a_long_step() -> None:
    """What a message costs, and the status, came when a prompt was read: after seconds."""
    with one_long_step() as (engine, thread):
        asked = thread.query(lambda engine: engine.has_work)
        failed = thread.query(lambda engine: 1 // 0)
        left = thread.query(lambda engine: pytest.fail("its caller has gone"))
        left.cancel()
        engine.may_ask.set()
        assert asked.result(WAIT_S)
        assert isinstance(failed.exception(WAIT_S), ZeroDivisionError)
        assert not engine.may_end.is_set()
    late = thread.query(lambda engine: engine.has_work)
    assert isinstance(late.exception(WAIT_S), GenerationError)


def test_a_call_that_is_awaited_counts_as_a_request_that_waits() -> None:
    """KV that was to be moved waited 0.4 s for a step that only read ahead."""
    with one_long_step() as (engine, thread):
        thread.call(lambda engine: None)
        assert not engine.is_awaited()
        moved = thread.call(lambda engine: engine.has_work, is_awaited=True)
        assert engine.is_awaited()
        engine.may_ask.set()
        engine.may_end.set()
        assert not moved.result(WAIT_S)
        assert not engine.is_awaited()


def test_a_query_tells_what_the_calls_before_it_have_made() -> None:
    done: list[str] = []
    with one_long_step() as (engine, thread):
        thread.call(lambda engine: done.append("called"))
        asked = thread.query(lambda engine: list(done))
        engine.may_ask.set()
        assert engine.has_asked.wait(WAIT_S)
        assert not asked.done()
        engine.may_end.set()
        assert asked.result(WAIT_S) == ["called"]


def test_a_long_step_gives_signs_of_life_and_without_work_none_is_needed() -> None:
    clock = Clock(100.0)
    with one_long_step(clock) as (engine, thread):
        clock.now_s += 50
        assert thread.silent_s == 50
        engine.may_ask.set()
        assert engine.has_asked.wait(WAIT_S)
        assert thread.silent_s == 0
        clock.now_s += 7
        assert thread.silent_s == 7
    assert thread.silent_s == 0


def test_calls_run_between_steps_and_bring_back_errors(start) -> None:  # type: ignore[no-untyped-def]
    thread = start()

    assert thread.call(lambda engine: engine.max_context).result(WAIT_S) == 120
    assert thread.call(lambda engine: threading.current_thread().name).result(WAIT_S) == (
        "kvchat-engine"
    )
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result(WAIT_S)


def test_calls_that_make_the_next_one_leave_steps_to_the_requests(start) -> None:  # type: ignore[no-untyped-def]
    """A long text's embedding is such a chain: all answers stood until its end."""
    thread, inbox = start(), Inbox()
    ended = threading.Event()
    num_steps: list[int] = []

    def go_on(engine: Engine) -> None:
        num_steps.append(engine.status().num_steps)
        if not ended.is_set():
            thread.call(go_on, gives_way=True)

    thread.call(go_on)
    thread.submit(spec(), inbox)
    try:
        assert isinstance(inbox.until_end()[-1], SampleFinished)
    finally:
        ended.set()
    assert len(set(num_steps)) > 1


def test_a_call_that_is_no_longer_wanted_is_skipped(start) -> None:  # type: ignore[no-untyped-def]
    """A future cancelled by a caller that stopped waiting once raised on the engine's thread, and
    the engine stopped."""
    gate, thread, inbox = Gate(), start(), Inbox()
    thread.call(gate.hold)
    gate.entered.wait(WAIT_S)
    ran = threading.Event()
    unwanted = thread.call(lambda engine: ran.set())
    assert unwanted.cancel()
    gate.set()

    thread.submit(spec(), inbox)
    assert isinstance(inbox.until_end()[-1], SampleFinished)
    assert not ran.is_set()


def test_closing_twice_and_while_answering_returns(start) -> None:  # type: ignore[no-untyped-def]
    thread, inbox = start(), Inbox()
    thread.submit(RequestSpec((1, 2, 3), GREEDY), inbox)
    inbox.events.get(timeout=WAIT_S)

    thread.close(WAIT_S)
    thread.close(WAIT_S)

    assert not thread._thread.is_alive()


def test_what_is_asked_of_a_closed_engine_is_refused_and_not_waited_for(start) -> None:  # type: ignore[no-untyped-def]
    """What was sent after the end was not read: a question to a session whose model had been
    exchanged waited for ever."""
    thread, inbox = start(), Inbox()
    thread.close(WAIT_S)

    ticket = thread.submit(spec(), inbox)
    thread.cancel(ticket)

    [failed] = inbox.until_end()
    assert isinstance(failed, RequestFailed)
    assert failed.error.message == "The engine is closed."
    with pytest.raises(GenerationError, match="closed"):
        thread.call(lambda engine: 1).result(WAIT_S)


def test_what_was_asked_just_before_the_end_is_refused_too(start) -> None:  # type: ignore[no-untyped-def]
    gate, thread, inbox = Gate(), start(), Inbox()
    thread.call(gate.hold)
    gate.entered.wait(WAIT_S)
    thread.close(timeout_s=0.0)  # is on its way, and the engine's thread is busy
    thread.submit(spec(), inbox)
    late = thread.call(lambda engine: 1)
    gate.set()

    assert isinstance(inbox.until_end()[-1], RequestFailed)
    with pytest.raises(GenerationError, match="closed"):
        late.result(WAIT_S)


def test_a_prompt_that_is_too_long_fails_alone(start) -> None:  # type: ignore[no-untyped-def]
    thread, long, short = start(), Inbox(), Inbox()
    thread.submit(RequestSpec((1,) * 500, GREEDY), long)
    thread.submit(spec(), short)

    [failed] = long.until_end()
    assert isinstance(failed, RequestFailed)
    assert failed.error.exit_code == 4
    assert not isinstance(failed.error, GenerationError)
    assert isinstance(short.until_end()[-1], SampleFinished)


def test_a_request_that_is_cancelled_while_the_model_loads_ends_at_once(start) -> None:  # type: ignore[no-untyped-def]
    """It ended only once the model was there, which may take minutes."""
    gate = threading.Event()
    harness = EngineHarness()

    def build(progress: object) -> tuple[Engine, ModelReady]:
        gate.wait(WAIT_S)
        return harness.engine, READY

    thread, given_up, wanted = start(build=build), Inbox(), Inbox()
    ticket = thread.submit(spec(), given_up)
    thread.submit(spec(), wanted)
    thread.cancel(ticket)
    thread.cancel(ticket)  # of a request that has ended: nothing

    (ended,) = given_up.until_end()
    assert isinstance(ended, SampleFinished)
    assert ended.reason is FinishReason.CANCELLED
    assert ended.usage.unread_tokens == 3
    gate.set()

    ids = [t for e in wanted.until_end() if isinstance(e, TokensGenerated) for t in e.token_ids]
    assert ids == complete_without_cache(spec(), 0, 120)
    assert given_up.events.empty()
    assert wanted.events.empty()
