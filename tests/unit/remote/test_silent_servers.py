"""A server that stands still without ending: its connections stay open, and nothing comes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvchat.core.errors import EngineEnded, GenerationError
from kvchat.core.events import RequestEvent, RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.request import RequestSpec
from kvchat.remote.address import address_of
from kvchat.remote.engine import Patience, RemoteEngine
from kvchat.remote.kinds import Kind, Server
from support.fake_llm_server import FakeServer, Refusal, chunks, fake_server

WAIT_S = 60.0
FOREVER_S = 1000.0
SPEC = RequestSpec((1, 2, 3), SamplingParams(temperature=0.0), max_tokens=5)


@contextmanager
def engine_of(
    fake: FakeServer, patience: Patience, kind: Kind = Kind.OTHER, is_named: bool = False
) -> Iterator[RemoteEngine]:
    """Yield an engine that another one can replace unless the user named it; a kvchat server gets
    token ids.
    """
    server = Server(address_of(fake.url), kind, "m")
    spell = (lambda last_id, text: [7]) if kind is Kind.KVCHAT else None
    has_ended = None if is_named else lambda: False
    with closing(RemoteEngine(server, spell, has_ended, patience)) as engine:
        yield engine


def run(engine: RemoteEngine, events: list[RequestEvent]) -> None:
    """Step until there is nothing to do; adds to `events`."""
    end_s = time.monotonic() + WAIT_S
    while engine.has_work:
        assert time.monotonic() < end_s, events
        events.extend(engine.step())


def wait_until_asked(fake: FakeServer) -> None:
    """Wait until the server was asked three times how it is."""
    end_s = time.monotonic() + WAIT_S
    while [asked.path for asked in fake.asked].count("/health") < 3:
        assert time.monotonic() < end_s, "it was not asked"


@pytest.mark.parametrize("num_said", [0, 1])
def test_a_server_that_stands_still_is_lost(num_said: int) -> None:
    """A chat that was attached to a suspended server waited for half an hour."""

    def author(path: str, body: Any) -> Iterator[object]:
        yield from chunks("Hello")[:num_said]
        fake.is_awake.clear()
        fake.is_awake.wait()

    events: list[RequestEvent] = []
    patience = Patience(silence_s=0.05, answer_s=0.05)
    with fake_server(author) as fake, engine_of(fake, patience) as engine:
        engine.submit(SPEC)
        with pytest.raises(EngineEnded, match="does not answer any more"):
            run(engine, events)

    *said, failed = events
    assert [type(event) for event in said] == [TokensGenerated] * num_said
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, EngineEnded)
    assert [asked.path for asked in fake.asked[-2:]] == ["/health", "/health"]


def test_a_server_that_reads_a_long_prompt_in_silence_is_kept() -> None:
    def author(path: str, body: Any) -> Iterator[object]:
        wait_until_asked(fake)
        yield from chunks("Hello")

    events: list[RequestEvent] = []
    patience = Patience(silence_s=0.01, answer_s=FOREVER_S)
    with fake_server(author) as fake, engine_of(fake, patience) as engine:
        engine.submit(SPEC)
        run(engine, events)

    assert isinstance(events[-1], SampleFinished)
    assert events[-1].reason is FinishReason.STOP


def stalling(fake_gets: dict[str, object]) -> Callable[[str, Any], object]:
    """Answer nothing to a request, and tell from then on that no step is made."""

    def author(path: str, body: Any) -> Iterator[object]:
        fake_gets["/health"] = Refusal(503, {"status": "stalled", "model": "m"})
        yield from ()
        threading.Event().wait(WAIT_S)

    return author


@pytest.mark.parametrize("is_named", [False, True])
def test_a_server_whose_engine_stands_still_is_lost_although_it_answers(is_named: bool) -> None:
    """The chat asked /health, got an answer, and waited for ever."""
    events: list[RequestEvent] = []
    gets: dict[str, object] = {}
    patience = Patience(silence_s=0.01, answer_s=FOREVER_S)
    with (
        fake_server(stalling(gets), gets) as fake,
        engine_of(fake, patience, Kind.KVCHAT, is_named) as engine,
    ):
        engine.submit(SPEC)
        if is_named:
            run(engine, events)
        else:
            with pytest.raises(EngineEnded, match="computes nothing any more: restart it"):
                run(engine, events)

    [failed] = events
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, EngineEnded) is not is_named
    assert "computes nothing any more" in failed.error.message
    assert "/model NAME" in failed.error.hint if is_named else "/continue" in failed.error.hint


def test_a_server_that_the_user_named_may_be_silent() -> None:
    def author(path: str, body: Any) -> Iterator[object]:
        wait_until_asked(fake)
        yield {"choices": [{"text": "x", "token_ids": [5], "finish_reason": "stop"}]}

    events: list[RequestEvent] = []
    patience = Patience(silence_s=0.01, answer_s=0.01)
    with (
        fake_server(author) as fake,
        engine_of(fake, patience, Kind.KVCHAT, is_named=True) as engine,
    ):
        engine.submit(SPEC)
        run(engine, events)

    assert isinstance(events[-1], SampleFinished), events


def test_a_server_that_stands_still_while_idle_is_lost_at_the_next_question() -> None:
    patience = Patience(question_s=0.05, silence_s=FOREVER_S, answer_s=0.05)
    with (
        fake_server(lambda path, body: {}) as fake,
        engine_of(fake, patience, Kind.KVCHAT) as engine,
    ):
        engine.read_ahead([1, 2, 3])
        assert not engine.has_work
        fake.is_awake.clear()
        with pytest.raises(GenerationError):
            engine.read_ahead([1, 2, 3])
        num_asked = len(fake.asked)
        with pytest.raises(GenerationError):
            engine.read_ahead([1, 2, 3])
        assert len(fake.asked) == num_asked, "it is not waited for again and again"
        with pytest.raises(EngineEnded, match="does not answer any more"):
            run(engine, [])


def test_a_question_that_is_refused_costs_no_engine() -> None:
    patience = Patience(question_s=FOREVER_S, silence_s=FOREVER_S, answer_s=FOREVER_S)
    with (
        fake_server(lambda path, body: "no object") as fake,
        engine_of(fake, patience, Kind.KVCHAT) as engine,
    ):
        with pytest.raises(GenerationError):
            engine.read_ahead([1, 2, 3])
        run(engine, [])
        assert [asked.path for asked in fake.asked] == ["/kvchat/read_ahead", "/health"]
