"""What the terminal tests share: a text checkpoint, and chats in a pseudo-terminal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from kvchat.terminal import code_lines
from support.fork_server import ForkServer
from support.pty_screen import PtyScreen
from support.scripted_engine import text_model, write_text_checkpoint

StartChat = Callable[..., PtyScreen]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint") / "scripted")


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> ChatModel:
    return text_model(checkpoint)


@pytest.fixture(autouse=True)
def _patience_with_lexers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real limit is by the clock, and a machine may stand still for a second."""
    monkeypatch.setattr(code_lines, "_MAX_LEXING_S", 60.0)


@pytest.fixture
def start_chat(checkpoint: Path, tmp_path: Path, fork_server: ForkServer) -> Iterator[StartChat]:
    """Start chats with a scripted engine; all of them are ended with the test."""
    started: list[PtyScreen] = []

    def start(*arguments: str, is_saved: bool = True, **settings: Any) -> PtyScreen:
        saving = ["--sessions", str(tmp_path / "sessions")] if is_saved else []
        everything = [str(checkpoint), *saving, *arguments]
        chat = PtyScreen(fork_server, "support.scripted_repl", everything, **settings)
        started.append(chat)
        return chat.wait_for("/help for help")

    yield start
    for chat in started:
        chat.close()
