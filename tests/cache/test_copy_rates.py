"""Rates of copies between device and host memory: measured, doubted, and kept between runs."""

from pathlib import Path

import pytest

from kvchat.cache.copy_rates import CopyRates
from kvchat.cache.kv_pool import LayerGeometry
from kvchat.cache.rate_memory import RateMemory
from support.cached_contexts import compute
from support.host_machine import Machine

# 128 KiB a block: a copy of a few says something about this machine.
LAYERS = (LayerGeometry(1, 4096, 4096),)
STORY = list(range(40))


def new_machine(memory: RateMemory | None) -> Machine:
    return Machine(layers=LAYERS, memory=memory)


def test_rates_of_copies_are_there_for_the_next_run(tmp_path: Path) -> None:
    machine = new_machine(RateMemory(tmp_path, "model"))
    compute(machine.manager, STORY)
    machine.sink()
    machine.promote(STORY)
    machine.settle()
    measured = machine.swap.rates.rates()

    assert set(measured) == {"down", "up"}
    assert RateMemory(tmp_path, "model").read() == pytest.approx(measured, rel=0.1)
    assert new_machine(RateMemory(tmp_path, "model")).swap.rates.rates().keys() == measured.keys()


def test_an_end_keeps_what_was_measured_last(tmp_path: Path) -> None:
    machine = new_machine(RateMemory(tmp_path, "model"))
    machine.swap.rates.note_prefill(100, 1.0)
    machine.swap.rates.note_up(1 << 30, 1.0)

    machine.swap.close()
    machine.swap.close()

    assert RateMemory(tmp_path, "model").read() == {"prefill": 100.0, "up": float(1 << 30)}


def test_a_run_decides_by_what_an_earlier_one_has_measured(tmp_path: Path) -> None:
    """Every process once copied down at first what is computed anew in no time."""
    RateMemory(tmp_path, "model").write({"prefill": 1e15, "down": 1e6, "up": 1e6})
    machine = new_machine(RateMemory(tmp_path, "model"))
    compute(machine.manager, STORY)

    machine.sink()

    assert machine.host.status().num_packs == 0


def test_a_rate_kept_from_a_bad_day_is_doubted_until_a_copy_is_tried(tmp_path: Path) -> None:
    RateMemory(tmp_path, "model").write({"prefill": 1e6, "down": 1e8, "up": 1e8})
    machine = new_machine(RateMemory(tmp_path, "model"))
    num_tried = 0
    while machine.host.status().num_packs == 0:
        compute(machine.manager, STORY)
        machine.sink()
        num_tried += 1
        assert num_tried < 100

    assert num_tried > 1


def test_what_this_run_has_measured_is_not_replaced() -> None:
    rates = CopyRates(up_bytes_per_s=2e9)

    rates.begin_with({"prefill": 500.0, "down": 1e9, "up": 1e9})

    assert rates.rates() == {"prefill": 500.0, "down": 1e9, "up": 2e9}
