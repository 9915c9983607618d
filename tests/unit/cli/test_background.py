"""Servers in the background: started for a client, used by prompts, looked at and ended."""

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from kvchat.cli.agents import CLIENTS
from kvchat.cli.background import ServerFacts, _arguments
from kvchat.cli.running_server import _born, any_server
from kvchat.cli.settings import resolve
from kvchat.core.paths import write_state
from kvchat.server.idle import IdleWatch
from support.commands import Shell, objects

SERVER = ServerFacts("http://127.0.0.1:5", "", "coder", 32_768)
# Prints what it was given, as a client that does nothing else.
CLIENT = """#!/bin/sh
echo "arguments: $*"
echo "model: $LLM_MODEL"
cat "$LLM_USER_PATH/extra-openai-models.yaml"
exit 7
"""


# What takes longer to import than a short answer: a prompt on a server needs none of it.
NOT_IMPORTED = {
    *("torch", "transformers", "numpy", "gguf", "tokenizers", "llguidance", "httpx2", "pydantic"),
    *("diskcache", "kvchat.cache.disk", "llvmlite", "jinja2", "rich.console", "prompt_toolkit"),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_is_told_address_key_model_and_context(name: str, tmp_path: Path) -> None:
    """A key is always sent: clients refuse to start without one."""
    how = CLIENTS[name].launch(SERVER, tmp_path)

    told = json.dumps([how.variables, how.arguments, how.files])
    assert "http://127.0.0.1:5" in told
    assert "coder" in told
    assert "kvchat" in told
    if name not in ("qwen", "llm"):
        assert "32768" in told
    own = CLIENTS[name].launch(ServerFacts("http://h:1", "a-secret", "m", 9), tmp_path)
    assert "a-secret" in json.dumps([own.variables, own.files])
    assert "a-secret" not in json.dumps(own.arguments)  # a list of processes shows them


def test_a_server_is_idle_once_no_request_has_run_for_its_time() -> None:
    now_s = [0.0]

    async def app(scope: object, receive: object, send: object) -> None:
        now_s[0] += 100.0
        assert not watch.is_over  # an answer may take longer

    is_ready = False
    watch = IdleWatch(app, 60.0, lambda: is_ready, lambda: now_s[0])  # type: ignore[arg-type]
    now_s[0] += 1000.0
    assert not watch.is_over  # loading is no idleness
    is_ready = True

    asyncio.run(watch({"path": "/v1/models"}, None, None))  # type: ignore[arg-type]
    assert not watch.is_over
    now_s[0] += 59.0
    assert not watch.is_over
    now_s[0] += 2.0
    assert watch.is_over


def test_a_server_takes_none_of_one_prompts_own_flags() -> None:
    """Its system prompt, its limit and its time were those of every later client."""
    flags = {"model": "demo", "system": "mine", "max_tokens": "3", "timeout": "5", "spec": False}
    settings = resolve({**flags, "draft": "ngram"}, {}, Path("/nonexistent"))

    assert _arguments(settings) == ["--model=demo", "--draft=ngram", "--no-spec"]


def test_a_number_of_another_process_is_not_the_servers(tmp_path: Path) -> None:
    """`kvchat stop` would have ended a process that got the number of a server that crashed."""
    content: dict[str, object] = {"url": "http://127.0.0.1:1", "key": "", "began": 1.0}
    for born, is_there in ((_born(os.getpid()), True), ("1", False)):
        content |= {"pid": os.getpid(), "born": born}
        write_state(tmp_path / "server.json", 1, "server", content)
        assert (any_server(tmp_path) is not None) is is_there


def test_a_client_starts_a_server_that_prompts_use_until_it_is_stopped(
    shell: Shell, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = shell.home / "programs"
    programs.mkdir()
    (programs / "llm").write_text(CLIENT)
    (programs / "llm").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    missing = shell.run("launch", "aider", "-m", tiny)
    too_long = shell.run("launch", "nosuch", "-m", tiny)
    done = shell.run("launch", "llm", "-m", tiny, "--", "-x", "hello")
    try:
        shown = shell.run("ps")
        [answer] = objects(shell.run("-m", tiny, "-p", "x", "--max-tokens", "2", "--json").stdout)
        imported = shell.run(
            "-m", tiny, "-p", "x", "--max-tokens", "2", PYTHONPROFILEIMPORTTIME="1"
        )
    finally:
        stopped = shell.run("stop")

    assert (missing.returncode, b"not installed" in missing.stderr) == (2, True)
    assert (too_long.returncode, b"There are claude, codex" in too_long.stderr) == (2, True)
    assert done.returncode == 7, done.stderr
    told = done.stdout.decode()
    name = Path(tiny).name
    assert f"arguments: -x hello\nmodel: {name}\n" in told
    assert f'model_name: "{name}"' in told
    assert shown.stdout.decode().startswith(f"{name}  http://127.0.0.1:")
    assert "kvchat at 127.0.0.1" in answer["model"]["name"] + answer["model"]["device"]
    profile = imported.stderr.decode()
    modules = {line.rpartition("|")[2].strip() for line in profile.splitlines() if "|" in line}
    assert "kvchat.remote.local_client" in modules
    assert modules & NOT_IMPORTED == set()
    assert stopped.stdout == b"The server is stopped.\n"
    assert shell.run("ps").stdout == b"No server of yours runs here.\n"
    files = list((shell.home / ".local/state/kvchat").rglob("*"))
    assert any(path.name == "keys.json" for path in files)
    assert all(stat.S_IMODE(path.stat().st_mode) in (0o600, 0o700) for path in files)


def test_a_context_that_a_clients_own_prompt_fills_is_refused(
    shell: Shell, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = shell.home / "programs"
    programs.mkdir()
    (programs / "codex").write_text("#!/bin/sh\n")
    (programs / "codex").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    done = shell.run("launch", "codex", "-m", tiny)

    assert shell.run("stop").returncode == 0
    assert done.returncode == 4
    assert b"Codex sends about 6,000 tokens before your first word" in done.stderr
