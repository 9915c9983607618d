"""Opens a shared tier as the settings say, over the store that a URL names."""

from urllib.parse import urlsplit

from kvchat.cache.shared.store import Deadlines, SharedStore
from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import Layout
from kvchat.core.config import SharedConfig
from kvchat.core.errors import UsageError
from kvchat.core.types import Memory

# How long a record is of use, in seconds: 30 days, as unused KV on the disk.
_TTL_S = 30 * 86_400


def open_tier(shared: SharedConfig, layout: Layout, memory: Memory) -> SharedTier:
    """Return the shared tier of a layout. `memory` has what was forgotten of it.

    Raises UsageError where the settings name no store, or a package is missing.
    """
    key = TeamKey(shared.secret, layout, shared.encrypts)
    store = open_store(shared.url, Deadlines(shared.first_byte_s))
    return SharedTier(store, key, layout, _TTL_S, Tombstones(memory))


def open_store(url: str, deadlines: Deadlines) -> SharedStore:
    """Return the store that a URL names, without a connection yet.

    Raises UsageError for a URL that names none, or whose package is not installed.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("valkey", "valkeys", "redis", "rediss"):
        from kvchat.cache.shared.valkey_store import ValkeyStore

        return ValkeyStore(url, deadlines)
    if scheme in ("file", "s3", "gs", "az"):
        from kvchat.cache.shared.object_store import BucketStore

        return BucketStore(url, deadlines)
    if scheme == "mooncake":
        from kvchat.cache.shared.mooncake_store import MooncakeStore

        return MooncakeStore(url, deadlines)
    raise UsageError(
        f"{scheme or url}: is not the beginning of a shared cache's address.",
        "Give valkey://, redis://, rediss://, s3://, gs://, az://, mooncake:// or file://.",
    )
