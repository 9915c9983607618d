"""Rates of copies between device and host memory: measured, doubted, and kept between runs."""

import time
from collections.abc import Callable

import pytest

from kvchat.cache.kv_pool import LayerGeometry
from kvchat.cache.planner import RateMemory
from support.cached_contexts import compute
from support.clock import Clock
from support.fact_memory import FactMemory
from support.host_machine import Machine

# 128 KiB a block: a copy of a few says something about this machine.
LAYERS = (LayerGeometry(1, 4096, 4096),)
STORY = list(range(40))


def new_machine(
    memory: RateMemory | None, clock: Callable[[], float] = time.perf_counter
) -> Machine:
    return Machine(layers=LAYERS, memory=memory, clock=clock)


def test_rates_of_copies_are_there_for_the_next_run(memory: FactMemory) -> None:
    machine = new_machine(RateMemory(memory, "model"))
    compute(machine.manager, STORY)
    machine.demote()
    machine.promote(STORY)
    machine.settle()
    measured = machine.planner.rates

    assert set(measured) == {"to host", "from host"}
    assert RateMemory(memory, "model").read() == pytest.approx(measured, rel=0.1)
    assert new_machine(RateMemory(memory, "model")).planner.rates.keys() == measured.keys()


def test_an_end_keeps_what_was_measured_last(memory: FactMemory) -> None:
    machine = new_machine(RateMemory(memory, "model"))
    machine.planner.note_copy("from host", 1 << 30, 1.0)

    machine.chain.close()
    machine.chain.close()

    assert RateMemory(memory, "model").read() == {"from host": float(1 << 30)}


def test_a_run_decides_by_what_an_earlier_one_has_measured(memory: FactMemory) -> None:
    """Every process once copied down at first what is computed anew in no time."""
    RateMemory(memory, "model").write({"first tokens": 1e15, "to host": 1e6, "from host": 1e6})
    machine = new_machine(RateMemory(memory, "model"))
    compute(machine.manager, STORY)

    machine.demote()

    assert machine.host.status().num_packs == 0


def test_a_rate_kept_from_a_bad_day_is_doubted_until_a_copy_is_tried(memory: FactMemory) -> None:
    RateMemory(memory, "model").write({"first tokens": 1e6, "to host": 1e8, "from host": 1e8})
    clock = Clock(0.0)
    machine = new_machine(RateMemory(memory, "model"), clock)
    while machine.host.status().num_packs == 0:
        compute(machine.manager, STORY)
        machine.demote()
        clock.now_s += 30.0
        assert clock.now_s < 3600.0

    assert clock.now_s > 60.0


def test_what_is_refused_at_every_step_is_doubted_now_and_then(memory: FactMemory) -> None:
    """A path three times too slow was tried again every twelve steps: each refusal had it believed
    to be a tenth quicker.
    """
    block_bytes, block_size = 128 << 10, 4
    rates = {"first tokens": 1000.0, "to host": 2 * block_bytes * 1000.0 / block_size / 3}
    rates["from host"] = rates["to host"]
    RateMemory(memory, "model").write(rates)
    clock = Clock(0.0)
    machine = new_machine(RateMemory(memory, "model"), clock)

    def passes(num_steps: int, seconds: float) -> int:
        for _ in range(num_steps):
            compute(machine.manager, STORY)
            machine.demote()
            clock.now_s += seconds / num_steps
        return machine.host.status().num_packs

    assert passes(100, 20.0) == 0
    assert passes(100, 60.0) > 0
