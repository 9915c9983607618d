"""`kvchat bench`: runs scenarios and prints their tables, then one JSON document."""

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import UsageError
from kvchat.core.paths import require_working_directory
from kvchat.core.text import Size, parse_size

if TYPE_CHECKING:
    from kvchat.bench.progress import Progress

# A peer program and a second engine with its own weights need memory beside the KV.
_SHARE_OF_A_GPU = Size(share=0.2)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The command line's arguments. `model` None measures random weights in `shape`."""

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
    peer: Path | None = None
    draft: str | None = None
    record: Path | None = None
    endpoint: str | None = None
    kv_dtype: str = "auto"


def run_bench(request: BenchRequest) -> None:
    """Run the requested scenarios, or all of them; write the report if requested."""
    require_working_directory()
    from kvchat.bench.progress import Progress
    from kvchat.cli.streams import Interruption

    # A signal's default ends the process at once and leaves random weights, 0.8 to 16 GB.
    with Interruption(has_files=True), Progress(request.is_quick) as progress:
        _run(request, progress)


def _run(request: BenchRequest, progress: "Progress") -> None:
    if request.endpoint is not None:
        _run_at_endpoint(request, request.endpoint, progress)
        return
    from kvchat.model.hf.lean_import import import_transformers

    import_transformers()
    from kvchat.bench.report import Result, print_json, print_result, record
    from kvchat.bench.scenarios import DEFAULT_NAMES, scenario
    from kvchat.bench.setup import BenchSetup, subject
    from kvchat.model.checkpoint.source import find_model
    from kvchat.model.device import choose_device

    extra = ("replay",) if request.sessions is not None else ()
    draft = find_model(request.draft) if request.draft is not None else None
    names = request.scenarios or (*DEFAULT_NAMES, *extra)
    functions = [scenario(name) for name in names]
    if request.peer is not None and not os.access(request.peer, os.X_OK):
        raise UsageError(f"--peer: {request.peer} is no program that can be run.")
    size = parse_size(request.device_cache, "--device-cache") if request.device_cache else None
    model = ModelConfig(
        request.model or "demo", request.device, "auto", request.threads, request.weights
    )
    device = choose_device(model)  # fails before gigabytes of random weights are created
    if size is None and device.type == "cuda":
        size = _SHARE_OF_A_GPU
    cache = CacheConfig(request.block_size, size, kv_dtype=request.kv_dtype)
    results: list[Result] = []
    command = shlex.join(["kvchat", *sys.argv[1:]])
    if request.record is not None:
        record(results, request.record, device, command)  # fails before anything is measured
    progress.begin("preparing the model")
    with subject(request.model, request.shape, request.dtype) as source:
        setup = BenchSetup(
            *(source, model, cache, request.repeats, request.is_quick),
            *(request.sessions, request.gguf, request.peer, draft, progress.begin_part),
        )
        for number, (name, function) in enumerate(zip(names, functions, strict=True), start=1):
            progress.begin(f"{name} ({number} of {len(names)})")
            result = function(setup)
            if cache.kv_dtype != "auto":
                result = replace(result, settings={**result.settings, "kv": cache.kv_dtype})
            results.append(result)
            progress.erase()
            print_result(results[-1], sys.stdout)
            if request.record is not None:  # now: a later scenario may be interrupted
                paths = record(results, request.record, device, command)
    print_json(results, sys.stdout)
    if request.record is not None:
        sys.stderr.write("".join(f"{path}\n" for path in paths))


def _run_at_endpoint(request: BenchRequest, endpoint: str, progress: "Progress") -> None:
    """Run the one scenario that another program's server can run."""
    if request.scenarios not in ((), ("turns",)):
        raise UsageError("With --endpoint there is one scenario: turns.")
    from kvchat.bench.endpoint import EndpointSetup, run_turns
    from kvchat.bench.report import print_json, print_result
    from kvchat.cli.build import open_host, settings_of

    flags = {"endpoint": endpoint, "model": request.model, "incognito": True}
    progress.begin("turns at the endpoint")
    host = open_host(settings_of(flags))
    try:
        result = run_turns(EndpointSetup(host, request.repeats, request.is_quick))
    finally:
        host.close()
    progress.erase()
    print_result(result, sys.stdout)
    print_json([result], sys.stdout)
