"""/health tells whether the model answers: loading, ok, stalled, failed; all but ok with 503."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.host import ChatHost
from kvchat.core.errors import ModelError
from kvchat.engine.thread import Build
from kvchat.server.guard import App
from support.asgi_client import get
from support.clock import Clock
from support.scripted_engine import Script, scripted_build
from support.served import served_by
from support.tiny_host import answer_options, finish

WAIT_S = 60.0


@contextmanager
def served(model: ChatModel, build: Build, clock: Clock) -> Iterator[tuple[App, ChatHost]]:
    with closing(ChatHost(model, build, None, clock=clock)) as host, served_by(host) as app:
        yield app, host


def told(app: App) -> tuple[int, str]:
    got = get(app, "/health")
    assert ("message" in got.json) == (got.json["status"] in ("stalled", "failed"))
    return got.status, got.json["status"]


def test_an_engine_that_makes_no_step_is_told_until_it_goes_on(model: ChatModel) -> None:
    """The event loop answered "ok" while the engine's thread hung in a step."""
    hangs, may_go_on, clock = threading.Event(), threading.Event(), Clock()

    def author(question: str, _: int) -> Script:
        hangs.set()
        assert may_go_on.wait(WAIT_S)
        return Script("Here I am.")

    with served(model, scripted_build(model, author), clock) as (app, host):
        host.wait_until_ready()
        clock.now_s += 1e6
        assert told(app) == (200, "ok"), "without work it makes no step"

        reply = host.new_session().ask("Are you there?", answer_options())
        assert hangs.wait(WAIT_S)
        clock.now_s += 59
        assert told(app) == (200, "ok")
        clock.now_s += 16
        assert told(app) == (503, "stalled")
        sentence = get(app, "/health").json["message"]
        assert sentence == (
            "The engine has work and has made no step for 75 s; restart kvchat serve."
        )

        may_go_on.set()
        assert finish(reply).text == "Here I am."
        end_s = time.monotonic() + WAIT_S
        while told(app) != (200, "ok"):
            assert time.monotonic() < end_s


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_model_that_loads_or_cannot_be_loaded(model: ChatModel, is_failing: bool) -> None:
    """A server whose engine had stopped was said to be loading, for ever."""
    may_go_on = threading.Event()
    build = scripted_build(model, lambda question, _: Script(question))

    def slow(progress):  # type: ignore[no-untyped-def]
        assert may_go_on.wait(WAIT_S)
        if is_failing:
            raise ModelError("The weights are damaged.", "Download them again.")
        return build(progress)

    with served(model, slow, Clock()) as (app, host):
        assert told(app) == (503, "loading")
        may_go_on.set()
        host.wait_until_loaded()
        assert told(app) == ((503, "failed") if is_failing else (200, "ok"))
        if is_failing:
            sentence = get(app, "/health").json["message"]
            assert sentence == "The weights are damaged. Download them again."
