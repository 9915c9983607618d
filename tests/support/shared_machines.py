"""Machines that share a store which does anything that a store may do.

The model answers from the KV that it reads, so that a wrong block shows in the text.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import count

from kvchat.cache.breaker import Breaker
from kvchat.cache.keys import encode_ids
from kvchat.cache.shared.opening import open_store
from kvchat.cache.shared.store import Deadlines, SharedStore
from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import Layout, TierOpener
from kvchat.core.types import NO_MEMORY
from support.faulty_server import FaultyServer
from support.restarts import Process, Processes, spec
from support.shared_stores import DictStore

LAYOUT = Layout(b"a remembering mo", 4, 4 * 8)
QUICK = Deadlines(first_s=0.02, whole_s=0.1)
KEY = TeamKey("a secret of the team", LAYOUT)


class Machines:
    """Machines without a disk that share a store: a dict with `answers_in_s` as its time, by a
    timer of its own, or what `real` opens, which really takes its time.
    """

    def __init__(
        self,
        takes_all: bool = False,
        answers_in_s: float = 0.0,
        real: Callable[[], SharedStore] | None = None,
    ) -> None:
        self.store = DictStore()
        self.store.before = self._take_time
        self._real = real
        self._answers_in_s = answers_in_s
        self._now_s = 0.0
        opener = TierOpener("shared", self._open, is_shared=True, takes_all=takes_all)
        self._processes = Processes(None, [opener])

    def _take_time(self) -> None:
        self._now_s += self._answers_in_s

    def _open(self, layout: Callable[[], Layout]) -> SharedTier:
        tombstones = Tombstones(NO_MEMORY)
        if self._real is not None:
            rested = Breaker(count(0.0, 1e3).__next__)
            return SharedTier(self._real(), KEY, LAYOUT, 1000, tombstones, breaker=rested)
        timer = lambda: self._now_s  # noqa: E731
        # It rests for no time: each call may fail anew.
        breaker = Breaker(lambda: self.store.num_calls * 1e3)
        return SharedTier(self.store, KEY, LAYOUT, 1000, tombstones, timer=timer, breaker=breaker)

    def start(self) -> Process:
        process = self._processes.start()
        assert process.chain.flush(10)
        return process


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
        process.answer_rightly(question)
        process.end()


def run_on_faulty_server(num_faults: int, seed: int) -> Counter[str]:
    """Answer beside a real server that fails; answers are those without it, and what the server
    has tells nothing. Each machine meets some faults; return how many there were of each kind.
    """
    random_, kinds = random.Random(seed), Counter[str]()
    with closing(FaultyServer()) as server:
        url = f"valkey://127.0.0.1:{server.port}/0"
        machines = Machines(True, real=lambda: open_store(url, QUICK))
        contexts = [tuple(random_.randrange(1, 31) for _ in range(100)) for _ in range(3)]
        while kinds.total() < num_faults:
            process = machines.start()
            for _ in range(random_.randrange(1, 5)):
                kinds[server.fault(random_)] += 1
                context = random_.choice(contexts)
                question = spec(context[: random_.randrange(5, 100)], max_tokens=3)
                process.answer_rightly(question)
            process.end()
            server.mend()
        content = server.content()
    assert all(encode_ids(each[n : n + 4]) not in content for each in contexts for n in range(96))
    return kinds
