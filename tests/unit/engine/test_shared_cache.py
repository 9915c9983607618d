"""A shared cache behind the engine: what goes to it, what comes from it, and what it may cost.

The store is a dict; the model answers from the KV that it reads, so that a wrong block shows in
the text.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import Layout, TierOpener
from kvchat.core.types import NO_MEMORY
from support.restarts import HISTORY, Processes, spec
from support.shared_machines import KEY, LAYOUT, Machines, run_with_faults
from support.shared_stores import DictStore

NUM_SYSTEM = 21  # five blocks and a token
SYSTEM, OTHER = HISTORY[:NUM_SYSTEM], tuple(i % 7 + 32 for i in range(30))


def stored_blocks(store: DictStore, ids: tuple[int, ...]) -> int:
    """Return how many leading blocks of a context a machine finds in the store."""
    encoded = encode_ids(ids)
    tier = SharedTier(store, KEY, LAYOUT, 1000, Tombstones(NO_MEMORY))
    return tier.peek(chain_keys(root_key(LAYOUT.identity), encoded, LAYOUT.ids_bytes), encoded)


def test_another_machine_reads_the_system_prompt_and_nothing_of_the_chat() -> None:
    machines = Machines()
    first, asked = machines.start(), replace(spec(HISTORY), num_shared=NUM_SYSTEM)
    first.answer(asked)
    first.end()

    assert stored_blocks(machines.store, HISTORY) == NUM_SYSTEM // 4

    other, question = machines.start(), spec(SYSTEM + OTHER)
    ending = other.answer_rightly(question)
    assert ending.usage.cached.places["shared"] == NUM_SYSTEM // 4 * 4
    other.end()
    assert stored_blocks(machines.store, SYSTEM + OTHER) == NUM_SYSTEM // 4


def test_with_share_all_everything_goes_there() -> None:
    machines = Machines(takes_all=True)
    first = machines.start()
    first.answer(spec(HISTORY))
    first.end()

    assert stored_blocks(machines.store, HISTORY) == len(HISTORY) // 4


def test_a_context_that_is_shared_later_goes_there_and_is_counted() -> None:
    machines, counts = Machines(), list[int]()
    first = machines.start()
    first.answer(spec(HISTORY))
    assert stored_blocks(machines.store, HISTORY) == 0

    first.harness.engine.share(HISTORY[:30], counts.append)
    assert first.chain.flush(10)

    assert counts == [28]
    assert stored_blocks(machines.store, HISTORY) == 7
    first.end()


def test_what_is_forgotten_here_is_removed_there() -> None:
    machines, done = Machines(takes_all=True), list[bool]()
    first = machines.start()
    first.answer(spec(HISTORY))
    assert first.chain.flush(10)

    first.harness.engine.forget([(HISTORY, 20)], lambda: done.append(True))
    assert first.chain.flush(10)

    assert done
    assert stored_blocks(machines.store, HISTORY) <= 5
    first.end()


def test_a_store_that_is_far_away_is_not_asked_for_what_is_computed_sooner() -> None:
    machines = Machines(answers_in_s=1e6)
    first = machines.start()
    num_calls = machines.store.num_calls

    first.answer(spec(HISTORY))

    assert machines.store.num_calls == num_calls
    first.end()


def test_a_store_that_is_not_reached_yet_is_not_waited_for() -> None:
    """Connecting to a store 200 ms away took four round trips, in which the chat computed nothing:
    a quarter of a first answer's time.
    """
    reached = threading.Event()

    def open_late(layout: Callable[[], Layout]) -> None:
        assert reached.wait(60)

    processes = Processes(None, [TierOpener("shared", open_late, is_shared=True)])
    chat = processes.start()

    chat.answer_rightly(spec(HISTORY))

    reached.set()
    chat.end()


@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_store_does_the_answers_stay(seed: int) -> None:
    run_with_faults(60, seed)
