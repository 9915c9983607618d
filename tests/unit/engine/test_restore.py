"""Prompts that come back from a slower tier: same answers, fewer tokens computed, no dead ends.

The model here answers from what it reads back from its KV, so a block restored to the wrong place,
or not at all, shows in the text.
"""

from dataclasses import replace

from kvchat.cache.keys import chain_keys, encode_ids
from kvchat.core.types import FinishReason
from support.chains import compute_at
from support.engine_harness import EngineHarness
from support.memory_tier import MemoryTier
from support.restarts import HISTORY, Processes, alone, spec


def test_a_new_process_computes_only_what_is_new(processes: Processes) -> None:
    first = processes.start()
    answer, _ = first.answer(spec(HISTORY))
    first.end()
    context = (*HISTORY, *answer, 7, 8, 9)

    finished = processes.start().answer_rightly(spec(context))

    num_kept = (len(HISTORY) + len(answer) - 1) // 4 * 4
    assert finished.usage.cached.disk == num_kept
    assert finished.usage.cached.device == 0
    assert finished.usage.prefilled_tokens == len(context) - num_kept


def test_every_branch_comes_back_with_its_own_tokens(processes: Processes) -> None:
    first = processes.start()
    branches = [(*HISTORY[:cut], 33 + n, *HISTORY[:9]) for n, cut in enumerate((22, 24, 49))]
    for branch in (HISTORY, *branches):
        first.answer(spec(branch))
    first.end()

    for branch in (HISTORY, *branches):
        finished = processes.start().answer_rightly(spec(branch))
        assert finished.usage.cached.disk == (len(branch) - 1) // 4 * 4


def test_a_tier_reads_what_a_find_has_found_after_another_engines_find(processes, tier):
    """The tier of these tests read the keys of the last find, of whichever engine: once in sixty
    runs an engine that saved beside a restore gave it another context's blocks.
    """
    short, long = HISTORY[:20], (*HISTORY[:12], *range(1, 31))
    for ids in (short, long):
        processes.end_one(spec(ids))
    found, other = (
        tier.find(chain_keys(tier.root, encode_ids(ids), 16), b"") for ids in (long, short)
    )

    assert [len(tier.read(run)) // 32 for run in found] == [run.num_blocks for run in found]
    assert tier.read(found[-1]) != tier.read(other[-1])


def test_what_is_kept_of_a_request_says_whether_anybody_will_go_on(processes, tier):
    process = processes.start()
    process.answer(replace(spec(HISTORY), is_one_shot=True))
    process.answer(spec((9, 8, *HISTORY)))
    process.end()

    assert tier.one_shots == [True, False]


def test_no_block_is_written_twice(processes: Processes, tier: MemoryTier) -> None:
    """The tier itself refuses one that is there; what the count shows is that all were wanted."""
    context = HISTORY
    for _ in range(3):
        process = processes.start()
        for turn in range(3):
            answer, _ = process.answer(spec(context))
            context = (*context, *answer, turn + 1)
        process.end()

    assert tier.num_written == len(tier.blocks)
    assert tier.num_written == (len(context) - 2) // 4


def test_what_is_on_the_device_is_not_read(processes: Processes, tier: MemoryTier) -> None:
    process = processes.start()
    process.answer(spec(HISTORY))
    process.answer(spec((*HISTORY, 5, 6)))

    assert tier.num_read == 0


def test_a_damaged_record_costs_time_and_no_word(processes: Processes, tier: MemoryTier) -> None:
    processes.end_one(spec(HISTORY))

    def fail() -> None:
        if tier.num_read:
            raise OSError("the disk is on fire")

    tier.before_read = fail

    finished = processes.start().answer_rightly(spec(HISTORY))

    assert 0 < finished.usage.cached.disk < len(HISTORY) // 2 + 4


def test_a_tier_that_cannot_be_opened_is_none(processes: Processes) -> None:
    def refuse() -> MemoryTier:
        raise OSError("no such disk")

    harness = EngineHarness(open_tier=refuse)
    number = harness.submit(spec(HISTORY))
    harness.run()

    assert harness.generated(number) == alone(spec(HISTORY))
    harness.engine.close()


def test_a_cancelled_request_does_not_wait_for_the_disk(processes, tier):
    processes.end_one(spec(HISTORY))
    may_read = tier.held()
    process = processes.start()

    number = process.harness.submit(spec(HISTORY))
    process.harness.step()
    process.harness.engine.cancel(number)
    process.harness.run()

    assert process.harness.ending(number).reason is FinishReason.CANCELLED
    may_read.set()


def test_others_run_while_one_waits_for_the_disk(processes: Processes, tier: MemoryTier) -> None:
    processes.end_one(spec(HISTORY))
    may_read = tier.held()
    process = processes.start()

    waiting = process.harness.submit(spec(HISTORY))
    other = (9, 8, 7)  # nothing to find: shorter than a block
    running = process.harness.submit(spec(other))
    while process.harness.generated(running) != alone(spec(other)):
        process.harness.step()
    assert not process.harness.generated(waiting)

    may_read.set()
    process.harness.run()
    assert process.harness.generated(waiting) == alone(spec(HISTORY))


def test_a_restore_that_takes_too_long_is_not_waited_for(processes, tier):
    processes.end_one(spec(HISTORY))
    may_read = tier.held()
    process = processes.start()
    compute_at(process.chain, 1e6)

    finished = process.answer_rightly(spec(HISTORY))

    assert finished.usage.cached.disk == 0
    may_read.set()


def test_a_device_too_small_for_what_is_kept_takes_what_fits(processes: Processes) -> None:
    processes.end_one(spec(HISTORY))

    process = processes.start(num_blocks=16)  # fifteen blocks of four for fifty-six tokens
    finished = process.answer_rightly(spec(HISTORY))

    assert finished.usage.cached.disk > 0


# Prefetching


def test_a_context_comes_up_before_anybody_asks(processes: Processes, tier: MemoryTier) -> None:
    first = processes.start()
    answer, _ = first.answer(spec(HISTORY))
    first.end()
    context = (*HISTORY, *answer)
    process = processes.start()

    process.harness.engine.prefetch(context)
    process.harness.run()
    num_read = tier.num_read
    finished = process.answer_rightly(spec((*context, 3, 4)))

    assert num_read == tier.num_read > 0
    assert finished.usage.cached.disk == num_read * 4
    assert finished.usage.cached.device == 0


def test_a_request_goes_on_with_the_prefetch_that_foresaw_it(processes, tier):
    process = processes.after(spec(HISTORY))

    process.harness.engine.prefetch(HISTORY)
    process.answer_rightly(spec((*HISTORY, 3)))

    assert tier.num_read == len(HISTORY) // 4


def test_a_prefetch_brings_nothing_up_that_is_forgotten_meanwhile(processes, tier):
    """It went on, and what had been deleted for good was in memory until the end."""
    process = processes.after(spec(HISTORY))
    may_read = tier.held()

    process.harness.engine.prefetch(HISTORY)
    process.harness.engine.forget([(HISTORY, 0)], lambda: None)
    may_read.set()
    process.harness.run()
    tier.blocks.clear()
    finished = process.answer_rightly(spec((*HISTORY, 3)))

    assert finished.usage.cached.total == 0


def test_a_prefetch_nobody_wanted_is_given_up(processes: Processes) -> None:
    process = processes.after(spec(HISTORY))

    process.harness.engine.prefetch(HISTORY)
    process.harness.engine.prefetch((5, 6, 7))
    other = (9, *HISTORY)
    finished = process.answer_rightly(spec(other))

    assert finished.usage.cached.total == 0
