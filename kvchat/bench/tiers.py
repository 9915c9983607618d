"""Scenario `tiers`: the rates of the disk and host memory tiers, and the disk tier's cost.

Compares writing and reading packs with plain files of the same bytes. Compares demoting KV to host
memory and promoting it with one plain copy of the same bytes; on a CPU both are host memory. Runs a
chat of several turns with the disk on and off, because the disk tier should not slow it down.
"""

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvchat.bench.engines import complete, new_engine, random_ids
from kvchat.bench.measure import Sample, alternated, wait_for_device
from kvchat.bench.report import Figure, Result, compared, over
from kvchat.bench.setup import BenchSetup
from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.cache.disk.memory import DiskMemory
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.host_tier import HostTier
from kvchat.cache.keys import encode_ids
from kvchat.cache.kv_pool import KvGeometry, KvPool
from kvchat.cache.tier import BlockRun, Layout, PackHead, TierOpener
from kvchat.core.config import CacheConfig, EngineConfig
from kvchat.core.text import Size
from kvchat.engine.assembly import AssembledEngine, engine_around

_BYTES = 64 << 20
_QUICK_BYTES = 8 << 20
_PATIENCE_S = 60.0
_COPY, _FILES = "one copy of the same bytes", "plain files of the same bytes"


def host_figures(
    geometry: KvGeometry, device: torch.device, repeats: int, is_quick: bool
) -> list[Figure]:
    """Measure demotion and promotion, alternating with plain copies of the same bytes."""
    num_blocks = max(2, (_QUICK_BYTES if is_quick else _BYTES) // geometry.block_bytes)
    host, plain = _Host(geometry, device, num_blocks), _Plain(geometry, device, num_blocks)
    down, plain_down = alternated(host.down, plain.down, repeats)
    up, plain_up = alternated(host.up, plain.up, repeats)
    host.close()
    num_bytes = num_blocks * geometry.block_bytes
    return [
        _rate("device to host memory", num_bytes, down, plain_down, _COPY),
        _rate("host memory to device", num_bytes, up, plain_up, _COPY),
    ]


def _rate(
    name: str, num_bytes: int, ours: Sample, plain: Sample, beside: str, must: str = ""
) -> Figure:
    mine, other = (num_bytes / each.median / 1e9 for each in (ours, plain))
    return over(name, mine, "GB/s", (beside, other), "of that", must, ours.spread)


class _Host:
    """One context that fills the device and is demoted and promoted as a whole."""

    def __init__(self, geometry: KvGeometry, device: torch.device, num_blocks: int) -> None:
        self._manager = CacheManager(KvPool(geometry, num_blocks + 1, device))
        limit = 2 * num_blocks * geometry.block_bytes
        self._host = HostTier(geometry.block_size, geometry.block_bytes, limit, device)
        opener = TierOpener("host", lambda layout: self._host, is_quick=True)
        self._chain = KvChain(self._manager, [opener])
        self._num_blocks = num_blocks
        self._ids = random_ids(num_blocks * geometry.block_size, 1000, seed=0)

    def down(self) -> float:
        """Return the seconds to demote the whole context to empty host memory."""
        self._manager.clear()
        table = self._manager.match(self._ids)
        assert self._manager.reserve(table, 0, len(self._ids))
        self._manager.release(table, self._ids)
        wait_for_device()
        start_s = time.perf_counter()
        self._manager.evict_cold(self._num_blocks)
        assert self._chain.flush(_PATIENCE_S)
        seconds = time.perf_counter() - start_s
        assert self._host.status().num_packs == self._num_blocks
        return seconds

    def up(self) -> float:
        """Return the seconds to promote the whole context to the device."""
        self._manager.evict_cold(self._num_blocks)
        assert self._chain.flush(_PATIENCE_S)
        wait_for_device()
        start_s = time.perf_counter()
        arrivals = self._chain.arrivals
        arrival = arrivals.begin([*self._ids, 0])
        assert arrival is not None
        while not arrival.is_over:
            arrivals.wait_for_news()
            arrivals.settle()
        wait_for_device()
        seconds = time.perf_counter() - start_s
        assert arrival.num_tokens == len(self._ids)
        return seconds

    def close(self) -> None:
        self._chain.close()


class _Plain:
    """The ceiling: a copy between one contiguous tensor on the device and one in host memory."""

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


_NUM_TURNS = 10
_USER_TOKENS = 24
_ANSWER_TOKENS = 40
_PACK_BYTES = 4 << 20
_NUM_PACKS = 24
_LAYOUT = Layout(identity=b"kvchat benchmark", block_size=16, block_bytes=_PACK_BYTES // 16)
_DISK = Size(num_bytes=8 << 30)


def run(setup: BenchSetup) -> Result:
    """Measure the tiers' rates, the disk tier's cost in a chat, and the bytes it writes."""
    with TemporaryDirectory(prefix="kvchat-bench-tiers-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        figures = _rates(setup, directory / "rates")
        assembled = new_engine(setup.source, setup.model, setup.cache, memory=DiskMemory(directory))
        pool = assembled.engine.cache.kv_pool
        figures += host_figures(pool.geometry, pool.device, setup.repeats, setup.is_quick)
        figures += _chats(setup, assembled, directory)
    settings = {
        "model": setup.source.name,
        "device": assembled.loaded.device.type,
        "pack_mib": _PACK_BYTES >> 20,
        "turns": _NUM_TURNS,
    }
    return Result("tiers", settings, tuple(figures))


# Rates


def _rates(setup: BenchSetup, directory: Path) -> list[Figure]:
    count = 4 if setup.is_quick else _NUM_PACKS
    directory.mkdir()
    images = [os.urandom(_PACK_BYTES) for _ in range(count)]
    files, packs = _Files(directory / "plain", images), _Packs(directory / "packs", images)
    written, plain_written = alternated(packs.write, files.write, setup.repeats)
    read, plain_read = alternated(packs.read, files.read, setup.repeats)
    packs.close()
    num_bytes = count * _PACK_BYTES
    return [
        _rate("writing packs", num_bytes, written, plain_written, _FILES),
        _rate("reading packs, verified", num_bytes, read, plain_read, _FILES, "0.6"),
    ]


class _Files:
    """The ceiling: plain files, written and read into new memory."""

    def __init__(self, directory: Path, images: list[bytes]) -> None:
        directory.mkdir()
        self._images = images
        self._paths = [directory / str(number) for number in range(len(images))]

    def write(self) -> float:
        for path in self._paths:
            path.unlink(missing_ok=True)
        start_s = time.perf_counter()
        for path, image in zip(self._paths, self._images, strict=True):
            path.write_bytes(image)
        return time.perf_counter() - start_s

    def read(self) -> float:
        start_s = time.perf_counter()
        for path in self._paths:
            path.read_bytes()
        return time.perf_counter() - start_s


class _Packs:
    """The disk tier, with one conversation of one pack per image."""

    def __init__(self, directory: Path, images: list[bytes]) -> None:
        self._directory, self._images = directory, images
        self._tier = self._opened()
        ids = [random_ids(256, 1000, seed=number) for number in range(len(images))]
        self._heads = [PackHead(self._tier.root, encode_ids(chat)) for chat in ids]

    def _opened(self) -> DiskTier:
        return DiskTier(self._directory, _LAYOUT, 1 << 40, min_free_bytes=0)

    def write(self) -> float:
        self._tier.close()
        shutil.rmtree(self._directory)
        self._tier = self._opened()
        start_s = time.perf_counter()
        for head, image in zip(self._heads, self._images, strict=True):
            assert self._tier.write(head, memoryview(image)), self._tier.status().trouble
        return time.perf_counter() - start_s

    def read(self) -> float:
        start_s = time.perf_counter()
        for head in self._heads:
            keys = head.keys(_LAYOUT)
            found: list[BlockRun] = self._tier.find(keys, head.ids)
            assert sum(len(self._tier.read(part)) for part in found) == _PACK_BYTES
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._tier.close()


# A chat with the disk on and off


@dataclass(frozen=True, slots=True)
class _Chat:
    """Seconds from submission to the last token over all turns, and tokens whose KV is complete."""

    seconds: float
    num_tokens: int


def _chats(setup: BenchSetup, assembled: AssembledEngine, directory: Path) -> list[Figure]:
    off = replace(setup.cache, directory=None)
    num_turns = 2 if setup.is_quick else _NUM_TURNS
    numbers = iter(range(1 << 30))
    chats: list[tuple[_Chat, int]] = []

    def with_disk() -> float:
        place = directory / f"chat{next(numbers)}" / "kv"
        chat = _chat(
            assembled, replace(off, directory=place, disk_bytes=_DISK), directory, num_turns
        )
        chats.append((chat, _payload_bytes(place)))
        return chat.seconds

    on, without = alternated(
        with_disk, lambda: _chat(assembled, off, directory, num_turns).seconds, setup.repeats
    )
    geometry = assembled.engine.cache.kv_pool.geometry
    chat, num_written = chats[-1]
    num_new = chat.num_tokens // geometry.block_size * geometry.block_bytes
    return [
        compared(
            "a chat with the disk on", on, without, "ms", "with the disk off", "on over off", "1.05"
        ),
        over(
            "written",
            num_written / 1e6,
            "MB",
            ("of new KV in full blocks", num_new / 1e6),
            "written over new",
            "1.1",
        ),
    ]


def _chat(assembled: AssembledEngine, config: CacheConfig, state: Path, num_turns: int) -> _Chat:
    engine = engine_around(assembled.loaded, config, EngineConfig(), DiskMemory(state))
    vocab_size = assembled.loaded.spec.vocab_size
    context: list[int] = []
    seconds = 0.0
    for turn in range(num_turns):
        context += random_ids(_USER_TOKENS, vocab_size, seed=3000 + turn)
        completion = complete(engine, context, _ANSWER_TOKENS)
        seconds += completion.finished.timing.total_s
        context += completion.token_ids
    engine.close()
    return _Chat(seconds, len(context) - 1)


def _payload_bytes(directory: Path) -> int:
    """Return the bytes of all files of a store; the table is only some kilobytes per pack."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
