"""Scenario `memory`: the unused share of allocated KV memory, for requests of mixed lengths.

Compares with a cache that reserves the longest context for every request. Sums over all steps.
"""

import random
from dataclasses import dataclass

from kvchat.bench.engines import GREEDY, new_engine, random_ids
from kvchat.bench.report import Result, over
from kvchat.bench.setup import BenchSetup
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec

_NUM_REQUESTS = 24
_LONGEST = 2048


@dataclass(slots=True)
class _Totals:
    """Token slots summed over all steps and requests."""

    allocated: int = 0
    used: int = 0
    contiguous: int = 0


def run(setup: BenchSetup) -> Result:
    """Run requests of mixed lengths together and sum their allocated and used slots."""
    assembled = new_engine(setup.source, setup.model, setup.cache)
    longest = min(setup.scaled(_LONGEST), assembled.engine.max_context - 80)
    rng = random.Random(0)
    for number in range(_NUM_REQUESTS):
        length = min(longest, max(8, int(rng.lognormvariate(5.5, 1.0))))
        prompt = random_ids(length, assembled.loaded.spec.vocab_size, seed=number)
        spec = RequestSpec(tuple(prompt), GREEDY, max_tokens=rng.randint(8, 64))
        assembled.engine.submit(spec)
    totals = _run_counting(assembled.engine, longest + 64)
    waste = 1 - totals.used / totals.allocated
    contiguous = 1 - totals.used / totals.contiguous
    other = ("one contiguous cache per request", contiguous * 100)
    name, ratio = "allocated and unused", "ours over contiguous"
    settings = {
        "model": setup.source.name,
        "block_size": setup.cache.block_size,
        "requests": _NUM_REQUESTS,
        "longest": longest,
    }
    return Result("memory", settings, (over(name, waste * 100, "%", other, ratio, "< 4 %"),))


def _run_counting(engine: Engine, max_length: int) -> _Totals:
    totals = _Totals()
    while engine.has_work:
        engine.step()
        for request in engine.running():
            assert request.table is not None
            totals.allocated += request.table.capacity
            totals.used += request.num_computed
            totals.contiguous += max_length
    return totals
