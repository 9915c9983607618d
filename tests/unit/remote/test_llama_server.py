"""A chat with llama.cpp's own server: token ids, what it cached, and a restart of it."""

import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.cli.build import open_host
from kvchat.cli.endpoints import open_remote_host
from kvchat.cli.settings import resolve
from kvchat.core.types import SamplingParams
from kvchat.remote.address import address_of
from support.checkpoints import tiny_model
from support.gguf_files import write_gguf

PROGRAM = Path(__file__).resolve().parents[3] / ".llama-server" / "llama-server"
OPTIONS = AskOptions(sampling=SamplingParams(temperature=0.0), max_tokens=24)
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason="llama.cpp's server is not built; `make llama-server` does that"
)


class LlamaServer:
    """llama.cpp's server with one model, on a port that stays the same after a restart."""

    def __init__(self, model: Path, slots: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._arguments = [str(PROGRAM), "-m", str(model), "--port", str(self._port)]
        self._arguments += ["-c", "2048", "-t", "1", "--slot-save-path", f"{slots}/"]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until_s = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert time.monotonic() < until_s
            assert self._process.poll() is None
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, tiny_model("llama"), merges=("h e",))


@pytest.fixture
def llama(model: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    slots = tmp_path / "slots"
    slots.mkdir()
    server = LlamaServer(model, slots)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def host_at(url: str, store: Path) -> Iterator[ChatHost]:
    settings = resolve({}, {}, store / "no-config.toml")
    host = open_remote_host(settings, address_of(url), SessionStore(store), None)
    assert host.wait_until_ready().sent_as == "token ids"
    try:
        yield host
    finally:
        host.close()


def ended(events: object) -> AnswerEnded:
    [*_, last] = events  # type: ignore[misc]
    assert isinstance(last, AnswerEnded), last
    return last


def test_the_server_answers_as_a_local_engine_does(llama, model, tmp_path):
    """Random weights write bytes that are no characters: the server leaves out their tokens."""
    flags = {"model": str(model), "dtype": "float32", "incognito": True, "endpoint": "none"}
    local = open_host(resolve(flags, {}, tmp_path / "no-config.toml"))
    local.wait_until_ready()
    with host_at(llama.url, tmp_path) as host:
        for question in ("hello there", "Größe? 日本 🙂"):
            answers = [ended(h.unsaved_session().ask(question, OPTIONS)) for h in (host, local)]
            assert answers[0].text.rstrip("\ufffd") == answers[1].text.rstrip("\ufffd")
            assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    local.close()


def test_another_turn_reads_what_is_new(llama: LlamaServer, tmp_path: Path) -> None:
    with host_at(llama.url, tmp_path) as host:
        session = host.unsaved_session()
        first = ended(session.ask("hello " * 20, OPTIONS))
        second = ended(session.ask("and then?", OPTIONS))

    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.cached.total >= first.usage.prompt_tokens
    assert second.usage.cached.total <= known


def test_a_conversation_survives_a_restart_of_the_server(llama, tmp_path):
    with host_at(llama.url, tmp_path) as host:
        session = host.new_session()
        first = ended(session.ask("hello " * 20, OPTIONS))
        session.close()
    llama.kill()
    llama.start()
    with host_at(llama.url, tmp_path) as host:
        again = host.open_session(session.session_id)
        second = ended(again.ask("and then?", OPTIONS))
        again.close()

    assert second.usage.cached.total >= first.usage.prompt_tokens
