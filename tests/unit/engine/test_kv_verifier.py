"""Restored KV is verified by the next forward pass: what is wrong is forgotten, here and on the
tier, and computed again.

The model answers from what it reads back from its KV, so that an answer from wrong KV is a wrong
answer; reference counts are re-derived after every step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvchat.cache.block_table import BlockTable
from kvchat.cache.chain import KvChain
from kvchat.cache.tier import LogitFingerprint
from kvchat.core.types import CachedTokens
from support.memory_tier import MemoryTier
from support.restarts import HISTORY, Processes, spec

BLOCK = 4
NUM_KEPT = (len(HISTORY) + 5) // BLOCK  # the last token drawn was never computed


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(block_size=BLOCK, image_bytes=BLOCK * 8)


@pytest.fixture
def context(processes: Processes) -> tuple[int, ...]:
    """A context that a process which has ended has left on the tier."""
    first = processes.start()
    answer, _ = first.answer(spec(HISTORY))
    first.end()
    return (*HISTORY, *answer, 7, 8, 9)


def spoil_fingerprint(tier: MemoryTier) -> None:
    [(key, fingerprint)] = tier.fingerprints.items()
    tier.fingerprints[key] = replace(fingerprint, values=tuple(v + 0.5 for v in fingerprint.values))


def spoil_kv(tier: MemoryTier) -> None:
    """Have every token of the last block be another one."""
    key = list(tier.blocks)[-1]
    tier.blocks[key] = b"\x00\x00\x00\x3f" * BLOCK + tier.blocks[key][BLOCK * 4 :]


def test_a_turn_leaves_a_fingerprint_with_its_last_block(context, tier):
    [fingerprint] = tier.fingerprints.values()

    assert isinstance(fingerprint, LogitFingerprint)
    assert list(tier.fingerprints) == [list(tier.blocks)[-1]]
    assert len(fingerprint.values) == 8
    assert list(fingerprint.values) == sorted(fingerprint.values, reverse=True)


def test_what_is_right_stays(context, processes, tier):
    process = processes.start()
    finished = process.answer_rightly(spec(context))

    assert finished.usage.cached == CachedTokens(disk=NUM_KEPT * BLOCK)
    assert tier.num_quarantined == 0
    # The check rode along with the prompt's own first step.
    assert process.harness.steps[0][0][1] == len(context) - NUM_KEPT * BLOCK


@pytest.mark.parametrize("spoil", [spoil_fingerprint, spoil_kv])
def test_what_is_wrong_is_computed_again_and_never_given_out(
    spoil, context: tuple[int, ...], processes: Processes, tier: MemoryTier
) -> None:  # type: ignore[no-untyped-def]
    spoil(tier)
    process = processes.start()
    finished = process.answer_rightly(spec(context))

    assert finished.usage.cached == CachedTokens()
    assert finished.usage.prefilled_tokens == len(context)
    assert process.chain.flush(60.0)
    assert tier.num_quarantined == NUM_KEPT
    process.end()
    again = processes.start()
    again.answer_rightly(spec(context))
    assert tier.num_quarantined == NUM_KEPT


def test_what_continues_the_wrong_goes_with_it(context, processes, tier):
    processes.end_one(spec((*context, *HISTORY[:20])))
    key = next(iter(tier.fingerprints))
    tier.fingerprints[key] = replace(tier.fingerprints[key], values=(9.0,) * 8)

    process = processes.start()
    process.answer_rightly(spec(context[:-3], max_tokens=1))
    assert process.chain.flush(60.0)

    assert tier.num_quarantined > NUM_KEPT
    assert len(tier.blocks) == len(context[:-3]) // BLOCK  # this one's own, by now


def test_nobody_else_is_answered_from_it(context, processes, tier):
    """Two requests on the same wrong context, one of several samples, and one beside them."""
    spoil_kv(tier)
    process = processes.start()
    harness = process.harness
    specs = [spec(context), replace(spec(context), num_samples=3), spec((9, 8, 7, 6, 5, 4))]
    numbers = [harness.submit(each) for each in specs]
    harness.run()

    for number in numbers:
        harness.assert_complete(number)
    assert harness.ending(numbers[0]).usage.cached.disk == 0


def test_a_prefetch_is_verified_while_no_request_waits(context, processes, tier):
    spoil_kv(tier)
    process = processes.start()
    process.harness.engine.prefetch(context)
    process.harness.run()
    assert process.chain.flush(60.0)

    assert tier.num_quarantined == NUM_KEPT
    assert process.harness.cache.num_cached_tokens(context) == 0
    process.answer_rightly(spec(context))


def test_what_the_device_had_itself_is_not_forgotten(context, processes, tier):
    spoil_kv(tier)
    process = processes.start()
    tier.max_found = 0  # this one finds nothing
    process.answer(spec(HISTORY[:20], max_tokens=1))
    tier.max_found = 1 << 30

    finished = process.answer_rightly(spec(context))

    assert finished.usage.cached.device == 20


# Blocks for a context of 57 tokens and the scratch block: a request on it leaves none for a check.
FULL = 1 + 15


def test_a_device_without_a_free_block_verifies_in_the_spare_block(context, processes, tier):
    process = processes.start(num_blocks=FULL + 1)
    finished = process.answer_rightly(spec(context[:-2], max_tokens=2))

    assert finished.usage.cached.disk > 0
    assert tier.num_quarantined == 0
    process.harness.cache.check([])


@pytest.mark.parametrize("spoil", [spoil_fingerprint, spoil_kv])
def test_on_a_full_device_too_no_request_runs_on_what_is_not_verified(
    spoil, context: tuple[int, ...], processes: Processes, tier: MemoryTier
) -> None:  # type: ignore[no-untyped-def]
    """Where a running request held the last free block what came up was once believed for good, or
    made room itself for the copy that it was to be compared with.
    """
    spoil(tier)
    process = processes.start(num_blocks=2 + NUM_KEPT + 9)
    harness = process.harness
    busy = harness.submit(spec(tuple(range(9, 39)), max_tokens=6))
    while not (running := harness.live()[0].table) or len(running.blocks) < 9:
        harness.step()
    number = harness.submit(spec(context[:-2], max_tokens=2))
    arrival = harness.live()[-1].arrival
    assert arrival is not None
    assert arrival.feed is not None
    assert arrival.feed.has_all.wait(60.0)
    harness.step()
    assert harness.cache.num_cached_tokens(context) == 0, (
        "it came up, was found to be wrong, and went"
    )
    harness.run()

    harness.assert_complete(busy)
    harness.assert_complete(number)
    assert process.chain.flush(60.0)
    assert tier.num_quarantined == NUM_KEPT


def bring_up(chain: KvChain, context: tuple[int, ...]) -> None:
    restore = chain.arrivals.begin(list(context))
    assert restore is not None
    while not restore.is_over:
        chain.arrivals.wait_for_news()
        chain.arrivals.settle_one(restore)


def test_what_is_left_of_what_came_up_is_verified(context, processes, tier):
    """The end of it was evicted before there was a step; the rest was believed."""
    for key in list(tier.blocks)[:-2]:
        tier.blocks[key] = b"\x00\x00\x00\x3f" * BLOCK + tier.blocks[key][BLOCK * 4 :]
    process = processes.start()
    harness, chain = process.harness, process.chain
    bring_up(chain, context)
    harness.cache.evict_cold(2)
    tier.max_found = 0  # nor does it come again

    process.answer_rightly(spec(context))
    assert chain.flush(60.0)
    assert tier.num_quarantined == NUM_KEPT


def test_what_comes_up_last_is_verified_before_the_end(context, processes, tier):
    """What no request had time to ask for was verified at the end, and whether that failed
    forgotten.
    """
    spoil_kv(tier)
    process = processes.start()
    chain = process.chain
    bring_up(chain, context)

    process.end()

    assert tier.num_quarantined == NUM_KEPT
    assert not tier.blocks


def is_held_for_a_check(ids: Sequence[int]) -> bool:
    return ids[-1] < 0 and len(ids) > NUM_KEPT * BLOCK


def is_a_copy_for_a_check(table: BlockTable, start: int, end: int) -> bool:
    return end - start == 1


@pytest.mark.parametrize(
    ("name", "is_for_a_probe"), [("match", is_held_for_a_check), ("reserve", is_a_copy_for_a_check)]
)
def test_a_check_that_cannot_be_begun_fails_and_holds_nothing(
    context: tuple[int, ...],
    processes: Processes,
    tier: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_for_a_probe: Callable[..., bool],
) -> None:
    """It went up through the engine's thread, and that was the end; its blocks stayed locked."""
    spoil_kv(tier)
    process = processes.start()
    real, failures = getattr(process.harness.cache, name), [MemoryError()]

    def fail_once(*arguments: Any) -> Any:
        if failures and is_for_a_probe(*arguments):
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(process.harness.cache, name, fail_once)
    process.answer_rightly(spec(context))
    assert process.chain.flush(60.0)

    assert not failures
    assert tier.num_quarantined == NUM_KEPT


def test_a_check_that_fails_costs_nothing(context, processes, tier):
    process = processes.start()
    run = process.harness.engine._runner.run

    def fail_beside_checks(plan, checks=(), *stop):  # type: ignore[no-untyped-def]
        if checks:
            raise RuntimeError("boom")
        return run(plan)

    process.harness.engine._runner.run = fail_beside_checks  # type: ignore[method-assign]
    process.answer_rightly(spec(context))
    assert process.chain.flush(60.0)

    assert len(tier.fingerprints) == 0  # not believed, so quarantined; and kept anew without one
    assert len(tier.blocks) == (len(context) + 5) // BLOCK


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_check_that_cannot_be_looked_at_fails(
    context: tuple[int, ...],
    processes: Processes,
    tier: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
    num_failures: int,
) -> None:
    """Without memory to compare with, the step was run again on KV that was not verified."""
    spoil_kv(tier)
    process = processes.start()
    cache = process.harness.cache
    kv_error, failures = cache.kv_error, [MemoryError()] * num_failures

    def fail_first(*arguments: Any) -> float:
        if failures:
            raise failures.pop()
        return kv_error(*arguments)

    monkeypatch.setattr(cache, "kv_error", fail_first)
    process.answer_rightly(spec(context))

    assert not failures
