"""A served model: the whole server above a scripted engine, called in this process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.answer_memory import AnswerMemory, ResponseMemory
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.deletion import SavedPlaces
from kvchat.chat.host import ChatHost
from kvchat.chat.prefixes import ResentChats
from kvchat.chat.stabiliser import Stabiliser
from kvchat.chat.store import SessionStore
from kvchat.server.answering import Answering
from kvchat.server.app import new_app
from kvchat.server.guard import App, Limits
from kvchat.server.metrics import Metrics
from kvchat.server.service import Service
from support.scripted_engine import Author, Script, ScriptedEngine, scripted_build
from support.tiny_host import answer_options

Serve = Callable[..., App]


def echo(question: str, sample: int) -> Script:
    """Answer with the question and the number of the sample."""
    return Script(f"{question} {sample}")


@pytest.fixture
def serve(model: ChatModel) -> Iterator[Serve]:
    """Return a function that serves an author's answers and returns the application."""
    open_parts = ExitStack()

    def start(
        author: Author = echo,
        api_key: str | None = None,
        limits: Limits | None = None,
        memory: Path | None = None,
        max_context: int = 32768,
        served: ChatModel = model,
        names: tuple[str, ...] = ("other",),
        store: SessionStore | None = None,
        has_chat_page: bool = False,
        stabiliser: Stabiliser | None = None,
    ) -> App:
        host = ChatHost(served, scripted_build(served, author, max_context=max_context), store)
        open_parts.callback(host.close)
        host.wait_until_ready()
        others = {"names": names, "has_chat_page": has_chat_page, "stabiliser": stabiliser}
        return open_parts.enter_context(served_by(host, api_key, limits, memory, **others))

    with open_parts:
        yield start


@contextmanager
def served_by(
    host: ChatHost,
    api_key: str | None = None,
    limits: Limits | None = None,
    memory: Path | None = None,
    places: SavedPlaces | None = None,
    names: tuple[str, ...] = ("other",),
    system: str | None = None,
    limit_s: float | None = None,
    has_chat_page: bool = False,
    stabiliser: Stabiliser | None = None,
) -> Iterator[App]:
    """Yield the application that serves a host."""
    metrics = Metrics()
    answering = Answering(
        ResentChats(host, AnswerMemory(memory), stabiliser), metrics, system, limit_s
    )
    responses = ResponseMemory(memory, host.model.tokenizer)
    every = ("scripted", *names)
    places = places if places is not None else SavedPlaces(None)
    options = answer_options(200)
    service = Service(host, answering, metrics, options, every, responses, places=places)
    yield new_app(service, api_key, limits or Limits(), has_chat_page)
    answering.close()
    responses.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect what the engine is asked for."""
    specs: list[Any] = []
    submit = ScriptedEngine.submit

    def noted(self, spec, *others):  # type: ignore[no-untyped-def]
        specs.append(spec)
        return submit(self, spec, *others)

    monkeypatch.setattr(ScriptedEngine, "submit", noted)
    return specs
