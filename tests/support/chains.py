"""Chains of tiers for tests: host memory of so many blocks, and a tier behind it."""

import time
from collections.abc import Callable, Sequence

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.cache.host_tier import HostTier
from kvchat.cache.planner import Planner
from kvchat.cache.tier import Layout, Tier, TierOpener

NO_LAYOUT = Layout(bytes(16), 1, 1)


def host_opener(cache: CacheManager, num_blocks: int) -> TierOpener:
    geometry, device = cache.kv_pool.geometry, cache.kv_pool.device
    limit = num_blocks * geometry.block_bytes
    host = HostTier(geometry.block_size, geometry.block_bytes, limit, device)
    return TierOpener("host", lambda layout: host, is_quick=True)


def new_chain(
    cache: CacheManager,
    open_tier: Callable[[], Tier] | None = None,
    num_host_blocks: int = 0,
    planner: Planner | None = None,
    clock: Callable[[], float] = time.perf_counter,
    behind: Sequence[TierOpener] = (),
) -> KvChain:
    """Return a chain with host memory, unless that has no blocks, what `open_tier` opens as a disk,
    and what is `behind` them.
    """
    openers = [host_opener(cache, num_host_blocks)] if num_host_blocks else []
    if open_tier is not None:
        openers.append(TierOpener("disk", lambda layout: open_tier()))
    return KvChain(cache, [*openers, *behind], lambda: NO_LAYOUT, planner, clock)


def compute_at(chain: KvChain, tokens_per_s: float) -> None:
    """Have the planner believe that computing has this rate, whatever steps take."""

    def seconds(num_tokens: int, start: int = 0) -> float:
        return num_tokens / tokens_per_s

    chain.planner.seconds_to_compute = seconds  # type: ignore[method-assign]
    chain.planner.assumed_seconds = seconds  # type: ignore[method-assign]


def be_patient(chain: KvChain) -> None:
    """Have arrivals waited for without end: what a test sees must not hang on what else the machine
    does.
    """
    compute_at(chain, 1e-3)
