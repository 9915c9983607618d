"""How fast KV is demoted to host memory and promoted again, beside one plain copy of the same
bytes.

The device is whatever the model's pools lie on; on a CPU both ends are the same memory. Knows a
geometry; no model takes part.
"""

import time

import torch

from kvchat.bench.engines import random_ids
from kvchat.bench.measure import Sample, alternated, wait_for_device
from kvchat.bench.report import Figure
from kvchat.cache.block_manager import CacheManager
from kvchat.cache.host_offload import HostOffload
from kvchat.cache.host_tier import HostTier
from kvchat.cache.kv_pool import KvGeometry, KvPool
from kvchat.cache.transfer import TransferThread

_BYTES = 64 << 20
_QUICK_BYTES = 8 << 20
_PATIENCE_S = 60.0


def host_figures(
    geometry: KvGeometry, device: torch.device, repeats: int, is_quick: bool
) -> list[Figure]:
    """Measure both ways, and the plain copies beside them in turn."""
    num_blocks = max(2, (_QUICK_BYTES if is_quick else _BYTES) // geometry.block_bytes)
    offload, plain = _Offload(geometry, device, num_blocks), _Plain(geometry, device, num_blocks)
    down, plain_down = alternated(offload.down, plain.down, repeats)
    up, plain_up = alternated(offload.up, plain.up, repeats)
    offload.close()
    num_bytes = num_blocks * geometry.block_bytes
    return [
        _rate("device to host memory", num_bytes, down, plain_down),
        _rate("host memory to device", num_bytes, up, plain_up),
    ]


def _rate(name: str, num_bytes: int, ours: Sample, plain: Sample) -> Figure:
    return Figure(
        name,
        num_bytes / ours.median / 1e9,
        "GB/s",
        num_bytes / plain.median / 1e9,
        "one copy of the same bytes",
        plain.median / ours.median,
        "of that",
        "",
        ours.spread,
    )


class _Offload:
    """One context that fills the device, is demoted whole and promoted whole."""

    def __init__(self, geometry: KvGeometry, device: torch.device, num_blocks: int) -> None:
        self._manager = CacheManager(KvPool(geometry, num_blocks + 1, device))
        limit = 2 * num_blocks * geometry.block_bytes
        is_pinned = device.type == "cuda"
        self._host = HostTier(geometry.block_size, geometry.block_bytes, limit, is_pinned)
        self._transfer = TransferThread(lambda: None, 0)
        self._offload = HostOffload(self._manager, self._host, self._transfer)
        self._num_blocks = num_blocks
        self._ids = random_ids(num_blocks * geometry.block_size, 1000, seed=0)

    def down(self) -> float:
        """Return the seconds it takes until all of it is in host memory, which had nothing."""
        self._manager.clear()
        table = self._manager.match(self._ids)
        assert self._manager.reserve(table, 0, len(self._ids))
        self._manager.release(table, self._ids)
        wait_for_device()
        start_s = time.perf_counter()
        self._manager.evict_cold(self._num_blocks)
        assert self._offload.flush(_PATIENCE_S)
        seconds = time.perf_counter() - start_s
        self._offload.settle(may_demote=False)
        assert self._host.status().num_packs == self._num_blocks
        return seconds

    def up(self) -> float:
        """Return the seconds it takes until all of it is on the device again."""
        self._manager.evict_cold(self._num_blocks)
        assert self._offload.flush(_PATIENCE_S)
        wait_for_device()
        start_s = time.perf_counter()
        promotion = self._offload.begin([*self._ids, 0])
        assert promotion is not None
        while not promotion.is_over:
            self._offload.wait_for_news()
            self._offload.settle(may_demote=False)
        wait_for_device()
        seconds = time.perf_counter() - start_s
        assert promotion.num_tokens == len(self._ids)
        return seconds

    def close(self) -> None:
        self._transfer.close(_PATIENCE_S)


class _Plain:
    """The ceiling: one contiguous tensor on the device, one in host memory."""

    def __init__(self, geometry: KvGeometry, device: torch.device, num_blocks: int) -> None:
        num_bytes = num_blocks * geometry.block_bytes
        is_pinned = device.type == "cuda"
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    def down(self) -> float:
        return _seconds(self._host, self._device)

    def up(self) -> float:
        return _seconds(self._device, self._host)


def _seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    wait_for_device()
    start_s = time.perf_counter()
    target.copy_(source)
    wait_for_device()
    return time.perf_counter() - start_s
