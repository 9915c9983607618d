"""Scenario `tiers`: what the disk tier costs, and how fast it and host memory are.

Packs are written and read beside plain files of the same bytes, KV is demoted to host memory and
promoted beside plain copies, and a chat of several turns is held with the disk on and off: nobody
who has a disk tier should feel it.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvchat.bench.engines import complete, new_engine, random_ids
from kvchat.bench.host_copies import host_figures
from kvchat.bench.measure import Sample, alternated
from kvchat.bench.report import Figure, Result
from kvchat.bench.scenarios import BenchSetup
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from kvchat.cache.tier import Found, Layout, PackHead
from kvchat.core.config import CacheConfig, EngineConfig, Size
from kvchat.engine.assembly import AssembledEngine, engine_around

_NUM_TURNS = 10
_USER_TOKENS = 24
_ANSWER_TOKENS = 40
_PACK_BYTES = 4 << 20
_NUM_PACKS = 24
_LAYOUT = Layout(identity=b"kvchat benchmark", block_size=16, block_bytes=_PACK_BYTES // 16)
_DISK = Size(num_bytes=8 << 30)


def run(setup: BenchSetup) -> Result:
    """Measure rates, the cost of the warm path, and the bytes that are written."""
    with _directory() as directory:
        figures = _rates(setup, directory / "rates")
        assembled = new_engine(setup.source, setup.model, setup.cache, state=directory)
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
        _rate("writing packs", num_bytes, written, plain_written, ""),
        _rate("reading packs, verified", num_bytes, read, plain_read, "0.6"),
    ]


def _rate(name: str, num_bytes: int, ours: Sample, plain: Sample, must: str) -> Figure:
    return Figure(
        name,
        num_bytes / ours.median / 1e9,
        "GB/s",
        num_bytes / plain.median / 1e9,
        "plain files of the same bytes",
        plain.median / ours.median,
        "of that",
        must,
        ours.spread,
    )


class _Files:
    """The ceiling: files written, and read into memory of their own, and nothing else."""

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
    """The tier, with as many conversations of one pack."""

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
            found: list[Found] = self._tier.find(keys, head.ids)
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
        Figure(
            "a chat with the disk on",
            on.median * 1e3,
            "ms",
            without.median * 1e3,
            "with the disk off",
            on.median / without.median,
            "on over off",
            "1.05",
            on.spread,
        ),
        Figure(
            "written",
            num_written / 1e6,
            "MB",
            num_new / 1e6,
            "of new KV in full blocks",
            num_written / num_new,
            "written over new",
            "1.1",
        ),
    ]


def _chat(assembled: AssembledEngine, config: CacheConfig, state: Path, num_turns: int) -> _Chat:
    engine = engine_around(assembled.loaded, config, EngineConfig(), state)
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
    """Return what lies in files: all that grows with KV; the table is a few kilobytes a pack."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvchat-bench-tiers-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
