"""Chats with a scripted engine, as processes, each in a pseudo-terminal of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.fork_server import ForkServer
from support.pty_screen import PtyScreen
from support.scripted_engine import write_text_checkpoint

StartPty = Callable[..., PtyScreen]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint") / "scripted")


@pytest.fixture
def start_pty(checkpoint: Path, tmp_path: Path, fork_server: ForkServer) -> Iterator[StartPty]:
    """Start chats; all of them are ended with the test."""
    with ExitStack() as started:

        def start(*arguments: str, is_saved: bool = True, **settings: Any) -> PtyScreen:
            saving = ["--sessions", str(tmp_path / "sessions")] if is_saved else []
            everything = [str(checkpoint), *saving, *arguments]
            chat = PtyScreen(fork_server, "support.scripted_repl", everything, **settings)
            started.callback(chat.close)
            return chat.wait_for("/help for help")

        yield start
