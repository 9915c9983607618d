"""`kvchat serve` as a process: its address, its end, and what it keeps between two runs."""

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import save_checkpoint, tiny_model
from support.commands import Shell

MESSAGES = [{"role": "user", "content": "One two three four five six seven eight nine ten."}]


class Server:
    """A running server and its port."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.process = process
        self._port = port

    def fetch(self, path: str, body: object = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", data, 60) as got:
            return json.load(got)

    def wait_until_ready(self) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                self.fetch("/health")
                return
            except (urllib.error.URLError, ConnectionError):  # refused, or 503 while it loads
                assert self.process.poll() is None, self.process.communicate()
                time.sleep(0.1)
        raise AssertionError("the server is not ready")

    def ask(self) -> Any:
        body = {"model": "small", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
        return self.fetch("/v1/chat/completions", body)["usage"]["kvchat"]


@contextmanager
def served(shell: Shell, model: str, *options: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        shell.command("serve", "-m", model, "--name", "small", "--port", str(port), *options),
        env=shell.environment,
        stderr=subprocess.PIPE,
    )
    try:
        server = Server(process, port)
        server.wait_until_ready()
        yield server
    finally:
        process.kill()
        process.wait()


def test_a_server_keeps_what_it_read_and_chats_use_its_engine(shell: Shell, tiny: str) -> None:
    with served(shell.patient, tiny) as server:
        first = server.ask()
        done = shell.run("-m", tiny, "-p", "Hello", "--max-tokens", "4", "--json")
        beside = shell.run("-m", tiny, "-p", "Hello", "--max-tokens", "4", "--json", "--seed", "1")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 143
    assert not list(shell.home.rglob("server.json"))  # what told chats of it goes with it

    with served(shell.patient, tiny) as server:
        again = server.ask()

    for answered in (done, beside):
        assert answered.returncode == 0, answered.stderr
        assert json.loads(answered.stdout)["model"]["device"].startswith("kvchat at 127.0.0.1")
    assert json.loads(beside.stdout)["usage"]["cached_tokens"]["total"] > 0
    assert first["cached_tokens"]["total"] == 0
    assert again["cached_tokens"]["disk"] > 0
    assert again["prefilled_tokens"] <= 16
    assert {path.stat().st_mode & 0o77 for path in shell.home.rglob("answers.db*")} == {0}


def test_kv_of_8_bits_outlives_a_killed_server_and_is_lent_to_chats_of_8_bits_only(
    shell: Shell, tiny: str
) -> None:
    int8 = ("--kv-dtype", "int8")
    ask = ("-m", tiny, "-p", "Hello", "--max-tokens", "4", "--json")
    with served(shell.patient, tiny, *int8) as server:
        server.ask()
        chats = [shell.run(*ask, *options) for options in (int8, ())]
    with served(shell.patient, tiny, *int8) as server:  # the first was killed
        again = server.ask()

    alike, other = (json.loads(chat.stdout)["model"] for chat in chats)
    assert alike["device"].startswith("kvchat at 127.0.0.1")
    assert (other["device"], other["kv_dtype"]) == ("cpu", "float32")
    assert again["cached_tokens"]["disk"] > 0
    assert again["prefilled_tokens"] <= 16


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--host", "0.0.0.0"), b"a key is needed"),
        (("--port", "70000"), b"--port is 70000"),
        (
            ("--host", "no.such.name.invalid", "--api-key", "k"),
            b"Cannot listen on no.such.name.invalid",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_a_usage_error(
    shell: Shell, arguments: tuple[str, ...], sentence: bytes
) -> None:
    done = shell.run("serve", *arguments)

    assert done.returncode == 2
    assert sentence in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_server_whose_model_cannot_be_loaded_ends(shell: Shell, tmp_path: Path) -> None:
    """It stayed, and answered every request with an error."""
    stateful = str(save_checkpoint(tmp_path / "stateful", tiny_model("mamba")))

    done = shell.run("serve", "-m", stateful, "--kv-dtype", "int8", "--port", "0")

    assert done.returncode == 3
    [_, sentence] = done.stderr.decode().splitlines()
    assert sentence.startswith("kvchat: --kv-dtype int8 does not work with ")
    assert sentence.endswith("it keeps recurrent state beside its KV. Use --kv-dtype auto.")


def test_a_port_in_use_is_named(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = shell.run("serve", "--port", str(taken.getsockname()[1]))

    assert done.returncode == 2
    assert b"Cannot listen" in done.stderr
