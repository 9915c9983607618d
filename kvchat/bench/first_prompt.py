"""How long the first prompt of a process takes beside later ones, and what loading took before it.

Each measurement has a process of its own, whose first prompt waits while the model loads, as that
of a script does. Knows the engine's thread; knows no scenario.
"""

import multiprocessing
import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvchat.bench.engines import GREEDY, new_engine, random_ids
from kvchat.bench.measure import Sample
from kvchat.bench.report import Figure
from kvchat.bench.scenarios import BenchSetup
from kvchat.core.errors import GenerationError
from kvchat.core.events import (
    LoadEvent,
    LoadProgress,
    ModelReady,
    RequestEvent,
    RequestFailed,
    SampleFinished,
)
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import EngineThread

if TYPE_CHECKING:
    from kvchat.engine.engine import Engine

_LENGTH = 129  # two steps of a small model, and a row that only decoding's weights are for
_NUM_LATER = 3
_PATIENCE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """Seconds of one process: loading the model, and to the first token of prompts."""

    load_s: float
    first_s: float
    later_s: tuple[float, ...]


def figures(setup: BenchSetup) -> list[Figure]:
    """Measure processes one after another; each finds what the one before has remembered."""
    with TemporaryDirectory(prefix="kvchat-bench-") as state:
        _in_a_process(setup, Path(state))
        runs = [_in_a_process(setup, Path(state)) for _ in range(setup.repeats)]
    first = Sample(tuple(run.first_s for run in runs))
    later = Sample(tuple(seconds for run in runs for seconds in run.later_s))
    load = Sample(tuple(run.load_s for run in runs))
    return [
        Figure(
            f"first prompt of a process, {_LENGTH} tokens",
            first.median * 1e3,
            "ms",
            later.median * 1e3,
            "later ones",
            first.median / later.median,
            "times that",
            "2",
            first.spread,
        ),
        Figure("loading before it", load.median, "s", spread=load.spread),
    ]


def _in_a_process(setup: BenchSetup, state: Path) -> Prompts:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (setup, state))


def measure(setup: BenchSetup, state: Path | None) -> Prompts:
    """Load the model and read prompts, the first of which was there before."""
    ready: queue.SimpleQueue[LoadEvent] = queue.SimpleQueue()

    def build(progress: Callable[[LoadProgress], None]) -> "tuple[Engine, ModelReady]":
        assembled = new_engine(setup.source, setup.model, setup.cache, state=state)
        return assembled.engine, assembled.ready

    def hear(event: LoadEvent) -> None:
        if not isinstance(event, LoadProgress):
            ready.put(event)

    thread = EngineThread(build, hear)
    try:
        # Ids that any vocabulary has.
        first_s = _first_token_s(thread, seed=0)
        loaded = ready.get(timeout=_PATIENCE_S)
        assert isinstance(loaded, ModelReady)
        later = tuple(_first_token_s(thread, seed=seed) for seed in range(1, 1 + _NUM_LATER))
        return Prompts(loaded.load_s, first_s, later)
    finally:
        thread.close()


def _first_token_s(thread: EngineThread, seed: int) -> float:
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    prompt = random_ids(_LENGTH, 256, seed)
    thread.submit(RequestSpec(tuple(prompt), GREEDY, max_tokens=2), events.put)
    while True:
        event = events.get(timeout=_PATIENCE_S)
        if isinstance(event, RequestFailed):
            raise GenerationError(f"A measured request failed: {event.error}")
        if isinstance(event, SampleFinished):
            return event.timing.ttft_s
