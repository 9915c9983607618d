"""Servers in the background: started for a client, used by prompts, looked at and ended."""

import asyncio
import json
import os
import signal
import stat
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.cli import background, chat, launch
from kvchat.cli.agents import CLIENTS
from kvchat.cli.background import ServerFacts, _arguments
from kvchat.cli.output import Notices
from kvchat.cli.running_server import (
    Announcement,
    RunningServer,
    _born,
    all_servers,
    announced,
    running_server,
    server_of,
)
from kvchat.cli.settings import resolve
from kvchat.core.errors import ModelError, StoreError, UsageError
from kvchat.core.paths import write_state
from kvchat.core.stats import ReadRates
from kvchat.remote.address import Address
from kvchat.remote.questions import require_own_socket
from kvchat.server.idle import IdleWatch
from kvchat.server.serving import private_socket
from support.clock import Clock
from support.commands import objects

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
    clock = Clock(0.0)

    async def app(scope: object, receive: object, send: object) -> None:
        clock.now_s += 100.0
        assert not watch.is_over  # an answer may take longer

    is_ready = False
    watch = IdleWatch(app, 60.0, lambda: is_ready, clock)  # type: ignore[arg-type]
    clock.now_s += 1000.0
    assert not watch.is_over  # loading is no idleness
    is_ready = True

    asyncio.run(watch({"path": "/v1/models"}, None, None))  # type: ignore[arg-type]
    assert not watch.is_over
    clock.now_s += 59.0
    assert not watch.is_over
    clock.now_s += 2.0
    assert watch.is_over


def test_a_server_takes_none_of_one_prompts_own_flags() -> None:
    """Its system prompt, its limit and its time were those of every later client."""
    flags = {"model": "demo", "system": "mine", "max_tokens": "3", "timeout": "5", "spec": False}
    settings = resolve({**flags, "draft": "ngram"}, {}, Path("/nonexistent"))

    assert _arguments(settings) == ["--model=demo", "--draft=ngram", "--no-spec"]


def test_a_number_of_another_process_is_not_the_servers(tmp_path: Path) -> None:
    """`kvchat stop` would have ended a process that got the number of a server that crashed."""
    content: dict[str, object] = {"url": "", "socket": "/x", "key": "", "began": 1.0}
    for born, is_there in ((_born(os.getpid()), True), ("1", False)):
        content |= {"pid": os.getpid(), "born": born}
        write_state(tmp_path / "servers" / "x.json", 1, "server", content)
        assert bool(all_servers(tmp_path)) is is_there


def test_a_server_that_is_suspended_is_said_to_be(tmp_path, monkeypatch, capsys):
    """`ps` waited 5 s for it and showed "?", `stop` took it for another process, and a prompt
    waited for it too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    settings = resolve({"model": "/models/coder.gguf"}, {}, tmp_path / "none")
    state = tmp_path / "kvchat"
    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        monkeypatch.setattr(os, "getpid", lambda: process.pid)
        with announced(settings, state, Announcement("http://127.0.0.1:5", None)):
            monkeypatch.undo()
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
            background.show()
            shown = capsys.readouterr().out
            with pytest.raises(ModelError, match="is suspended") as refused:
                background.stop()
            assert running_server(settings, state) is None
        process.kill()

    assert shown.startswith("/models/coder.gguf  http://127.0.0.1:5  suspended")
    assert refused.value.hint == f"kill -CONT {process.pid} lets it go on."


def test_a_clients_own_prompt_is_cached_once_warm_has_read_it(tmp_path: Path) -> None:
    """A reading time of minutes was told behind --warm, which had just taken it."""
    settings = resolve({"cache_dir": str(tmp_path / "kv")}, {}, tmp_path / "none")
    client, rates = CLIENTS["codex"], ReadRates(100.0, 10_000.0)

    assert not launch._has_read(settings, tmp_path, SERVER)
    launch._note_read(tmp_path, SERVER)
    assert launch._has_read(settings, tmp_path, SERVER)
    assert not launch._has_read(settings, tmp_path, replace(SERVER, model="another"))
    cold, warm = (launch._price(client, rates, is_cached) for is_cached in (False, True))
    assert cold.endswith("is read once, in about 60 s, and comes from the cache later, in 600 ms")
    assert warm == "its own prompt of about 6,000 tokens comes from the cache, in 600 ms"
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "kvchat.cleared").touch()  # as `kvchat cache clear` leaves it
    assert not launch._has_read(settings, tmp_path, SERVER)


def test_a_clients_own_prompt_is_cached_once_a_session_has_read_it(tmp_path, monkeypatch, capsys):
    """Without --warm every session was told that the prompt is still to be read."""
    program = tmp_path / CLIENTS["codex"].program
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(launch, "started", lambda *_, **__: None)
    monkeypatch.setattr(launch, "facts_of", lambda server: SERVER)
    monkeypatch.setattr(launch, "_rates", lambda server: None)
    # What the server has computed for each session; the second asked nothing.
    counts = iter((5_900, 0, 6_400, 30))
    monkeypatch.setattr(launch, "num_computed", lambda server, name: next(counts))

    for _ in range(4):
        assert launch.launch("codex", [], {"model": "demo"}, is_warmed=False) == 0

    told = capsys.readouterr().err
    assert told.count("is read once, and comes from the cache later") == 3
    assert told.rstrip().endswith("its own prompt of about 6,000 tokens comes from the cache")


def test_a_servers_socket_is_the_users_alone(tmp_path, monkeypatch):
    """Whoever reaches it reads every conversation's beginning, and spends the machine's time."""
    path = tmp_path / "own" / "x.sock"
    private_socket(str(path)).close()  # leaves its file, as a server that was killed does
    with closing(private_socket(str(path))):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        require_own_socket(str(path))
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        with pytest.raises(PermissionError, match="no socket of yours"):
            require_own_socket(str(path))
        monkeypatch.undo()
    path.parent.chmod(0o755)
    with pytest.raises(UsageError, match="other users may enter"):
        private_socket(str(path))
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        require_own_socket(str(tmp_path / "file"))


def test_a_model_file_that_is_replaced_is_another_model(tmp_path: Path) -> None:
    """The chat went on with the weights of the file before."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    settings = resolve({"model": str(file)}, {}, tmp_path / "none")
    with announced(settings, tmp_path, Announcement("http://127.0.0.1:5", None)):
        assert running_server(settings, tmp_path) is not None
        (tmp_path / "new").write_bytes(b"two")
        (tmp_path / "new").replace(file)

        assert running_server(settings, tmp_path) is None
        stale = server_of(settings, tmp_path)

    assert stale is not None
    assert stale.is_stale


def test_models_kept_loaded_make_room_for_another(tmp_path, monkeypatch):
    """The oldest goes first, one that the user started never, and none where memory is left."""
    servers = [RunningServer(Address("", socket="x"), n, n, is_spare=n != 2) for n in (1, 2, 3, 4)]
    ended: list[int] = []
    monkeypatch.setattr(background, "all_servers", lambda state: servers)
    monkeypatch.setattr(background, "_health", lambda server: "ok")
    monkeypatch.setattr(background, "end", lambda server: ended.append(server.pid))
    monkeypatch.setattr(background, "_available_bytes", lambda: 1000.0 * (1 + len(ended)))
    model = tmp_path / "m.gguf"
    for num_bytes in (600, 1800):
        model.write_bytes(bytes(num_bytes))
        settings = resolve({"model": str(model)}, {}, tmp_path / "none")
        background._make_room(settings, tmp_path, lambda sentence: None)
        assert ended == ([] if num_bytes == 600 else [1, 3])


@pytest.mark.parametrize(
    ("flags", "is_terminal", "input_format", "minutes"),
    [
        ({}, True, "text", 10.0),
        ({}, False, "text", None),  # a scheduled job leaves nothing behind
        ({}, True, "lines", None),
        ({"keep_alive": "3"}, False, "jsonl", 3.0),
        ({"keep_alive": "0"}, True, "text", None),
        ({"incognito": True, "keep_alive": "3"}, True, "text", None),
        ({"kv_budget": "25%"}, True, "text", None),  # a server drops no KV
        ({"endpoint": "http://h:1"}, True, "text", None),
        ({"model": "demo"}, True, "text", None),
        ({"timeout": "5"}, True, "text", None),
    ],
)
def test_a_prompts_model_stays_for_a_user_who_may_ask_again(
    flags: dict[str, Any],
    is_terminal: bool,
    input_format: str,
    minutes: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[float | None] = []
    monkeypatch.setattr(background, "started", lambda settings, stays, tell: kept.append(stays))
    monkeypatch.setattr(chat, "_is_terminal", lambda stream: is_terminal)
    settings = resolve({"model": "/models/m.gguf", **flags}, {}, Path("/nonexistent"))

    chat._keep_alive(settings, chat.ChatRequest(input_format=input_format), Notices(True))

    assert kept == ([] if minutes is None else [minutes])


@pytest.mark.parametrize(("flags", "num_told"), [({}, 0), ({"keep_alive": "3"}, 1)])
def test_a_server_that_cannot_start_is_told_where_one_was_asked_for(
    flags: dict[str, Any],
    num_told: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The prompt is answered without it: in a home that is read-only a line each time is noise."""

    def refuse(*given: object) -> None:
        raise StoreError("Cannot use the directory.")

    monkeypatch.setattr(background, "started", refuse)
    monkeypatch.setattr(chat, "_is_terminal", lambda stream: True)
    settings = resolve({"model": "/models/m.gguf", **flags}, {}, Path("/nonexistent"))

    chat._keep_alive(settings, chat.ChatRequest(), Notices(False))

    assert capsys.readouterr().err.count("Cannot use the directory.") == num_told


def test_a_client_starts_a_server_that_prompts_use_until_it_is_stopped(shell, tiny, monkeypatch):
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
    assert answer["model"]["device"].endswith(" on cpu")
    profile = imported.stderr.decode()
    modules = {line.rpartition("|")[2].strip() for line in profile.splitlines() if "|" in line}
    assert "kvchat.remote.local_client" in modules
    assert modules & NOT_IMPORTED == set()
    assert stopped.stdout == b"The server is stopped.\n"
    assert shell.run("ps").stdout == b"No server of yours runs here.\n"
    files = list((shell.home / ".local/state/kvchat").rglob("*"))
    assert any(path.name == "keys.json" for path in files)
    assert all(stat.S_IMODE(path.stat().st_mode) in (0o600, 0o700) for path in files)


def test_a_context_that_a_clients_own_prompt_fills_is_refused(shell, tiny, monkeypatch):
    programs = shell.home / "programs"
    programs.mkdir()
    (programs / "codex").write_text("#!/bin/sh\n")
    (programs / "codex").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    done = shell.run("launch", "codex", "-m", tiny)

    assert shell.run("stop").returncode == 0
    assert done.returncode == 4
    assert b"Codex sends about 6,000 tokens before your first word" in done.stderr
