"""Restores that fail or end early: no request waits for ever, and counts stay true."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from math import inf

from kvchat.cache import planner as planning
from kvchat.cache.transfer import TransferThread
from support.chains import compute_at, new_chain
from support.engine_harness import EngineHarness
from support.memory_tier import MemoryTier
from support.restarts import GREEDY, HISTORY, Processes, alone, spec


def test_a_restore_that_is_over_holds_no_later_step_up(processes, monkeypatch):
    """Every token of an answer once waited the whole patience for news that could not come."""
    process = processes.start()
    waits: list[int] = []
    wait = process.chain.arrivals.wait_for_news

    def counted() -> None:
        waits.append(len(process.harness.steps))
        wait()

    monkeypatch.setattr(process.chain.arrivals, "wait_for_news", counted)
    answer, _ = process.answer(spec(HISTORY, max_tokens=40))

    assert len(answer) == 40
    assert max(waits, default=0) == 0, "it waited after the first forward pass"


def test_what_the_device_forgot_again_is_not_said_to_come_from_the_disk(processes):
    """With the restored end evicted before the request began, device tokens were called disk's."""
    process = processes.after(spec(HISTORY))
    process.answer(spec(HISTORY[:21]))  # restores five blocks

    process.harness.submit(spec(HISTORY))
    [request] = process.harness.live()
    assert request.arrival is not None
    while not request.arrival.is_over:
        process.chain.arrivals.wait_for_news()
        process.chain.arrivals.settle_one(request.arrival)
    assert request.arrival.num_tokens > 0
    evict_all_but(process.harness, num_blocks=4)
    process.harness.run()

    ending = process.harness.ending(request.request_id)
    assert (ending.usage.cached.device, ending.usage.cached.disk) == (16, 0)
    assert process.harness.generated(request.request_id) == alone(spec(HISTORY))


def test_who_meets_a_front_that_another_computed_still_waits_for_what_is_read(tier, monkeypatch):
    """Two asked about one document, the first was cancelled when it had computed the front, and the
    second was told that there was no room for it.
    """
    earlier = EngineHarness(open_tier=lambda: tier)
    earlier.submit(spec(HISTORY))
    earlier.run()
    earlier.engine.close()
    may_read, reads = threading.Event(), count()
    tier.before_read = lambda: next(reads) and may_read.wait(60) and None
    monkeypatch.setattr(planning, "LEAST_TELLING_TOKENS", 8)
    harness = EngineHarness(open_tier=lambda: tier)
    chain = harness.engine.chain
    chain.slow[0].writer._num_refusals, chain.slow[0].writer._rests_until_s = (
        3,
        inf,
    )  # the disk is full
    compute_at(chain, 1.0)  # reading takes about as long as computing
    chain.planner.rates["from disk"] = 8.0
    while chain.slow[0].thread.tier is None:
        chain.arrivals.wait_for_news()

    first, second = harness.submit(spec(HISTORY)), harness.submit(spec(HISTORY))
    read, awaited = [request.arrival and request.arrival.feed for request in harness.live()]
    assert read is not None
    assert awaited is not None
    assert read.has_all.wait(60)
    while not awaited.num_planned:
        time.sleep(0.001)
    while harness.live()[0].num_computed < 24:
        harness.step()
    harness.engine.cancel(first)
    for _ in range(5):
        harness.step()
    assert [request.num_computed for request in harness.live()] == [24]
    may_read.set()
    harness.run()
    harness.engine.close()

    assert not harness.failures(second)
    assert harness.generated(second) == alone(spec(HISTORY))


def evict_all_but(harness: EngineHarness, num_blocks: int) -> None:
    table = harness.cache.match([*HISTORY[: num_blocks * 4], -1])
    harness.cache.clear()
    harness.cache.release(table, list(HISTORY[: num_blocks * 4]))


def test_an_engine_closes_at_once_while_a_prompt_is_being_restored(tier: MemoryTier) -> None:
    """The reader waited for places that nothing was left to make."""
    writer = Processes(lambda: tier).start()
    writer.answer(spec(HISTORY))
    writer.end()
    tier.max_found = 1  # more finds than there are places for pieces
    process = Processes(lambda: tier).start()
    process.harness.submit(spec(HISTORY))

    start_s = time.monotonic()
    process.end()

    assert time.monotonic() - start_s < 30.0


def test_a_tier_that_hangs_is_waited_for_once(tier, monkeypatch):
    """Closing waited its patience for the saves, and again for the thread."""
    may_end = threading.Event()
    waited_for_s: list[float] = []
    thread = TransferThread(lambda: tier, 1 << 20)
    thread.save(lambda _: may_end.wait(120.0), 1)
    monkeypatch.setattr(thread._thread, "join", waited_for_s.append)

    thread.close(0.2)

    assert waited_for_s == [0.0]
    may_end.set()


def opened_after(event: threading.Event, tier: MemoryTier) -> Callable[[], MemoryTier]:
    def open_slowly() -> MemoryTier:
        event.wait(120.0)
        return tier

    return open_slowly


def test_a_tier_that_is_still_being_opened_is_not_waited_for_with_nothing_to_save(tier):
    """Leaving at once took five seconds while the weights were read for their digest."""
    may_open = threading.Event()
    thread = TransferThread(opened_after(may_open, tier), 1 << 20)
    start_s = time.monotonic()
    thread.close(60.0)

    assert time.monotonic() - start_s < 30.0
    may_open.set()


def test_a_short_prompt_does_not_wait_for_a_tier_that_is_still_being_opened(tier):
    """The weights' digest takes as long as reading them, and the first question waited for it."""
    may_open = threading.Event()
    process = Processes(opened_after(may_open, tier)).start()
    compute_at(process.chain, 100.0)
    start_s = time.monotonic()
    process.answer_rightly(spec(HISTORY))

    assert time.monotonic() - start_s < 30.0
    may_open.set()
    process.end()


def test_samples_of_one_prompt_keep_it_once(processes: Processes, tier: MemoryTier) -> None:
    process = processes.start()
    request = spec(HISTORY)
    number = process.harness.submit(type(request)(HISTORY, GREEDY, max_tokens=6, num_samples=4))
    process.harness.run()
    assert process.chain.flush(60.0)

    assert process.harness.generated(number) == alone(request)
    assert tier.num_written == len(tier.blocks) == (len(HISTORY) + 5) // 4


def test_two_prompts_that_share_what_is_being_restored_both_come_right(processes, tier):
    process = processes.after(spec(HISTORY))
    requests = [spec((*HISTORY[:cut], 7, 7)) for cut in (50, 41, 50, 13)]

    numbers = [process.harness.submit(request) for request in requests]
    process.harness.run()

    for number, request in zip(numbers, requests, strict=True):
        assert process.harness.generated(number) == alone(request)
        cached = process.harness.ending(number).usage.cached
        assert cached.device + cached.disk >= (len(request.prompt_ids) - 3) // 4 * 4


def test_a_prompt_computed_by_another_while_it_is_read_comes_right(processes, tier):
    processes.end_one(spec(HISTORY))
    may_read = threading.Event()
    process = processes.start()
    compute_at(process.chain, 1e9)
    tier.before_read = lambda: may_read.wait(60) and None
    impatient = process.harness.submit(spec(HISTORY))
    compute_at(process.chain, 1.0)
    patient = process.harness.submit(spec(HISTORY))
    while not process.harness.generated(impatient):
        process.harness.step()
    may_read.set()
    process.harness.run()

    for number in (impatient, patient):
        assert process.harness.generated(number) == alone(spec(HISTORY))
    cached = process.harness.ending(patient).usage.cached
    assert cached.device >= 48  # and a token of the block it shares, once the other is done
    assert cached.disk == 0


def test_many_prompts_that_wait_for_the_disk_do_not_keep_others_from_running(processes, tier):
    """Only the oldest of those who wait are compared, and all of those were waiting for it."""
    processes.end_one(spec(HISTORY))
    may_read = tier.held()
    process = processes.start()
    for number in range(70):
        process.harness.submit(spec((*HISTORY[:20], number % 30 + 1, 5), max_tokens=1))
    short = process.harness.submit(spec((9, 8, 7)))

    for _ in range(20):
        process.harness.step()

    assert process.harness.generated(short) == alone(spec((9, 8, 7)))
    may_read.set()
    process.harness.run()


def test_what_cannot_be_taken_in_or_exported_costs_no_answer(processes, monkeypatch):
    """Either once stopped the engine: its thread ends with an unexpected error."""
    process = processes.after(spec(HISTORY))

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(process.harness.cache.kv_pool, "scatter", refuse)
    monkeypatch.setattr(process.harness.cache.kv_pool, "gather", refuse)
    finished = process.answer_rightly(spec(HISTORY))

    assert finished.usage.cached.disk == 0


def test_a_chain_without_a_tier_forgets_every_job() -> None:
    def refuse() -> MemoryTier:
        raise OSError("no such disk")

    harness = EngineHarness()
    chain = new_chain(harness.cache, refuse)
    assert chain.flush(60.0)
    arrival = chain.arrivals.begin(list(HISTORY))
    assert arrival is not None
    assert arrival.is_over
    assert arrival.num_tokens == 0
    chain.close()


def test_a_pin_is_answered_although_the_tier_does_not_open_after_all() -> None:
    """It was queued while the tier was being opened, and forgotten with all other jobs."""
    may_fail = threading.Event()

    def refuse() -> MemoryTier:
        may_fail.wait(60)
        raise OSError("no such disk")

    chain = new_chain(EngineHarness().cache, refuse)
    pinned, written, located = Future[int](), Future[None](), Future[list[dict[str, int]]]()
    chain.pin(list(HISTORY), "mine", pinned.set_result)
    chain.forget([(HISTORY, 0)])(lambda: written.set_result(None))
    chain.look_up([HISTORY], located.set_result)
    may_fail.set()

    assert pinned.result(60) == 0
    assert written.result(60) is None
    assert located.result(60) == [{}]
    chain.close()
