"""One tiny checkpoint and one engine for all conversations of these tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.chat.host import ChatHost
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.tiny_host import tiny_host


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), never_stopping(tiny_model("llama")))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> SessionStore:
    return SessionStore(tmp_path_factory.mktemp("home") / "sessions")


@pytest.fixture(scope="session")
def host(checkpoint: Path, store: SessionStore) -> Iterator[ChatHost]:
    started = tiny_host(checkpoint, store)
    started.wait_until_ready()
    yield started
    started.close()


@pytest.fixture
def session(host: ChatHost) -> Iterator[ChatSession]:
    opened = host.new_session(system="Be brief.")
    yield opened
    opened.close()
