"""`kvchat serve` as a process: its address, its end, and what it keeps between two runs."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from kvchat.cli.model_names import short_name
from support.checkpoints import save_checkpoint, tiny_model
from support.fork_server import ForkedShell
from support.server_process import ServerProcess, served

MESSAGES = [{"role": "user", "content": "One two three four five six seven eight nine ten."}]


def asked(server: ServerProcess) -> Any:
    body = {"model": "small", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    return server.fetch("/v1/chat/completions", body)["usage"]["kvchat"]


def test_a_server_keeps_what_it_read_and_chats_use_its_engine(shell, tiny):
    small = ("-m", tiny, "--name", "small")
    with served(shell.patient, *small) as server:
        first = asked(server)
        done = shell.run("-m", tiny, "-p", "Hello", "--max-tokens", "4", "--json")
        beside = shell.run("-m", tiny, "-p", "Hello", "--max-tokens", "4", "--json", "--seed", "1")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 143
    assert not list(shell.home.rglob("servers/*"))  # what told chats of it goes with it

    with served(shell.patient, *small) as server:
        again = asked(server)
        server.process.send_signal(signal.SIGHUP)  # ended it at once, and left its address
        assert server.process.wait(30) == 129
    assert not list(shell.home.rglob("servers/*"))

    for answered in (done, beside):
        assert answered.returncode == 0, answered.stderr
        assert json.loads(answered.stdout)["model"]["device"].startswith("kvchat at 127.0.0.1")
    assert json.loads(beside.stdout)["usage"]["cached_tokens"]["total"] > 0
    assert first["cached_tokens"]["total"] == 0
    assert again["cached_tokens"]["disk"] > 0
    assert again["prefilled_tokens"] <= 16
    assert {path.stat().st_mode & 0o77 for path in shell.home.rglob("answers.db*")} == {0}


def test_a_server_that_reuses_nothing_says_so_behind_its_name_too(shell, tiny):
    """`--no-cache` was known before `serve` only, and an error behind it."""
    with served(shell.patient, "-m", tiny, "--name", "small", "--no-cache") as server:
        told = [asked(server) for _ in range(2)]

    assert [each["cached_tokens"]["total"] for each in told] == [0, 0]
    assert [each["miss_reason"] for each in told] == ["off", "off"]
    assert not list(shell.home.rglob("answers.db*"))


def test_kv_of_8_bits_outlives_a_killed_server_and_is_lent_to_chats_of_8_bits_only(shell, tiny):
    int8 = ("--kv-dtype", "int8")
    ask = ("-m", tiny, "-p", "Hello", "--max-tokens", "4", "--json")
    small = ("-m", tiny, "--name", "small", *int8)
    with served(shell.patient, *small) as server:
        asked(server)
        chats = [shell.run(*ask, *options) for options in (int8, ())]
        server.process.send_signal(signal.SIGKILL)
    with served(shell.patient, *small) as server:
        again = asked(server)

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
def test_an_address_that_cannot_be_used_is_a_usage_error(shell, arguments, sentence):
    done = shell.run("serve", *arguments)

    assert done.returncode == 2
    assert sentence in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_server_whose_model_cannot_be_loaded_ends(shell: ForkedShell, tmp_path: Path) -> None:
    """It stayed, and answered every request with an error."""
    stateful = str(save_checkpoint(tmp_path / "stateful", tiny_model("mamba")))

    done = shell.run("serve", "-m", stateful, "--kv-dtype", "int8", "--port", "0")

    assert done.returncode == 3
    address, sentence = sorted(done.stderr.decode().splitlines(), key=lambda line: "int8" in line)
    assert "http://" in address
    assert sentence.startswith("kvchat: --kv-dtype int8 does not work with ")
    assert sentence.endswith("it has no attention, and so no KV. Use --kv-dtype auto.")


def test_a_port_in_use_is_named(shell: ForkedShell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = shell.run("serve", "--port", str(taken.getsockname()[1]))

    assert done.returncode == 2
    assert b"Cannot listen" in done.stderr


def test_a_model_in_files_is_served_under_its_short_name(tmp_path: Path) -> None:
    """Answers carried the whole path of the file, which is nothing for clients to read."""
    directory, file = tmp_path / "tiny-1b", tmp_path / "qwen.Q4_K_M.gguf"
    directory.mkdir()
    file.touch()

    assert short_name(str(file)) == "qwen.Q4_K_M"
    assert short_name(f"{directory}/") == "tiny-1b"
    assert short_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert short_name("demo") == "demo"
