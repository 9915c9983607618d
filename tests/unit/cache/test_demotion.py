"""KV that is demoted to host memory and promoted again: the bits that were computed, within
limits.
"""

from collections.abc import Callable

import pytest
import torch

from kvchat.cache import demotion
from support.cached_contexts import compute, images_of
from support.chains import new_chain
from support.clock import Clock
from support.host_machine import GEOMETRIES, Machine

STORY = list(range(40))


def demoted(num_blocks: int = 10) -> Machine:
    """Return a machine that has read a story, of whose KV so many blocks are in host memory."""
    machine = Machine()
    compute(machine.manager, STORY)
    machine.demote(num_blocks)
    return machine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", GEOMETRIES.values(), ids=GEOMETRIES)
def test_what_was_demoted_is_promoted_bit_for_bit(layers, dtype):
    machine = Machine(layers=layers, dtype=dtype)
    compute(machine.manager, STORY)
    before = images_of(machine.manager, STORY, 0, 10)
    machine.demote()
    assert machine.held(STORY) == 0

    assert machine.promote(STORY) == 40

    assert images_of(machine.manager, STORY, 0, 10) == before
    assert machine.host.status().bytes_written == len(before)


def test_what_is_evicted_is_demoted_and_not_copied_down_twice() -> None:
    machine = Machine()
    compute(machine.manager, STORY)
    compute(machine.manager, [50, *STORY])  # pushes it out
    machine.settle()
    written = machine.host.status().bytes_written
    assert written > 0

    assert machine.promote(STORY) > 0
    machine.check()
    assert machine.held(STORY) == 40
    machine.demote()
    blocks = (10 + 10) * machine.manager.kv_pool.geometry.block_bytes
    assert machine.host.status().bytes_written == blocks


def test_a_prompt_takes_from_the_host_what_lies_behind_what_the_device_has() -> None:
    machine = Machine(num_blocks=20)
    compute(machine.manager, STORY)
    machine.demote(6)
    assert machine.held(STORY) == 16

    arrival = machine.begin([*STORY[:30], 99, 98])
    assert arrival is not None
    while not arrival.is_over:
        machine.settle()

    assert (arrival.num_known, arrival.num_tokens) == (16, 12)
    assert machine.held(STORY) == 28


def test_blocks_may_be_overwritten_as_soon_as_they_have_left() -> None:
    """The copy is made later, from what was staged before."""
    machine = Machine()
    compute(machine.manager, STORY)
    machine.manager.evict_cold(10)
    compute(machine.manager, [70, *STORY[:30]])
    machine.settle()

    machine.manager.clear = lambda: 0  # type: ignore[method-assign]
    machine.demote()
    assert machine.promote(STORY) == 40
    assert machine.held(STORY) == 40


def test_eviction_leaves_alone_what_a_promotion_builds_on() -> None:
    machine = demoted(5)
    arrival = machine.begin([*STORY, 0])
    assert arrival is not None

    machine.manager.evict_cold(1 << 20)
    machine.check()
    assert machine.held(STORY) == 20
    while not arrival.is_over:
        machine.settle()

    assert machine.held(STORY) == 40


def test_a_promotion_that_is_given_up_leaves_what_came() -> None:
    machine = demoted()
    arrival = machine.begin([*STORY, 0])
    assert arrival is not None
    arrival.give_up()
    assert arrival.is_over
    machine.check()

    machine.settle()

    assert not machine.arrivals.live
    assert machine.held(STORY) == 0
    machine.check()


def test_a_promotion_is_not_waited_for_without_end() -> None:
    clock = Clock(0.0)
    machine = Machine(clock=clock)
    compute(machine.manager, STORY)
    machine.demote()
    arrival = machine.begin([*STORY, 0])
    assert arrival is not None

    clock.now_s = 1.1
    machine.arrivals.settle()  # the thread hangs

    assert arrival.is_over
    machine.check()


def test_cold_blocks_are_demoted_before_their_place_is_needed() -> None:
    machine = Machine(num_blocks=101, num_slots=100)
    for start in range(0, 200, 10):
        compute(machine.manager, [start + n for n in range(20)])
    machine.demote(0)
    assert machine.manager.status().num_free == 0

    for _ in range(10):
        machine.thread.work()
        machine.arrivals.settle()
        machine.demoter.demote_cold()

    assert machine.manager.status().num_free == 6
    assert machine.promote(range(20)) > 0, "the coldest went"
    assert machine.held([190 + n for n in range(20)]) == 20


def test_nothing_is_demoted_early_that_would_be_forgotten() -> None:
    machine = Machine(num_blocks=101, num_slots=0)
    for start in range(0, 200, 10):
        compute(machine.manager, [start + n for n in range(20)])

    machine.demoter.demote_cold()

    assert machine.manager.status().num_free == 0


def test_what_is_quicker_computed_is_neither_kept_nor_fetched() -> None:
    machine = demoted(5)
    machine.planner.prefill.of_long = 1e12
    machine.planner.rates = {"to host": 1e3, "from host": 1e3}

    machine.demote()
    assert machine.host.status().num_packs == 5
    assert machine.begin([*STORY, 0]) is None

    machine.planner.prefill.of_long = 1.0
    compute(machine.manager, STORY[:20])
    assert machine.promote(STORY) == 20


def test_wrong_kv_is_not_given_out_again() -> None:
    machine = demoted()
    assert machine.promote(STORY) == 40  # now both have it

    machine.manager.forget(STORY, 8)

    assert machine.held(STORY) == 8
    assert machine.promote(STORY) == 0
    machine.check()


def test_a_device_without_room_takes_what_fits() -> None:
    machine = Machine(num_blocks=12)
    compute(machine.manager, STORY)
    machine.demote()
    running = machine.manager.match([80] * 24)
    assert machine.manager.reserve(running, 0, 24)

    assert machine.promote(STORY) == 20

    machine.check([running])
    assert machine.held(STORY) == 20


def test_copies_that_fail_cost_only_what_they_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    compute(machine.manager, STORY)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as broken:
        broken.setattr(machine.host.copies, "down", fail)
        machine.manager.evict_cold(4)
        while machine.thread.jobs:
            with pytest.raises(RuntimeError):
                machine.thread.work(1)
        machine.settle()
        machine.check()
    machine.demote(4)
    with monkeypatch.context() as broken:
        broken.setattr(machine.host.copies, "up", fail)
        compute(machine.manager, STORY[:24])
        arrival = machine.begin([*STORY, 0])
        assert arrival is None, "what lies before it was lost"
        machine.demote()
        arrival = machine.begin([*STORY, 0])
        assert arrival is not None
        with pytest.raises(RuntimeError):
            machine.thread.work(1)
        machine.settle()
    assert arrival.is_over
    machine.check()


def test_no_more_is_staged_than_may_be_and_a_thread_that_hangs_is_waited_for_once(monkeypatch):
    machine = Machine(num_blocks=40, num_slots=100)
    image_bytes = machine.manager.kv_pool.geometry.block_bytes
    monkeypatch.setattr(demotion, "_MAX_STAGED_BYTES", 4 * image_bytes)
    monkeypatch.setattr(machine.host, "piece_blocks", 2)
    monkeypatch.setattr(demotion, "_PATIENCE_S", 0.01)
    waits: list[float] = []
    wait_for = machine.demoter._changed.wait_for

    def counted(has_room: Callable[[], bool], timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait_for(has_room, timeout_s)

    monkeypatch.setattr(machine.demoter._changed, "wait_for", counted)
    compute(machine.manager, list(range(100)))

    machine.manager.evict_cold(20)
    assert len(machine.thread.jobs) == 2
    num_waits = len([wait for wait in waits if wait])
    machine.manager.evict_cold(1)
    assert waits[-1] == 0.0
    assert len([wait for wait in waits if wait]) == num_waits

    machine.settle()
    machine.check()
    assert machine.host.status().num_packs == 4


def test_through_a_real_thread() -> None:
    manager = Machine().manager
    chain = new_chain(manager, num_host_blocks=64)
    compute(manager, STORY)
    manager.evict_cold(1 << 20)
    assert chain.flush(60.0)

    arrival = chain.arrivals.begin([*STORY, 0])
    assert arrival is not None
    for _ in range(1000):
        chain.arrivals.wait_for_news()
        chain.arrivals.settle()
        if arrival.is_over:
            break

    assert manager.num_cached_tokens(STORY) == 40
    chain.close()
