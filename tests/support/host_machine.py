"""A device tier, host memory, and what moves KV between them, whose copies are done when told to
be.
"""

import time
from collections.abc import Callable, Sequence

import torch

from kvchat.cache.arrivals import Arrival
from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.chain import KvChain
from kvchat.cache.kv_pool import KvFormat, KvGeometry, KvPool, LayerGeometry, PlainFormat
from kvchat.cache.planner import Planner, PrefillRate, RateMemory
from kvchat.cache.tier import Tier
from support.cached_contexts import CPU, assert_kv_is_right
from support.chains import host_opener

PLAIN = PlainFormat()
GEOMETRIES = {
    "one layer": (LayerGeometry(1, 1, 1),),
    "keys wider than values": (LayerGeometry(1, 3, 2), LayerGeometry(1, 3, 2)),
    "layers that differ": (LayerGeometry(2, 1, 1), LayerGeometry(1, 4, 4)),
}


class LateThread:
    """A transfer thread that does nothing until a test steps it."""

    is_without_tier = False
    failure = None

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.jobs: list[Callable[[], object]] = []

    def copy(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def restore(self, job: Callable[[Tier], object]) -> None:
        self.jobs.append(lambda: job(self.tier))

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
        self.planner = Planner(PrefillRate(memory), memory)
        opener = host_opener(self.manager, num_slots)
        self.chain = KvChain(self.manager, [opener], planner=self.planner, clock=clock)
        self.arrivals = self.chain.arrivals
        assert self.chain.demoter is not None
        self.demoter, [link] = self.chain.demoter, self.chain.links
        self.host = self.demoter.host
        link.thread.close(60.0)
        self.thread = LateThread(self.host)
        link.thread = self.demoter._thread = self.thread  # type: ignore[assignment]

    def demote(self, num_blocks: int = 1 << 20) -> None:
        self.manager.evict_cold(num_blocks)
        self.settle()

    def settle(self) -> None:
        self.thread.work()
        self.arrivals.settle()

    def begin(self, ids: Sequence[int]) -> Arrival | None:
        """Begin to promote a prompt; None if nothing is promoted."""
        return self.arrivals.begin_quick(ids, None)

    def promote(self, ids: Sequence[int]) -> int:
        """Bring a context up; return how many tokens came."""
        arrival = self.begin([*ids, 0])
        if arrival is None:
            return 0
        while not arrival.is_over:
            self.settle()
        return arrival.num_tokens

    def held(self, ids: Sequence[int]) -> int:
        """Return how many tokens of a context the device has, all of them right."""
        table = self.manager.match([*ids, 0])
        assert_kv_is_right(self.manager, table, ids[: table.cached_len])
        self.manager.release(table, ids[: table.cached_len])
        return table.cached_len

    def check(self, tables: Sequence[BlockTable] = ()) -> None:
        self.manager.check([*tables, *self.chain.tables()])
        self.chain.check()
