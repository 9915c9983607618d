"""The servers of this user on this machine: a chat of the same settings uses the engine of one.

Each leaves its address and key in a private file of the state directory while it runs. Then a model
is loaded once, and all share one cache.
"""

import asyncio
import hashlib
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
    from kvchat.remote.address import Address

_DIRECTORY = "servers"
_VERSION = 1
_SOCKET = ".sock"
_MOST_FILES = 1000
_PATIENCE_S = 30.0
# What decides which answers an engine gives, and which KV it keeps; _PLACES may be paths.
_PLACES = ("model", "adapter", "draft", "cache_dir")
_SAME = (
    *("spec", "device", "dtype", "weights", "kv_dtype", "block_size", "threads", "device_cache"),
    *("host_cache", "disk_cache", "shared_cache", "share", "prefill_at", "max_context", "cache"),
    "graphs",
)


# What a server takes of a process that starts it; how answers are generated is each client's own.
FOR_SERVERS = (*_PLACES, *_SAME, "model_dir", "shared_key_file", "shared_encryption")


# Variables of the environment that decide it too.
_VARIABLES = ("KVCHAT_CPU", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE")
# The path of a socket has at most 104 bytes on some systems, its end included.
_MOST_SOCKET_BYTES = 103


@dataclass(frozen=True, slots=True)
class Announcement:
    """How chats reach a server: by an address, a socket of this user, or both; "" for neither.

    is_spare   whether it was started in the background, and may be ended for another
    """

    url: str
    key: str | None
    socket: str = ""
    is_spare: bool = False


@contextmanager
def announced(settings: Settings, state: Path, place: Announcement) -> Iterator[None]:
    """Leave the address of a server for chats while it runs; nothing if it saves nothing."""
    if settings["incognito"]:
        yield
        return
    path, token = _record_path(settings, state), secrets.token_hex(8)
    content: dict[str, object] = {
        "url": place.url,
        "socket": place.socket,
        "key": place.key or "",
        "is_spare": place.is_spare,
        "model": settings["model"],
        "pid": os.getpid(),
        "born": _born(os.getpid()),
        "began": time.time(),
        "token": token,
        "files": _files(settings),
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

    `began_s` is since when it has computed KV, in seconds since the epoch. `is_spare` tells one
    that was started in the background, and `is_stale` one whose model's files have changed since.
    `model` is its model, as its settings name it.
    """

    address: "Address"
    pid: int
    began_s: float
    is_spare: bool = False
    is_stale: bool = False
    model: str = ""

    @property
    def is_suspended(self) -> bool:
        """Whether its process is stopped, by Ctrl-Z or a signal: it answers nothing."""
        return _state_of(self.pid)[:1] == [b"T"]

    @property
    def has_port(self) -> bool:
        """Whether other programs reach it, by an address of the network."""
        return bool(self.address.url)

    def has_ended(self) -> bool:
        return not _is_alive(self.pid)


def running_server(settings: Settings, state: Path) -> RunningServer | None:
    """Return the server that runs here with these settings and files; None if none does."""
    server = server_of(settings, state)
    return None if server is None or server.is_stale or server.is_suspended else server


def server_of(settings: Settings, state: Path) -> RunningServer | None:
    """Return the same, also where the model's files have changed since the server began."""
    found = read_state(_record_path(settings, state), _VERSION, "server")
    return _server_in(found, is_stale=bool(found) and found.get("files") != _files(settings))


def all_servers(state: Path) -> list[RunningServer]:
    """Return the servers that run here, the oldest first; forgets those that have ended."""
    servers = []
    for path in (state / _DIRECTORY).glob("*.json"):
        if (server := _server_in(read_state(path, _VERSION, "server"))) is not None:
            servers.append(server)
            continue
        with suppress(OSError):
            path.unlink()
            path.with_suffix(_SOCKET).unlink()
    return sorted(servers, key=lambda server: server.began_s)


def socket_path(settings: Settings, state: Path) -> str:
    """Return the path of the socket of a server with these settings, "" if it is too long."""
    path = str(_record_path(settings, state).with_suffix(_SOCKET))
    return path if len(os.fsencode(path)) <= _MOST_SOCKET_BYTES else ""


def drop_in_servers(state: Path) -> "DropFromMemory | None":
    """Return what has the servers that run here let go of KV; None without one.

    They write no KV of these contexts to the disk then. Raises GenerationError without an answer.
    """
    servers = all_servers(state)
    if not servers:
        return None

    def drop(contexts: list[tuple[list[int], int]]) -> None:
        from kvchat.remote.local_client import LocalClient
        from kvchat.remote.server_kv import ServerKv

        async def ask() -> None:
            for server in servers:
                client = LocalClient(server.address)
                await ServerKv(client, _PATIENCE_S).forget(contexts)

        asyncio.run(ask())

    return drop


def _record_path(settings: Settings, state: Path) -> Path:
    name = hashlib.sha256(_runs(settings).encode()).hexdigest()[:16]
    return state / _DIRECTORY / f"{name}.json"


def _server_in(found: Mapping[str, object], is_stale: bool = False) -> RunningServer | None:
    """Return the server of a record, None if it has ended or the record is none."""
    url, key, pid = found.get("url"), found.get("key"), found.get("pid")
    socket = found.get("socket")
    if not (isinstance(url, str) and isinstance(key, str) and isinstance(pid, int)):
        return None
    if not isinstance(socket, str) or not _is_alive(pid) or found.get("born") != _born(pid):
        return None
    from kvchat.remote.address import Address

    began = found.get("began")
    began_s = float(began) if isinstance(began, int | float) else time.time()
    address = Address(url, key, socket=socket)
    is_spare, model = found.get("is_spare") is True, str(found.get("model", ""))
    return RunningServer(address, pid, began_s, is_spare, is_stale, model)


def _runs(settings: Settings) -> str:
    """Return what must be equal, as text."""
    places = [settings[setting] for setting in _PLACES]
    known = [from_anywhere(place) if place is not None else None for place in places]
    variables = [os.environ.get(name) for name in _VARIABLES]
    return json.dumps([*known, *(settings[setting] for setting in _SAME), *variables])


def _files(settings: Settings) -> str:
    """Return what changes when the files of the model do, as text."""
    return json.dumps([_marks(settings[name]) for name in ("model", "adapter", "draft")])


def _marks(name: str | None) -> list[str]:
    """Return the marks of a model's files; of a name on the hub, its snapshot on this machine."""
    from kvchat.model.files.checkpoint_files import mark

    path = Path(from_anywhere(name or ""))
    with suppress(OSError, ValueError):
        if path.is_absolute():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            return [f"{file.name} {mark(file)}" for file in files[:_MOST_FILES]]
        if name and "/" in name:
            from kvchat.model.files.hub_cache import main_snapshot

            return [str(main_snapshot(name.partition(":")[0]))]
    return []


def _born(pid: int) -> str:
    """Return when a process began, as the system writes it: a number may be another's later.

    "" where it does not say, and for a process that has ended.
    """
    fields = _state_of(pid)
    return fields[19].decode() if len(fields) > 19 and fields[0] not in (b"Z", b"X") else ""


def _state_of(pid: int) -> list[bytes]:
    """Return what the system says of a process, its state first; nothing where it says nothing."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return True
