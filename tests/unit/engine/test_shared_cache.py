"""A shared cache behind the engine: what goes to it, what comes from it, and what it may cost.

The store is a dict; the model answers from the KV that it reads, so that a wrong block shows in
the text.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.shared.breaker import Breaker
from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import Layout, TierOpener
from kvchat.core.types import NO_MEMORY
from support.restarts import HISTORY, Process, Processes, alone, spec
from support.shared_stores import DictStore

LAYOUT = Layout(b"a remembering mo", 4, 4 * 8)
KEY = TeamKey("a secret of the team", LAYOUT)
NUM_SYSTEM = 21  # five blocks and a token
SYSTEM, OTHER = HISTORY[:NUM_SYSTEM], tuple(i % 7 + 32 for i in range(30))


class Machines:
    """Machines without a disk that share a store; `answers_in_s` is its time, by a timer."""

    def __init__(self, takes_all: bool = False, answers_in_s: float = 0.0) -> None:
        self.store = DictStore()
        self.store.before = self._take_time
        self._answers_in_s = answers_in_s
        self._now_s = 0.0
        opener = TierOpener("shared", self._open, is_shared=True, takes_all=takes_all)
        self._processes = Processes(None, [opener])

    def _take_time(self) -> None:
        self._now_s += self._answers_in_s

    def _open(self, layout: Callable[[], Layout]) -> SharedTier:
        tombstones = Tombstones(NO_MEMORY)
        timer = lambda: self._now_s  # noqa: E731
        # It rests for no time: each call may fail anew.
        breaker = Breaker(lambda: self.store.num_calls * 1e3)
        return SharedTier(self.store, KEY, LAYOUT, 1000, tombstones, timer=timer, breaker=breaker)

    def start(self) -> Process:
        process = self._processes.start()
        assert process.chain.flush(10)
        return process


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
    tokens, ending = other.answer(question)
    assert tokens == alone(question)
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


def spoil(store: DictStore, random_: random.Random) -> None:
    """Do one of the things that a store may do: fail, lie, lose, or swap records."""
    kind = random_.randrange(8)
    names = list(store.heads_kept)
    store.trouble = "it cannot be reached" if kind < 2 else ""
    if kind < 3 or not names:
        return
    name, other = random_.choice(names), random_.choice(names)
    if kind == 3:
        store.payloads.pop(name, None)
    elif kind == 4:
        store.heads_kept[name] = store.heads_kept[other]
    elif kind == 5:
        store.payloads[name] = store.payloads.get(other, b"")
    elif kind == 6:
        store.payloads[name] = os.urandom(random_.randrange(200))
    else:
        store.heads_kept[name] = os.urandom(random_.randrange(200))


def run_with_faults(num_faults: int, seed: int) -> None:
    """Answer on new machines while the store does anything; answers are those without it."""
    random_ = random.Random(seed)
    machines = Machines(takes_all=True)
    contexts = [tuple(random_.randrange(1, 31) for _ in range(40)) for _ in range(3)]
    for _ in range(num_faults):
        process = machines.start()
        spoil(machines.store, random_)
        context = random_.choice(contexts)
        question = spec(context[: random_.randrange(5, 40)], max_tokens=3)
        assert process.answer(question)[0] == alone(question)
        process.end()


@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_store_does_the_answers_stay(seed: int) -> None:
    run_with_faults(60, seed)


@pytest.mark.soak
def test_whatever_the_store_does_the_answers_stay_for_long() -> None:
    for seed in range(10):
        run_with_faults(1000, seed)
