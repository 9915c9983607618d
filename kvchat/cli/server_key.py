"""The key that clients of `kvchat serve` must send, and whether one is needed.

On a machine that other people use, each of them may send requests to a loopback address: list
models, ask where text is cached, pin and forget. So there a key is needed by default. It is made
once, in a private file; the user's own chats find it with the server's address.
"""

import os
import pwd
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvchat.cli.settings import API_KEY_VARIABLE
from kvchat.cli.shared_cache import key_in
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.paths import open_private, private_directory, replace_private

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
