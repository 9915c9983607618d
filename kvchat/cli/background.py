"""A server in the background: started when it is needed, looked at, and ended.

It is `kvchat serve` on a free port of this machine's own address, and ends by itself when it was
not used for `--keep-alive` minutes. Chats of the same settings use its engine.
"""

import http.client
import json
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
from urllib.parse import urlsplit

from kvchat.cli.build import user_paths
from kvchat.cli.running_server import FOR_SERVERS, RunningServer, any_server, running_server
from kvchat.cli.settings import Settings
from kvchat.core.errors import KvchatError, ModelError
from kvchat.core.parameters import BY_NAME, Parameter
from kvchat.core.paths import Lock, open_private, private_directory, try_lock
from kvchat.core.text import format_age, format_bytes, one_line, sanitize

_LOG, _LOCK = "server.log", "server.lock"
_LOOK_S, _ANSWER_S, _STARTING_S, _ENDING_S = 0.05, 5.0, 600.0, 20.0
_MOST_LOG_BYTES = 1 << 16
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a running server says of itself.

    context   tokens that its context holds
    """

    url: str
    key: str
    model: str
    context: int


def started(settings: Settings, minutes: float, tell: Callable[[str], None]) -> RunningServer:
    """Return the server that runs with these settings, or start one and wait until it answers.

    minutes   how long a new one stays after its last use
    tell      takes a sentence where that takes time

    Raises ModelError with what the server said if it ends.
    """
    state = user_paths().state
    with _starting(state):
        server = running_server(settings, state)
        if server is not None and (status := _health(server)):
            return server if status == "ok" else _wait(server.pid, server.has_ended, settings)
        tell(f"starting a server for {one_line(settings['model'], 64)} in the background")
        process = _start(settings, minutes, state)
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


def _start(settings: Settings, minutes: float, state: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "kvchat", "serve", "--port", "0", "--name", "*"]
    command += [f"--keep-alive={minutes}", *_arguments(settings)]
    descriptor = open_private(state / _LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(descriptor, "wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
    place = urlsplit(server.address.url)
    headers = {"Authorization": f"Bearer {server.address.key}"} if server.address.key else {}
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_ANSWER_S)
    try:
        connection.request("GET", path, headers=headers)
        read = json.loads(connection.getresponse().read(_MOST_LOG_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return read if isinstance(read, dict) else None


def _health(server: RunningServer) -> str:
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


# `kvchat ps` and `kvchat stop`


def show() -> None:
    """Print the server that runs here: its model, address, memory and age."""
    server = any_server(user_paths().state)
    if server is None:
        _print("No server of yours runs here.")
        return
    status = _health(server) or "does not answer"
    models = (_get(server, "/v1/models") or {}).get("data") or [{}]
    memory = _memory_bytes(server.pid)
    size = f"  {format_bytes(memory)}" if memory else ""
    age = format_age(time.time() - server.began_s)
    name = models[0].get("id", "?")
    _print(f"{name}  {server.address.url}  {status}{size}  started {age}  pid {server.pid}")


def stop() -> None:
    """End the server that runs here, and wait for that."""
    server = any_server(user_paths().state)
    if server is None:
        _print("No server of yours runs here.")
        return
    if not _health(server):  # the process of that number may be another one meanwhile
        raise ModelError(f"Process {server.pid} does not answer as a server: it is left alone.")
    os.kill(server.pid, signal.SIGTERM)
    end_s = time.monotonic() + _ENDING_S
    while not server.has_ended() and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    _print("The server is stopped." if server.has_ended() else "The server is still stopping.")


def _memory_bytes(pid: int) -> int:
    """Return the memory that a process holds, 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes = [int(line.split()[1]) * _KIB for line in lines if line.startswith("VmRSS:")]
        return sum(sizes)
    return 0


def _print(line: str) -> None:
    sys.stdout.write(f"{sanitize(line)}\n")
