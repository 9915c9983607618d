"""A device tier, host memory, and what moves KV between them, whose copies are done when told to
be.
"""

import time
from collections.abc import Callable, Sequence

import torch

from kvchat.cache.block_manager import BlockTable, CacheManager
from kvchat.cache.connector import KvConnector
from kvchat.cache.host_offload import HostOffload
from kvchat.cache.host_tier import HostTier
from kvchat.cache.kv_pool import KvFormat, KvGeometry, KvPool, LayerGeometry, PlainFormat
from kvchat.cache.rates import RateMemory
from kvchat.cache.transfer import TransferThread
from support.cached_contexts import CPU, assert_kv_is_right

PLAIN = PlainFormat()
GEOMETRIES = {
    "one layer": (LayerGeometry(1, 1, 1),),
    "keys wider than values": (LayerGeometry(1, 3, 2), LayerGeometry(1, 3, 2)),
    "layers that differ": (LayerGeometry(2, 1, 1), LayerGeometry(1, 4, 4)),
}


def new_offload(cache: CacheManager, num_blocks: int, connector: KvConnector | None) -> HostOffload:
    """Return a swap between a cache and host memory of its own, and of so many blocks."""
    geometry = cache.kv_pool.geometry
    limit = num_blocks * geometry.block_bytes
    host = HostTier(geometry.block_size, geometry.block_bytes, limit, is_pinned=False)
    transfer = connector.transfer if connector is not None else TransferThread(lambda: None, 0)
    return HostOffload(cache, host, transfer)


class LateThread:
    """A transfer thread that does nothing until a test steps it."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def copy(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def work(self, num_jobs: int = 1 << 30) -> None:
        for _ in range(min(num_jobs, len(self.jobs))):
            self.jobs.pop(0)()

    def close(self, timeout_s: float) -> None:
        self.work()


class Machine:
    """The parts, and what tests do to them."""

    def __init__(
        self,
        num_blocks: int = 12,
        num_slots: int = 64,
        layers: tuple[LayerGeometry, ...] = GEOMETRIES["one layer"],
        dtype: torch.dtype = torch.float32,
        memory: RateMemory | None = None,
        clock: Callable[[], float] = time.perf_counter,
        kv_format: KvFormat = PLAIN,
    ) -> None:
        geometry = KvGeometry(layers, dtype, 4, kv_format)
        self.manager = CacheManager(KvPool(geometry, num_blocks, CPU))
        self.host = HostTier(4, geometry.block_bytes, num_slots * geometry.block_bytes, False)
        self.thread = LateThread()
        self.offload = HostOffload(self.manager, self.host, self.thread, clock, memory)  # type: ignore[arg-type]

    def demote(self, num_blocks: int = 1 << 20) -> None:
        self.manager.evict_cold(num_blocks)
        self.settle()

    def settle(self) -> None:
        self.thread.work()
        self.offload.settle(may_demote=False)

    def promote(self, ids: Sequence[int]) -> int:
        """Bring a context up; return how many tokens came."""
        promotion = self.offload.begin([*ids, 0])
        if promotion is None:
            return 0
        while not promotion.is_over:
            self.settle()
        return promotion.num_tokens

    def held(self, ids: Sequence[int]) -> int:
        """Return how many tokens of a context the device has, all of them right."""
        table = self.manager.match([*ids, 0])
        assert_kv_is_right(self.manager, table, ids[: table.cached_len])
        self.manager.release(table, ids[: table.cached_len])
        return table.cached_len

    def check(self, tables: Sequence[BlockTable] = ()) -> None:
        self.manager.check([*tables, *self.offload.tables()])
        self.offload.check()
