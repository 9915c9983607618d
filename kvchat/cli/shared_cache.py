"""The shared cache as the settings say: its address, and the key from a file or a variable."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from kvchat.cli.settings import SHARED_KEY_VARIABLE, Settings
from kvchat.core.config import SharedConfig
from kvchat.core.errors import UnreadableFile, UsageError
from kvchat.core.paths import user_path
from kvchat.core.text import shown

_MOST_BYTES = 4096


def shared_config(settings: Settings, environment: Mapping[str, str]) -> SharedConfig | None:
    """Return the shared cache that the settings name; None for none, and for an incognito chat.

    Raises UsageError without a key, and UnreadableFile for a file that has none.
    """
    url = settings["shared_cache"]
    if not url and settings["prefill_at"] and not settings["incognito"]:
        raise UsageError(
            "--prefill-at needs a shared cache: KV comes through it.", "--shared-cache names one."
        )
    if not url or settings["incognito"]:
        return None
    from kvchat.cache.shared.store import scheme_of
    from kvchat.cache.shared.team_key import require_secret

    _require_packages(scheme_of(url))
    path = settings["shared_key_file"]
    secret = key_in(user_path(path)) if path else environment.get(SHARED_KEY_VARIABLE, "")
    if not secret:
        raise UsageError(
            "--shared-cache needs the team's key.",
            f"--shared-key-file or {SHARED_KEY_VARIABLE} has it; `openssl rand -hex 32` makes one.",
        )
    require_secret(secret)
    return SharedConfig(
        url,
        secret,
        takes_all=settings["share"] == "all",
        encrypts=settings["shared_encryption"],
        first_byte_s=settings["shared_deadline"] / 1e3,
        prefill_at=_web_address(settings["prefill_at"] or ""),
    )


def _web_address(url: str) -> str:
    """Return the address of a machine that prefills; raises UsageError for anything else."""
    parts = urlsplit(url)
    try:
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_one = False
    if url and not is_one:
        raise UsageError(f"--prefill-at is {shown(url)}, but must be http://HOST:PORT.")
    return url


def _require_packages(scheme: str) -> None:
    """Raise UsageError where a package is missing: an answer may end before its store is opened."""
    from kvchat.cache.shared.store import BUCKETS, POOLS, SERVERS
    from kvchat.cache.shared.team_key import missing_extra

    client = "valkey" if scheme in SERVERS else "obstore" if scheme in BUCKETS else "mooncake"
    for package in ("cryptography", client):
        if find_spec(package) is None:
            raise missing_extra(package, "mooncake" if scheme in POOLS else "shared")


def without_password(url: str) -> str:
    """Return an address as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def key_in(path: Path) -> str:
    """Return the key in a file: one line of text."""
    try:
        with path.expanduser().open("rb") as file:
            key = file.read(_MOST_BYTES).decode().strip()
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path} holds no text.") from error
    if not key or not key.isprintable():
        raise UsageError(f"{path} holds no key.", "It has to be one line of text.")
    return key
