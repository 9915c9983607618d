"""What the terminal tests share: a text checkpoint, and chats in the test's own process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat import lexing
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from support.chat_screen import ChatScreen, PlainChat
from support.checkpoints import save_checkpoint, tiny_model
from support.scripted_engine import Script, scripted_build, text_model, write_text_checkpoint
from support.tiny_host import tiny_host

StartChat = Callable[..., ChatScreen]
BeginHost = Callable[..., ChatHost]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint") / "scripted")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_model("llama"))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> ChatModel:
    return text_model(checkpoint)


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


@pytest.fixture
def controller(model: ChatModel, store: SessionStore) -> Iterator[ChatController]:
    build = scripted_build(model, lambda question, _: Script(f"You said {question}."))
    host = ChatHost(model, build, store)  # type: ignore[arg-type]
    controller = ChatController(host, lambda *_: host, None, AskOptions())
    yield controller
    controller.close_session()
    host.close()


@pytest.fixture
def begin_host() -> Iterator[BeginHost]:
    """Return what starts a host as `tiny_host` does, after the one before has ended."""
    hosts: list[ChatHost] = []

    def begin(*places: Any, **settings: Any) -> ChatHost:
        for before in hosts:
            before.close()
        hosts.append(tiny_host(*places, **settings))
        hosts[-1].wait_until_ready()
        return hosts[-1]

    yield begin
    for host in hosts:
        host.close()


@pytest.fixture(autouse=True)
def _patience_with_lexers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real limit is by the clock, and a machine may stand still for a second."""
    monkeypatch.setattr(lexing, "_MAX_LEXING_S", 60.0)


@pytest.fixture
def start_chat(checkpoint: Path, tmp_path: Path) -> Iterator[StartChat]:
    """Start chats with a scripted engine in this process; all are ended with the test."""
    with ExitStack() as started:

        def start(*arguments: str, is_saved: bool = True, **settings: Any) -> ChatScreen:
            saving = ["--sessions", str(tmp_path / "sessions")] if is_saved else []
            everything = [str(checkpoint), *saving, *arguments]
            kind = PlainChat if {"--plain", "--spoken"} & {*arguments} else ChatScreen
            chat = kind(tmp_path, everything, **settings)
            started.callback(chat.close)
            return chat.wait_for("/help for help")

        yield start
