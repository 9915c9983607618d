"""Opens a shared tier as the settings say, over the store that a URL names."""

from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.shared.store import (
    BUCKETS,
    SERVERS,
    Deadlines,
    SharedStore,
    StoreTrouble,
    scheme_of,
)
from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import DamagedRecord, Layout, PackHead
from kvchat.core.config import SharedConfig
from kvchat.core.types import NO_MEMORY, Memory

# How long a record is of use, in seconds: 30 days, as unused KV on the disk.
_TTL_S = 30 * 86_400
# Of a record that is written to see whether that is possible.
_TRIED = Layout(b"kvchat trial", 1, 16)


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


def try_store(shared: SharedConfig) -> float:
    """Write a record to a store, read it and remove it; return the seconds of a round trip.

    Raises StoreTrouble where that fails, and UsageError as `open_tier`.
    """
    tier = open_tier(shared, _TRIED, NO_MEMORY)
    ids, image = encode_ids([1]), bytes(_TRIED.block_bytes)
    keys = chain_keys(root_key(_TRIED.identity), ids, _TRIED.ids_bytes)
    try:
        is_written = tier.write(PackHead(root_key(_TRIED.identity), ids), memoryview(image))
        is_read = is_written and any(tier.read(run) == image for run in tier.find(keys, ids))
        tier.forget(keys)
    except DamagedRecord as damage:
        raise StoreTrouble(str(damage)) from damage
    finally:
        tier.close()
    if not is_read:
        raise StoreTrouble(tier.trouble or "what is written there does not come back")
    return tier.latency_s
