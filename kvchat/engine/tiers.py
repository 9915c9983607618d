"""Opens the tiers of a model's KV: which there are by the settings, in order, and what they store.

A further tier is one more opener in `tier_openers`.
"""

import math
from collections.abc import Callable, Mapping

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.lookup import KnownModel, KnownModels
from kvchat.cache.disk.model_dirs import is_ours
from kvchat.cache.disk.quota import disk_budget, least_bytes, why_nothing_fits
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.host_tier import HostTier
from kvchat.cache.keys import root_key
from kvchat.cache.kv_conversion import ConvertingTier
from kvchat.cache.kv_pool import KvGeometry, KvPool
from kvchat.cache.planner import Planner, PrefillRate, RateMemory
from kvchat.cache.tier import Layout, Tier, TierOpener
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.config import CacheConfig
from kvchat.core.errors import StoreError
from kvchat.core.paths import private_directory
from kvchat.core.stats import kv_form
from kvchat.core.text import format_bytes
from kvchat.core.types import CONVERTED_FROM, ELSEWHERE, Memory
from kvchat.engine.kv_storage import (
    finer_geometries,
    host_budget,
    kv_identity,
)
from kvchat.model.checkpoint.identity import content_digest
from kvchat.model.device import device_name, dtype_name
from kvchat.model.loader import LoadedModel
from kvchat.model.spec import ModelSpec


def new_chain(
    loaded: LoadedModel,
    cache: CacheManager,
    config: CacheConfig,
    memory: Memory,
    is_draft: bool = False,
) -> KvChain:
    """Return the chain of the configured tiers; it has none if no KV is to be kept."""
    geometry = cache.kv_pool.geometry
    form = kv_form(
        dtype_name(loaded.dtype),
        geometry.dtype_beside(loaded.dtype),
        chosen_weights(loaded),
        geometry.block_size,
    )
    openers = tier_openers(config, cache, memory, is_draft, form) if config.reuse else []

    def layout() -> Layout:
        digest = content_digest(loaded.source, memory)
        if loaded.source.marks() != loaded.marks:
            raise StoreError(
                f"The files of {loaded.source.name} changed after they were loaded.",
                "Start kvchat again.",
            )
        kv_pool = cache.kv_pool
        windows = kv_pool.windows if isinstance(kv_pool, WindowedKvPool) else None
        identity = kv_identity(loaded, geometry, digest, windows)
        KnownModels(memory).note(
            identity.hex(),
            KnownModel(
                loaded.source.name,
                rate_subject(loaded),
                geometry.block_size,
                geometry.block_bytes,
                is_draft,
                geometry.dtype_beside(loaded.dtype),
                dtype_name(loaded.dtype),
                chosen_weights(loaded),
                loaded.asked_weights,
            ),
        )
        finer = tuple(
            Layout(kv_identity(loaded, each, digest, windows), each.block_size, each.block_bytes)
            for each in finer_geometries(geometry).values()
        )
        return Layout(identity, geometry.block_size, geometry.block_bytes, finer)

    rate = PrefillRate(rate_memory(loaded, memory), half_context(loaded.spec))
    planner = Planner(rate, rate_memory(loaded, memory))
    return KvChain(cache, openers, layout, planner)


def tier_openers(
    config: CacheConfig,
    cache: CacheManager,
    memory: Memory,
    is_draft: bool,
    form: Mapping[str, str] | None = None,
) -> list[TierOpener]:
    """Return what opens the configured tiers, the fastest first; `form` tells the form of KV."""
    kv_pool = cache.kv_pool
    openers = [
        _host_opener(config, kv_pool, is_draft),
        _disk_opener(config, kv_pool.geometry.block_bytes, is_draft),
        *_finer_openers(config, cache),
        _shared_opener(config, cache.has_state, memory) if not is_draft else None,
        _elsewhere_opener(config, cache, memory, form or {}) if not is_draft else None,
    ]
    return [opener for opener in openers if opener is not None]


def _host_opener(config: CacheConfig, kv_pool: KvPool, is_draft: bool) -> TierOpener | None:
    """Return what opens host memory; None if it is off or its budget is too small. A draft model
    has none: its KV is small.
    """
    limit, geometry = host_budget(config, kv_pool.device), kv_pool.geometry
    if is_draft or limit < geometry.block_bytes:
        return None

    def open_host(layout: Callable[[], Layout]) -> HostTier:
        return HostTier(geometry.block_size, geometry.block_bytes, limit, kv_pool.device)

    return TierOpener("host", open_host, is_quick=True)


def _disk_opener(config: CacheConfig, block_bytes: int, is_draft: bool) -> TierOpener | None:
    directory = config.directory
    if directory is None:
        return None
    limit = disk_budget(config.disk_bytes, directory)
    why_nothing = why_nothing_fits(config.disk_bytes, directory)
    if limit == 0 and not why_nothing:
        return None

    def open_disk(layout: Callable[[], Layout]) -> DiskTier:
        least = least_bytes(block_bytes)
        if limit < least:
            if config.disk_bytes is None or config.disk_bytes.num_bytes is None:
                private_directory(directory)  # where nothing can be written, that is the reason
                # The user set no byte limit, so the disk is full for now: keep what is stored.
                raise StoreError(why_nothing, "Free some, or choose another with --cache-dir.")
            StoreAdmin(directory).clear()  # the limit applies to stored KV too
            raise StoreError(
                f"--disk-cache allows only {format_bytes(limit)}, too little for KV.",
                f"Raise it to {format_bytes(least)} at least.",
            )
        return DiskTier(directory, layout(), limit, is_draft=is_draft)

    return TierOpener("disk", open_disk)


def _finer_openers(config: CacheConfig, cache: CacheManager) -> list[TierOpener]:
    """Return what opens the disk's KV of the same model in more bits, where there is some."""
    directory, geometry = config.directory, cache.kv_pool.geometry
    limit = disk_budget(config.disk_bytes, directory) if directory is not None else 0
    if directory is None or not limit:
        return []

    def opener(number: int, name: str, finer: KvGeometry) -> TierOpener:
        def open_finer(layout: Callable[[], Layout]) -> ConvertingTier | None:
            own = layout().finer[number]
            if not is_ours(directory / own.identity.hex()):
                return None
            stored = DiskTier(directory, own, limit)
            return ConvertingTier(stored, finer, geometry, cache.state_bytes)

        return TierOpener(f"{CONVERTED_FROM}{name}", open_finer, is_only_read=True)

    return [opener(n, *each) for n, each in enumerate(finer_geometries(geometry).items())]


def _shared_opener(config: CacheConfig, has_state: bool, memory: Memory) -> TierOpener | None:
    """Return what opens the store that other machines reach too; None where none is named."""
    shared = config.shared
    if shared is None:
        return None

    def open_shared(layout: Callable[[], Layout]) -> Tier:
        if has_state:
            raise StoreError("Models with recurrent layers do not use the shared cache.")
        from kvchat.cache.shared.opening import open_tier

        return open_tier(shared, layout(), memory)

    return TierOpener("shared", open_shared, is_shared=True, takes_all=shared.takes_all)


def _elsewhere_opener(
    config: CacheConfig, cache: CacheManager, memory: Memory, form: Mapping[str, str]
) -> TierOpener | None:
    """Return what opens KV that another machine computes; None where none is named.

    It may be of the same model in more bits: it is converted, as the disk's is.
    """
    shared = config.shared
    if shared is None or not shared.prefill_at or cache.has_state:
        return None
    geometry = cache.kv_pool.geometry

    def open_elsewhere(layout: Callable[[], Layout]) -> Tier:
        from kvchat.cache.shared.elsewhere import ElsewhereTier
        from kvchat.cache.shared.opening import open_tier
        from kvchat.cache.shared.prefill_box import PrefillBox

        own = layout()

        def records_of(root: bytes) -> Tier | None:
            if root == root_key(own.identity):
                return open_tier(shared, own, memory)
            for finer, of in zip(own.finer, finer_geometries(geometry).values(), strict=True):
                if root == root_key(finer.identity):
                    return ConvertingTier(open_tier(shared, finer, memory), of, geometry)
            return None

        box = PrefillBox(shared.prefill_at, shared.secret)
        return ElsewhereTier(box, records_of, root_key(own.identity), form)

    return TierOpener(
        ELSEWHERE, open_elsewhere, is_only_read=True, takes_all=shared.takes_all, computes=True
    )


def rate_memory(loaded: LoadedModel, memory: Memory) -> RateMemory:
    """Return the memory of how fast this machine computes, reads and copies a model's KV."""
    return RateMemory(memory, rate_subject(loaded))


def rate_subject(loaded: LoadedModel) -> str:
    """Return the name of a model's rates on its device."""
    return f"{loaded.identity} {dtype_name(loaded.dtype)} {device_name(loaded.device)}"


def half_context(spec: ModelSpec) -> float:
    """Return after how many tokens of context attention has as many multiply-adds as all else."""
    # 0.4b shape, bfloat16, two cores of an Intel Xeon: 6.0 ms a token at the beginning of a prompt,
    # 8.3 ms after 3,200 tokens. This says 6.0 and 8.5.
    whole = [x for x in spec.layers if x.span.window is None and x.span.chunk is None]
    pairs = sum(x.num_heads * (x.key_dim + x.value_dim) for x in whole)
    return spec.num_parameters / pairs if pairs else math.inf


def chosen_weights(loaded: LoadedModel) -> str:
    """Return the form of a model's weights; "" for a model that has no other."""
    return loaded.weights if loaded.has_choice_of_weights else ""
