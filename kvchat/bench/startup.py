"""Scenario `startup`: the time until kvchat responds.

Times whole processes from outside: the help text, the input prompt on a terminal, the first token
of a one-shot answer. For the named model, compares the first request of a process with later ones;
each measurement is a new process whose first request waits while the model loads.
"""

import json
import os
import pty
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvchat.bench.engines import GREEDY, new_engine, random_ids
from kvchat.bench.measure import Sample
from kvchat.bench.processes import COMMAND, in_a_process, private_home
from kvchat.bench.report import Figure, Result, compared
from kvchat.bench.setup import BenchSetup, say_nothing
from kvchat.cache.disk.memory import DiskMemory
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


_LENGTH = 129  # two prefill steps of a small model; the second has one row, as a decode step has
_NUM_LATER = 3
_PATIENCE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """Seconds of one process: the model's loading, and the time to first token of its prompts."""

    load_s: float
    first_s: float
    later_s: tuple[float, ...]


def figures(setup: BenchSetup) -> list[Figure]:
    """Measure processes one after another. They share stored facts about the model."""
    with TemporaryDirectory(prefix="kvchat-bench-") as state:
        _in_a_process(setup, Path(state))
        runs = [_in_a_process(setup, Path(state)) for _ in range(setup.repeats)]
    first = Sample(tuple(run.first_s for run in runs))
    later = Sample(tuple(seconds for run in runs for seconds in run.later_s))
    load = Sample(tuple(run.load_s for run in runs))
    name = f"first prompt of a process, {_LENGTH} tokens"
    return [
        compared(name, first, later, "ms", "later ones", must="2"),
        Figure("loading before it", load.median, "s", spread=load.spread),
    ]


def _in_a_process(setup: BenchSetup, state: Path) -> Prompts:
    return in_a_process(measure, replace(setup, tell=say_nothing), state)


def measure(setup: BenchSetup, state: Path) -> Prompts:
    """Load the model and run prompts; the first is submitted before the model is loaded."""
    ready: queue.SimpleQueue[LoadEvent] = queue.SimpleQueue()

    def build(progress: Callable[[LoadProgress], None]) -> "tuple[Engine, ModelReady]":
        assembled = new_engine(setup.source, setup.model, setup.cache, memory=DiskMemory(state))
        return assembled.engine, assembled.ready

    def hear(event: LoadEvent) -> None:
        if not isinstance(event, LoadProgress):
            ready.put(event)

    thread = EngineThread(build, hear)
    try:
        # The ids are below 256, which every vocabulary has.
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


_PROMPT_DEADLINE_S = 30.0
_IMPORTS = "import torch, transformers"


def run(setup: BenchSetup) -> Result:
    """Time each kind of start, in a temporary home directory."""
    if setup.is_quick:
        setup = replace(setup, repeats=1)
    with private_home() as environment:
        python = _repeat(setup, lambda: _run([sys.executable, "-c", "pass"], environment))
        usage = _repeat(setup, lambda: _run([*COMMAND, "--help"], environment))
        imports = _repeat(setup, lambda: _run([sys.executable, "-c", _IMPORTS], environment))
        prompt = _repeat(setup, lambda: _time_to_prompt(environment))
        _one_shot(environment, "--incognito")
        answers = [_one_shot(environment, "--incognito") for _ in range(setup.repeats)]
        _one_shot(environment)
        later = [_one_shot(environment) for _ in range(setup.repeats)]
    shot, again = (Sample(tuple(total for total, _ in each)) for each in (answers, later))
    first = Sample(tuple(timing["ttft_s"] for _, timing in answers))
    nothing = "python -c pass"
    return Result(
        "startup",
        {"model": "demo", "prompts": setup.source.name, "repeats": setup.repeats},
        (
            compared("kvchat --help", usage, python, "s", nothing, must="0.3 s"),
            compared("live prompt, demo model", prompt, python, "s", nothing, must="1.5 s"),
            compared("one-shot answer of one token", shot, imports, "s", _IMPORTS),
            compared("the same, of a model seen before", again, imports, "s", "the same"),
            Figure("first token, model loaded", first.median * 1e3, "ms", spread=first.spread),
            *figures(setup),
        ),
    )


def _repeat(setup: BenchSetup, measure: Callable[[], float]) -> Sample:
    measure()
    return Sample(tuple(measure() for _ in range(setup.repeats)))


def _run(command: list[str], environment: dict[str, str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start_s


def _one_shot(environment: dict[str, str], *flags: str) -> tuple[float, dict[str, float]]:
    """Return the seconds of a process, and what it says of them; incognito it knows no model."""
    command = [*COMMAND, "-p", "Hello", "--max-tokens", "1", "--json", *flags]
    start_s = time.perf_counter()
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    elapsed_s = time.perf_counter() - start_s
    timing: dict[str, float] = json.loads(done.stdout)["timing"]
    return elapsed_s, timing


def _time_to_prompt(environment: dict[str, str]) -> float:
    """Start the interactive chat on a pseudo-terminal; return when its prompt takes keys.

    The prompt counts as live once a typed character comes back.
    """
    start_s = time.perf_counter()
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(COMMAND[0], COMMAND, {**environment, "TERM": "xterm-256color"})
    try:
        os.write(terminal, b"zqx")
        _wait_for(terminal, b"zqx", start_s + _PROMPT_DEADLINE_S)
        return time.perf_counter() - start_s
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def _wait_for(terminal: int, wanted: bytes, deadline_s: float) -> None:
    """Read until the program itself has printed `wanted`.

    The terminal's echo comes first, in one piece, before the program turns it off. The program's
    own output follows its first escape sequence.
    """
    seen = b""
    while b"\x1b" not in seen or wanted not in seen[seen.index(b"\x1b") :]:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline_s - time.perf_counter()))
        if not ready:
            raise TimeoutError("the prompt did not appear")
        seen += os.read(terminal, 65536)
