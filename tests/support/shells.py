"""A shell with a home of its own, and tiny checkpoints to point it at."""

from pathlib import Path

import pytest

from support.checkpoints import save_checkpoint, tiny_model
from support.direct_shell import DirectShell
from support.fork_server import ForkedShell, ForkServer


@pytest.fixture
def shell(tmp_path: Path, fork_server: ForkServer) -> ForkedShell:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    return ForkedShell(home, server=fork_server)


@pytest.fixture
def direct(tmp_path: Path) -> DirectShell:
    """The same home, for commands that load no model."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    return DirectShell(home)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny llama with a chat template and a context of 512 tokens."""
    return str(save_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_model("llama")))
