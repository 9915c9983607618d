"""Opens a shared tier as the settings say, over the store that a URL names."""

from kvchat.cache.shared.store import BUCKETS, SERVERS, Deadlines, SharedStore, scheme_of
from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import Layout
from kvchat.core.config import SharedConfig
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
    scheme = scheme_of(url)
    if scheme in SERVERS:
        from kvchat.cache.shared.valkey_store import ValkeyStore

        return ValkeyStore(url, deadlines)
    if scheme in BUCKETS:
        from kvchat.cache.shared.object_store import BucketStore

        return BucketStore(url, deadlines)
    from kvchat.cache.shared.mooncake_store import MooncakeStore

    return MooncakeStore(url, deadlines)
