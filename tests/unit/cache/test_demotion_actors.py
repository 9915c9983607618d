"""Sequences that share a small device and a small host: no sequence ever sees another's KV."""

import random
from dataclasses import dataclass

from kvchat.cache.arrivals import Arrival
from kvchat.cache.block_table import BlockTable
from kvchat.cache.kv_pool import CodedFormat, PlainFormat
from kvchat_kernels.kv_code import INT8
from support.cached_contexts import assert_kv_is_right, write_kv
from support.host_machine import GEOMETRIES, Machine
from support.soak_sizes import short_and_long


@dataclass
class Runner:
    """A sequence that grows, as a request does."""

    ids: list[int]
    table: BlockTable
    num_computed: int


class Household:
    """Sequences that come and go over a small device and a small host, one random act at a time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        layers = rng.choice(list(GEOMETRIES.values()))
        self.machine = Machine(
            rng.choice([8, 14]),
            rng.choice([4, 12, 60]),
            layers,
            kv_format=rng.choice([PlainFormat(), CodedFormat(INT8)]),
        )
        self.running: list[Runner] = []
        self.arrivals: list[Arrival] = []
        trunk = [rng.randrange(200) for _ in range(30)]
        self.stories = [
            [*trunk[:cut], *(rng.randrange(200) for _ in range(30 - cut))] for cut in (0, 4, 9, 30)
        ]
        self.num_promoted = 0

    def act(self) -> None:
        rng, machine = self.rng, self.machine
        action = rng.random()
        if action < 0.25 and len(self.running) < 2:
            self.start(rng.choice(self.stories)[: rng.randint(1, 30)])
        elif action < 0.5 and self.running:
            self.grow(rng.choice(self.running))
        elif action < 0.65 and self.running:
            self.end(self.running.pop(rng.randrange(len(self.running))))
        elif action < 0.8 and len(self.arrivals) < 2:
            arrival = machine.begin(rng.choice(self.stories))
            self.arrivals += [arrival] if arrival is not None else []
        elif action < 0.83 and self.arrivals:
            rng.choice(self.arrivals).give_up()
        elif action < 0.86:
            machine.manager.evict_cold(rng.randint(1, 5))
        elif action < 0.95:
            machine.thread.work(rng.randint(1, 3))
        machine.arrivals.settle()
        if rng.random() < 0.5:
            machine.demoter.demote_cold()
        self.num_promoted += sum(p.num_tokens for p in self.arrivals if p.is_over)
        self.arrivals = [p for p in self.arrivals if not p.is_over]
        machine.check([runner.table for runner in self.running])

    def start(self, ids: list[int]) -> None:
        table = self.machine.manager.match(ids)
        assert_kv_is_right(self.machine.manager, table, ids[: table.cached_len])
        self.running.append(Runner(ids, table, table.cached_len))

    def grow(self, runner: Runner) -> None:
        manager = self.machine.manager
        end = min(len(runner.ids), runner.num_computed + self.rng.randint(1, 9))
        if manager.reserve(runner.table, runner.num_computed, end):
            write_kv(manager, runner.table, runner.ids[:end], runner.num_computed)
            runner.num_computed = end
            manager.commit(runner.table, runner.ids, end)
        assert_kv_is_right(manager, runner.table, runner.ids[: runner.num_computed])

    def end(self, runner: Runner) -> None:
        self.machine.manager.release(runner.table, runner.ids[: runner.num_computed])


@short_and_long(4, 400)
def test_whoever_shares_device_and_host_only_ever_sees_their_own_kv(size: int) -> None:
    num_promoted = 0
    for seed in range(size):
        household = Household(random.Random(seed))
        for _ in range(250):
            household.act()
        num_promoted += household.num_promoted
    assert num_promoted > 15 * size
