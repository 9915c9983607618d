"""Scenario `resume`: the cost of continuing a conversation after a restart.

Computes a context once and saves it on disk. Then new engines, with loaded weights and an empty
device tier, answer a turn after it. Compares the time to first token with a full recomputation and
with peers that saved their caches, and the read rate with plain reads of the same files.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kvchat.bench.engines import Completion, complete, new_engine, random_ids
from kvchat.bench.measure import Sample
from kvchat.bench.peers import beside_transformers, first_token_beside_llama_cpp
from kvchat.bench.report import Figure, Result, compared
from kvchat.bench.setup import BenchSetup
from kvchat.cache.disk.memory import DiskMemory
from kvchat.cache.page_memory import fresh_memory
from kvchat.core.config import CacheConfig, EngineConfig
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY
from kvchat.engine.assembly import AssembledEngine, engine_around

_HISTORY = 4096
_NEW_TOKENS = 24
_ANSWER_TOKENS = 8
# Larger than any processor cache.
_FLUSH_BYTES = 1 << 28
_DISK = Size(num_bytes=8 << 30)


def run(setup: BenchSetup) -> Result:
    """Compare a resumed turn with a recomputed one."""
    with TemporaryDirectory(prefix="kvchat-bench-kv-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        cold = replace(setup.cache, directory=None)
        kept = replace(setup.cache, directory=directory / "kv", disk_bytes=_DISK)
        assembled = new_engine(setup.source, setup.model, kept, memory=DiskMemory(directory))
        history = random_ids(setup.scaled(_HISTORY), assembled.loaded.spec.vocab_size, seed=1)
        complete(assembled.engine, history, 1)
        assembled.engine.close()
        return _measured(setup, assembled, history, cold, kept)


def _measured(
    setup: BenchSetup,
    assembled: AssembledEngine,
    history: list[int],
    cold: CacheConfig,
    kept: CacheConfig,
) -> Result:
    assert kept.directory is not None
    vocab_size = assembled.loaded.spec.vocab_size
    recomputed: list[_Turn] = []
    resumed: list[_Turn] = []
    raw: list[float] = []
    for number in range(setup.repeats):
        # A new turn each time: an old one would be restored from the disk too.
        prompt = history + random_ids(_NEW_TOKENS, vocab_size, seed=2 + number)
        recomputed.append(_turn(assembled, cold, prompt))
        _flush_cpu_caches()
        raw.append(_raw_rate(kept.directory))
        _flush_cpu_caches()
        resumed.append(_turn(assembled, kept, prompt))
    settings = {
        "model": setup.source.name,
        "dtype": str(assembled.loaded.dtype).removeprefix("torch."),
        "device": assembled.loaded.device.type,
        "history": len(history),
        "new_tokens": _NEW_TOKENS,
    }
    if _answers(resumed) != _answers(recomputed):
        return Result("resume", settings, refusal="resumed and recomputed answers differ")
    figures = _figures(assembled.engine.cache.block_size, recomputed, resumed, raw)
    first_s = _first_tokens(resumed).median
    answer = resumed[-1].completion.token_ids
    beside, note = beside_transformers(
        assembled.loaded, history, prompt, (answer, first_s), kept.directory.parent
    )
    llama, llama_note = first_token_beside_llama_cpp(setup, len(history), _NEW_TOKENS, first_s)
    return Result("resume", settings, (*figures, *beside, *llama), notes=(note, llama_note))


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answered turn, and the rate of its disk reads, with verification, in bytes per second."""

    completion: Completion
    read_rate: float


def _turn(assembled: AssembledEngine, config: CacheConfig, prompt: list[int]) -> _Turn:
    """Answer a prompt with a new engine, whose device tier is empty."""
    memory = DiskMemory(config.directory.parent) if config.directory is not None else NO_MEMORY
    engine = engine_around(assembled.loaded, config, EngineConfig(), memory)
    try:
        completion = complete(engine, prompt, _ANSWER_TOKENS)
        status = engine.status()
        disk = status.tier("disk")
        return _Turn(completion, disk.bytes_read / disk.read_s if disk and disk.read_s else 0.0)
    finally:
        engine.close()


def _figures(
    block_size: int, recomputed: list[_Turn], resumed: list[_Turn], raw: list[float]
) -> tuple[Figure, ...]:
    usage = resumed[-1].completion.finished.usage
    rate = Sample(tuple(turn.read_rate for turn in resumed))
    beside, plain = Sample(tuple(raw)), "only reading the same files"
    ours, theirs = _first_tokens(resumed), _first_tokens(recomputed)
    first_s, anew_s = ours.median, theirs.median
    again = ("recomputed", anew_s / first_s, "recomputed over resumed", "40", ours.spread)
    prompt = (usage.prompt_tokens, "prompt tokens", usage.prefilled_tokens, "tokens computed")
    most = f"{_NEW_TOKENS + block_size}"
    return (
        Figure("first token after a restart", first_s * 1e3, "ms", anew_s * 1e3, *again),
        Figure("tokens restored", usage.cached.disk, "tokens", *prompt, most),
        compared("reading and verifying", rate, beside, "GB/s", plain, "of that", "0.6"),
    )


def _answers(turns: list[_Turn]) -> list[tuple[int, ...]]:
    return [turn.completion.token_ids for turn in turns]


def _first_tokens(turns: list[_Turn]) -> Sample:
    return Sample(tuple(turn.completion.finished.timing.ttft_s for turn in turns))


def _flush_cpu_caches() -> None:
    """Evict the processor's caches, so that file reads come from the system's page cache."""
    memory = fresh_memory(_FLUSH_BYTES, is_for_all=True)
    memory[:] = bytes(len(memory))


def _raw_rate(directory: Path) -> float:
    """Return the bytes per second of reading every file of a store into one allocated buffer."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in paths]
    buffer = memoryview(fresh_memory(max(sizes), is_for_all=True))
    buffer[:] = bytes(len(buffer))
    start_s = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            file.readinto(buffer)
    return sum(sizes) / (time.perf_counter() - start_s)
