"""A chat uses the engine of a `kvchat serve` that runs with the same model and settings.

The server leaves its address and key in a private file of the state directory while it runs. Then
the model is loaded once, and both share one cache.
"""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.cli.settings import Settings
from kvchat.core.paths import from_anywhere, read_state, write_state

if TYPE_CHECKING:
    from kvchat.chat.deletion import DropFromMemory
    from kvchat.remote.servers import Address

_NAME = "server.json"
_VERSION = 1
_PATIENCE_S = 30.0
# What decides which answers an engine gives, and which KV it keeps; _PLACES may be paths.
_PLACES = ("model", "adapter", "draft", "cache_dir")
_SAME = (
    "spec",
    "device",
    "dtype",
    "weights",
    "kv_dtype",
    "block_size",
    "threads",
    "device_cache",
    "host_cache",
    "disk_cache",
    "max_context",
    "cache",
    "graphs",
)


@contextmanager
def announced(settings: Settings, state: Path, url: str, key: str | None) -> Iterator[None]:
    """Leave the address of a server for chats while it runs; nothing if it saves nothing."""
    if settings["incognito"]:
        yield
        return
    path, token = state / _NAME, secrets.token_hex(8)
    content: dict[str, object] = {
        "url": url,
        "key": key or "",
        "pid": os.getpid(),
        "began": time.time(),
        "token": token,
        "runs": _runs(settings),
    }
    write_state(path, _VERSION, "server", content)
    try:
        yield
    finally:
        # A server that was started later has written its own.
        if read_state(path, _VERSION, "server").get("token") == token:
            with suppress(OSError):
                path.unlink()


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this user on this machine. `pid` is its process.

    `began_s` is since when it has computed KV, in seconds since the epoch.
    """

    address: "Address"
    pid: int
    began_s: float

    def has_ended(self) -> bool:
        return not _is_alive(self.pid)


def running_server(settings: Settings, state: Path) -> RunningServer | None:
    """Return the server that runs here with these settings; None if none does."""
    found = read_state(state / _NAME, _VERSION, "server")
    return _server_of(found) if found.get("runs") == _runs(settings) else None


def drop_in_server(state: Path) -> "DropFromMemory | None":
    """Return what has the server that runs here, with any settings, let go of KV; None without one.

    It writes no KV of these contexts to the disk then. Raises GenerationError without an answer.
    """
    server = _server_of(read_state(state / _NAME, _VERSION, "server"))
    if server is None:
        return None

    def drop(contexts: list[tuple[list[int], int]]) -> None:
        from kvchat.remote.client import Client, ServerKv

        async def ask() -> None:
            client = Client(server.address)
            try:
                await ServerKv(client, _PATIENCE_S).forget(contexts)
            finally:
                await client.close()

        asyncio.run(ask())

    return drop


def _server_of(found: Mapping[str, object]) -> RunningServer | None:
    url, key, pid = found.get("url"), found.get("key"), found.get("pid")
    if not (isinstance(url, str) and isinstance(key, str) and isinstance(pid, int)):
        return None
    if not _is_alive(pid):
        return None
    from kvchat.remote.servers import address_of

    began = found.get("began")
    began_s = float(began) if isinstance(began, int | float) else time.time()
    return RunningServer(address_of(url, key), pid, began_s)


def _runs(settings: Settings) -> str:
    """Return what must be equal, as text."""
    places = [settings[setting] for setting in _PLACES]
    known = [from_anywhere(place) if place is not None else None for place in places]
    return json.dumps([*known, *(settings[setting] for setting in _SAME)])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return True
