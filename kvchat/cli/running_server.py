"""The address and key of a `kvchat serve` that runs: a chat of the same model uses its engine.

The server leaves its address and key in a private file of the state directory while it runs. Then
the model is loaded once, and both share one cache.
"""

import asyncio
import json
import os
import pwd
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.cli.settings import API_KEY_VARIABLE, Settings
from kvchat.cli.shared_cache import key_in
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.paths import (
    from_anywhere,
    open_private,
    private_directory,
    read_state,
    replace_private,
    write_state,
)

if TYPE_CHECKING:
    from kvchat.chat.deletion import DropFromMemory
    from kvchat.remote.address import Address

_RECORD = "server.json"
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
    "shared_cache",
    "share",
    "prefill_at",
    "max_context",
    "cache",
    "graphs",
)


# What a server takes of a process that starts it; how answers are generated is each client's own.
FOR_SERVERS = (*_PLACES, *_SAME, "model_dir", "shared_key_file", "shared_encryption")


@contextmanager
def announced(settings: Settings, state: Path, url: str, key: str | None) -> Iterator[None]:
    """Leave the address of a server for chats while it runs; nothing if it saves nothing."""
    if settings["incognito"]:
        yield
        return
    path, token = state / _RECORD, secrets.token_hex(8)
    content: dict[str, object] = {
        "url": url,
        "key": key or "",
        "pid": os.getpid(),
        "born": _born(os.getpid()),
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
    found = read_state(state / _RECORD, _VERSION, "server")
    return _server_of(found) if found.get("runs") == _runs(settings) else None


def any_server(state: Path) -> RunningServer | None:
    """Return the server that runs here, with any settings; None if none does."""
    return _server_of(read_state(state / _RECORD, _VERSION, "server"))


def drop_in_server(state: Path) -> "DropFromMemory | None":
    """Return what has the server that runs here, with any settings, let go of KV; None without one.

    It writes no KV of these contexts to the disk then. Raises GenerationError without an answer.
    """
    server = any_server(state)
    if server is None:
        return None

    def drop(contexts: list[tuple[list[int], int]]) -> None:
        from kvchat.remote.local_client import LocalClient
        from kvchat.remote.server_kv import ServerKv

        async def ask() -> None:
            client = LocalClient(server.address)
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
    if not _is_alive(pid) or found.get("born") != _born(pid):
        return None
    from kvchat.remote.address import address_of

    began = found.get("began")
    began_s = float(began) if isinstance(began, int | float) else time.time()
    return RunningServer(address_of(url, key), pid, began_s)


def _runs(settings: Settings) -> str:
    """Return what must be equal, as text."""
    places = [settings[setting] for setting in _PLACES]
    known = [from_anywhere(place) if place is not None else None for place in places]
    return json.dumps([*known, *(settings[setting] for setting in _SAME)])


def _born(pid: int) -> str:
    """Return when a process began, as the system writes it: a number may be another's later.

    "" where it does not say, and for a process that has ended.
    """
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[19].decode() if fields[0] not in (b"Z", b"X") else ""
    return ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return True


# On a machine that other people use, each of them may send requests to a loopback address: list
# models, ask where text is cached, pin and forget. So there a key is needed by default. It is made
# once, in a private file; the user's own chats find it with the server's address.

_KEY_NAME = "serve.key"
_REASON = "other people use this machine, so requests need a key"
_MOST_BYTES = 4096
_FIRST_PERSON = 501 if sys.platform == "darwin" else 1000  # the system's have lower numbers
_NOBODY = 65534
_NO_SHELLS = ("nologin", "false", "sync", "shutdown", "halt")
_SKELETON = Path("/etc/skel")
_PROCESSES = Path("/proc")


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """Where the key comes from: `given` on the command line, or in `file`; `is_open` wants none."""

    given: str | None = None
    file: Path | None = None
    is_open: bool = False


def server_key(
    request: KeyRequest,
    environment: Mapping[str, str],
    is_local: bool,
    state: Path | None,
    tell: Callable[[str], None],
    is_shared: Callable[[], bool],
    is_seen_by_user_only: bool = True,
) -> str | None:
    """Return the key that clients must send, None for none.

    is_local    whether the server is reached from this machine alone
    state       where a key that is made is kept; None keeps none
    tell        takes a sentence for the user
    is_shared   says whether other people use this machine
    is_seen_by_user_only   whether `tell` writes to a terminal, and not to a log that stays

    Raises UsageError where a key is needed and none is given, UnreadableFile for its file.
    """
    if request.given is not None and request.file is not None:
        raise UsageError("--api-key and --api-key-file are both given.", "Give one of them.")
    if request.file is not None:
        return key_in(request.file)
    if request.given:
        tell(
            "every user of this machine sees --api-key in the list of processes; "
            f"--api-key-file or {API_KEY_VARIABLE} hide it."
        )
        return request.given
    if request.is_open and is_local:
        return None
    if key := environment.get(API_KEY_VARIABLE):
        return key
    if not is_local:
        raise UsageError(
            "The address can be reached from other machines, so a key is needed.",
            f"Set {API_KEY_VARIABLE}, for instance to {secrets.token_urlsafe(24)}.",
        )
    if not is_shared():
        return None
    key = secrets.token_urlsafe(24)
    if state is not None and (kept := _own_key(state, key)) is not None:
        tell(f"{_REASON}: it is in {state / _KEY_NAME} (--no-api-key lets everybody in)")
        return kept
    if not is_seen_by_user_only:
        raise UsageError(
            f"{_REASON[0].upper()}{_REASON[1:]}, and one that is made is kept nowhere.",
            f"Give one: --api-key-file or {API_KEY_VARIABLE}; --no-api-key lets everybody in.",
        )
    tell(f"{_REASON}: {key} (it is kept nowhere; --no-api-key lets everybody in)")
    return key


def _own_key(state: Path, new_key: str) -> str | None:
    """Return the key that was made before, or keep a new one; None where that is not possible."""
    path = state / _KEY_NAME
    try:
        key = _kept_key(path) or new_key
        private_directory(state)
        replace_private(path, f"{key}\n".encode())
    except (StoreError, OSError):
        return None
    return key


def _kept_key(path: Path) -> str:
    if not path.exists():
        return ""
    with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
        key = file.read(_MOST_BYTES).decode(errors="replace").strip()
    return key if key.isprintable() else ""


def is_used_by_others() -> bool:
    """Return whether other people seem to use this machine."""
    skeleton = {entry.name for entry in _entries(_SKELETON) or ()}
    active = {info for info in map(_owner, _entries(_PROCESSES) or ()) if info is not None}
    accounts = {account.pw_uid: account for account in pwd.getpwall()}
    for user_id in active - set(accounts):  # a directory of users may not list them all
        try:
            accounts[user_id] = pwd.getpwuid(user_id)
        except KeyError:
            continue
    return has_other_people(accounts.values(), os.getuid(), active, skeleton)


def has_other_people(
    accounts: Iterable[pwd.struct_passwd],
    own: int,
    active: Collection[int],
    skeleton: Collection[str],
) -> bool:
    """Return whether one of these accounts is another person's.

    active     the users that run something
    skeleton   the names that every new home has: systems come with accounts that were never used
    """
    people = (
        account
        for account in accounts
        if account.pw_uid >= _FIRST_PERSON
        and account.pw_uid not in (own, _NOBODY)
        and Path(account.pw_shell).name not in _NO_SHELLS
    )
    return any(
        account.pw_uid in active or _is_used(Path(account.pw_dir), account.pw_uid, skeleton)
        for account in people
    )


def _is_used(home: Path, user_id: int, skeleton: Collection[str]) -> bool:
    """Whether a home is its user's own, and has more in it than every new one."""
    try:
        if home.stat().st_uid != user_id:
            return False
    except OSError:
        return False
    entries = _entries(home)
    return entries is None or any(entry.name not in skeleton for entry in entries)


def _entries(directory: Path) -> list[Path] | None:
    """Return what is in a directory, None if that is hidden from this user."""
    try:
        return list(directory.iterdir())
    except PermissionError:
        return None
    except OSError:
        return []


def _owner(process: Path) -> int | None:
    try:
        return process.stat().st_uid if process.name.isdigit() else None
    except OSError:
        return None
