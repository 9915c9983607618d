"""A server in the background: started when it is needed, looked at, and ended.

It is `kvchat serve` on a socket of this user, or where other programs need it on a free port of
this machine's own address. It ends by itself when it was not used for `--keep-alive` minutes. Chats
of the same settings use its engine.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat.cli.build import user_paths
from kvchat.cli.lines import print_line
from kvchat.cli.model_names import short_name
from kvchat.cli.running_server import (
    FOR_SERVERS,
    RunningServer,
    all_servers,
    running_server,
    server_of,
    socket_path,
)
from kvchat.cli.settings import Settings
from kvchat.core.errors import KvchatError, ModelError
from kvchat.core.parameters import BY_NAME, Parameter
from kvchat.core.paths import Lock, open_private, private_directory, try_lock
from kvchat.core.text import format_age, format_bytes, one_line
from kvchat.remote.questions import Questions

_LOG, _LOCK = "server.log", "server.lock"
_LOOK_S, _ANSWER_S, _STARTING_S, _ENDING_S = 0.05, 5.0, 600.0, 20.0
_MOST_LOG_BYTES = 1 << 16
_KIB = 1024
# Memory that a model takes for each byte of its files, with its KV and what computes.
_ROOM = 1.5


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a running server says of itself.

    context   tokens that its context holds
    """

    url: str
    key: str
    model: str
    context: int


def started(
    settings: Settings, minutes: float, tell: Callable[[str], None], needs_port: bool = False
) -> RunningServer:
    """Return the server that runs with these settings, or start one and wait until it answers.

    minutes      how long a new one stays after its last use
    tell         takes a sentence where that takes time
    needs_port   whether other programs are to reach it: one in the background that has a socket
                 only is started again, as one whose model's files have changed

    Raises ModelError with what the server said if it ends.
    """
    state = user_paths().state
    with _starting(state):
        server = server_of(settings, state)
        is_right = server is not None and (server.has_port or not needs_port)
        if server is not None and is_right and not server.is_stale and (s := _health(server)):
            return server if s == "ok" else _wait(server.pid, server.has_ended, settings)
        if server is not None and server.is_spare and _health(server):
            end(server)
        _make_room(settings, state, tell)
        name, stays = one_line(short_name(settings["model"]), 64), f"{minutes:g} minutes"
        tell(f"loading {name}, which stays loaded for {stays} (kvchat stop ends that)")
        path = "" if needs_port else socket_path(settings, state)
        process = _start(settings, minutes, state, path)
        return _wait(process.pid, lambda: process.poll() is not None, settings)


@contextmanager
def _starting(state: Path) -> Iterator[None]:
    """Let one process at a time start a server; without locks all may."""
    private_directory(state)
    descriptor = open_private(state / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        end_s = time.monotonic() + _STARTING_S
        while try_lock(descriptor) is Lock.ANOTHERS and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _make_room(settings: Settings, state: Path, tell: Callable[[str], None]) -> None:
    """End servers in the background until a model's files fit beside them, the oldest first.

    The chats that use one go on: they load its model again.
    """
    needed = _ROOM * _file_bytes(settings["model"])
    for server in all_servers(state):
        if _available_bytes() > needed:
            return
        if server.is_spare and _health(server):
            tell("the model that was kept loaded makes room")
            end(server)


def _file_bytes(name: str) -> int:
    """Return the size of a model's file or directory, 0 of one that is elsewhere."""
    path = Path(name).expanduser()
    with suppress(OSError, RuntimeError):
        files = path.iterdir() if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    return 0


def _available_bytes() -> float:
    """Return the memory that a new process can have; without end where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(li.split()[1]) * _KIB for li in lines if li.startswith("MemAvailable:"))
    return math.inf


def _start(settings: Settings, minutes: float, state: Path, path: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "kvchat", "serve", "--name", "*"]
    command += [f"--socket={path}"] if path else ["--port", "0"]
    command += [f"--keep-alive={minutes}", *_arguments(settings)]
    descriptor = open_private(state / _LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(descriptor, "wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _arguments(settings: Settings) -> list[str]:
    """Return the flags of this process that a server takes, as its command line has them."""
    given = [BY_NAME[name] for name in FOR_SERVERS if settings.is_flag(name)]
    return [text for parameter in given for text in _flags(parameter, settings[parameter.name])]


def _flags(parameter: Parameter, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [parameter.flag if value else f"--no-{parameter.dashed}"]
    texts = value if isinstance(value, tuple) else (value,)
    return [f"{parameter.flag}={text}" for text in texts]


def _wait(pid: int, has_ended: Callable[[], bool], settings: Settings) -> RunningServer:
    """Wait until the server of a process answers; raises ModelError if it does not."""
    state = user_paths().state
    end_s = time.monotonic() + _STARTING_S
    while not has_ended() and time.monotonic() < end_s:
        server = running_server(settings, state)
        if server is not None and server.pid == pid and _health(server) == "ok":
            return server
        time.sleep(_LOOK_S)
    raise ModelError(f"The server did not start: {_last_words(state)}", "kvchat stop ends it.")


def _last_words(state: Path) -> str:
    with suppress(OSError, KvchatError):
        descriptor = open_private(state / _LOG, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as log:
            lines = log.read(_MOST_LOG_BYTES).decode(errors="replace").split("\n")
        words = [line.removeprefix("kvchat: ") for line in lines if line.strip()]
        if words:
            return one_line(words[-1], 300)
    return f"{state / _LOG} says nothing."


# Asking it


def _get(server: RunningServer, path: str) -> dict[str, Any] | None:
    """Return what a server answers to a GET, None if it does not answer with an object."""
    questions = Questions(server.address, _ANSWER_S)
    try:
        return questions.ask(path)[1]
    except OSError:
        return None
    finally:
        questions.close()


def _health(server: RunningServer) -> str:
    """Return a server's word on itself, "" if it does not answer."""
    if server.is_suspended:
        return ""
    return str((_get(server, "/health") or {}).get("status", ""))


def facts_of(server: RunningServer) -> ServerFacts:
    """Return what a server says of itself; raises ModelError if it does not answer."""
    models = (_get(server, "/v1/models") or {}).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise ModelError("The server that runs here does not answer.", "kvchat stop ends it.")
    model, context = models[0].get("id"), models[0].get("context_length")
    if not isinstance(model, str) or not isinstance(context, int):
        raise ModelError("The server that runs here is still loading its model.")
    return ServerFacts(server.address.url, server.address.key, model, context)


def num_computed(server: RunningServer, client: str) -> int:
    """Return how many tokens a server has computed for a client of a name; 0 if it does not say."""
    told = (_get(server, f"{client_path(client)}/health") or {}).get("computed_tokens")
    return told if isinstance(told, int) else 0


def client_path(name: str) -> str:
    """Return what begins the paths of a client, so that the server knows it by a name."""
    return f"/as/{name}"


# `kvchat ps` and `kvchat stop`


def show() -> None:
    """Print the servers that run here: model, address, memory, age, and for how long they stay."""
    servers = all_servers(user_paths().state)
    if not servers:
        print_line("No server of yours runs here.")
    for server in servers:
        is_suspended = server.is_suspended
        told = {} if is_suspended else _get(server, "/health") or {}
        silent = "suspended" if is_suspended else "does not answer"
        status = str(told.get("status") or silent)
        memory = _memory_bytes(server.pid)
        size = f"  {format_bytes(memory)}" if memory else ""
        left = told.get("ends_in_s")
        stays = f"  stays {max(1, round(left / 60))} min" if isinstance(left, int | float) else ""
        place = server.address.url or "here"
        age = format_age(time.time() - server.began_s)
        name = told.get("model") or one_line(short_name(server.model), 64) or "?"
        print_line(f"{name}  {place}  {status}{size}  started {age}{stays}  pid {server.pid}")


def stop() -> None:
    """End the servers that run here, and wait for that."""
    servers = all_servers(user_paths().state)
    if not servers:
        print_line("No server of yours runs here.")
    for server in servers:
        if server.is_suspended:
            sentence = f"Process {server.pid} is suspended, and cannot stop itself."
            raise ModelError(sentence, f"kill -CONT {server.pid} lets it go on.")
        if not _health(server):  # the process of that number may be another one meanwhile
            sentence = f"Process {server.pid} does not answer as a server: it is left alone."
            raise ModelError(sentence)
        end(server)
        has_ended = server.has_ended()
        print_line("The server is stopped." if has_ended else "The server is still stopping.")


def end(server: RunningServer) -> None:
    """End a server that has answered, and wait for that; it may take longer."""
    with suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)
    end_s = time.monotonic() + _ENDING_S
    while not server.has_ended() and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def _memory_bytes(pid: int) -> int:
    """Return the memory that a process holds, 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes = [int(line.split()[1]) * _KIB for line in lines if line.startswith("VmRSS:")]
        return sum(sizes)
    return 0
