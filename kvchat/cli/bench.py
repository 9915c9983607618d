"""`kvchat bench`: runs scenarios and prints their tables, then one JSON document.

Knows flags; measures nothing.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from kvchat.core.config import CacheConfig, ModelConfig, parse_size


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What the command line asked for. `model` None measures random weights in `shape`."""

    scenarios: tuple[str, ...]
    model: str | None
    shape: str
    dtype: str
    weights: str
    device: str
    device_cache: str | None
    block_size: int
    threads: int | None
    repeats: int
    is_quick: bool
    sessions: Path | None
    gguf: Path | None


def run_bench(request: BenchRequest) -> None:
    """Run the scenarios asked for, or all of them."""
    from kvchat.bench.report import print_json, print_result
    from kvchat.bench.scenarios import DEFAULT_NAMES, BenchSetup, scenario
    from kvchat.bench.subjects import subject

    extra = ("replay",) if request.sessions is not None else ()
    names = request.scenarios or (*DEFAULT_NAMES, *extra)
    functions = [scenario(name) for name in names]
    size = parse_size(request.device_cache, "--device-cache") if request.device_cache else None
    model = ModelConfig(
        request.model or "demo", request.device, "auto", request.threads, request.weights
    )
    cache = CacheConfig(block_size=request.block_size, device_bytes=size)
    results = []
    with subject(request.model, request.shape, request.dtype) as source:
        setup = BenchSetup(
            source,
            model,
            cache,
            request.repeats,
            request.is_quick,
            request.sessions,
            request.gguf,
        )
        for function in functions:
            results.append(function(setup))
            print_result(results[-1], sys.stdout)
    print_json(results, sys.stdout)
