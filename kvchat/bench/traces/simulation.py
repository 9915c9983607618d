"""Simulation: replays a trace through the tiers of one machine or many, under a rule of retention.

Each tier has everything written to it that its machine computes, as the disk and a shared store
have, so a tier is a cache of its own. A prompt takes its beginning from the fastest tier that has
it, and each slower one adds what it has more; `cache/planner.py` says how much of it is computed
meanwhile. Requests do not wait for each other.
"""

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvchat.bench.traces.caches import Belady, Future, Lfu, Lru, RetentionRule, SimulatedCache
from kvchat.bench.traces.paths import PathTrace
from kvchat.cache.planner import Planner, PrefillRate, from_tier

SHARED, DISK = "shared", "disk"
# A machine that has at least this share of a prompt gets it; else the least busy one.
_AFFINITY = 0.5
# A machine is too busy for that with so many times the mean of the tokens that all have had.
_TOO_BUSY = 1.5


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier to simulate. The one named `shared` is one for all machines.

    bytes_per_s   infinite where the model reads KV in place
    price         of a GB for a month, in any currency
    """

    name: str
    num_bytes: int
    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    price: float = 0.0

    @property
    def is_shared(self) -> bool:
        return self.name == SHARED


@dataclass(frozen=True, slots=True)
class Speed:
    """A model on a machine: bytes of a token's KV, first tokens a second that are computed, and the
    context after which a token takes twice as long.
    """

    token_bytes: float
    tokens_per_s: float
    half_context: float = 8192.0

    def planner(self, tiers: Sequence[TierPlan]) -> Planner:
        """Return the planner that knows these rates."""
        prefill = PrefillRate(None, self.half_context)
        prefill.of_long = self.tokens_per_s
        planner = Planner(prefill)
        planner.rates = {from_tier(tier.name): tier.bytes_per_s for tier in tiers}
        return planner

    def seconds(
        self, planner: Planner, tiers: Sequence[TierPlan], found: Sequence[int], num_tokens: int
    ) -> float:
        """Return the time to a prompt's first token, where `found` of it are in each tier."""
        start, total = 0, 0.0
        for tier, end in zip(tiers, found, strict=True):
            if end <= start:
                continue
            if math.isfinite(tier.bytes_per_s):
                total += self._arrival_s(planner, tier, start, end - start)
            start = end
        return total + (planner.seconds_to_compute(num_tokens - start, start) or 0.0)

    def _arrival_s(self, planner: Planner, tier: TierPlan, start: int, count: int) -> float:
        """Return how long the next tokens take, where a part is computed while the rest is read."""
        num_bytes, name = int(count * self.token_bytes), from_tier(tier.name)
        front = planner.front(name, count, num_bytes, start, tier.latency_s)
        compute_s = planner.seconds_to_compute(front, start) or 0.0
        if front >= count:
            return compute_s
        read_s = tier.latency_s + (count - front) * self.token_bytes / tier.bytes_per_s
        return max(compute_s, read_s)


Rule = Callable[[PathTrace, int, TierPlan, Sequence[int]], SimulatedCache]


def _kvchat(trace: PathTrace, size: int, tier: TierPlan, machines: Sequence[int]) -> SimulatedCache:
    """kvchat's own: its disk has the rule of `eviction.py`, memory and stores go by recency."""
    return RetentionRule(trace, size) if tier.name == DISK else Lru(trace, size)


RULES: dict[str, Rule] = {
    "kvchat": _kvchat,
    "LRU": lambda trace, size, tier, machines: Lru(trace, size),
    "LFU": lambda trace, size, tier, machines: Lfu(trace, size),
    "Belady": lambda trace, size, tier, machines: Belady(
        trace, size, Future(trace, None if tier.is_shared else machines)
    ),
}


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay gave.

    found_tokens    tokens of prompts that came from each tier, by its name
    prompt_tokens   of all prompts
    first_token_s   of each request
    saved_share     the share of all computing of prompts that was not needed
    """

    rule: str
    found_tokens: dict[str, int]
    prompt_tokens: int
    first_token_s: Sequence[float]
    saved_share: float

    @property
    def hit_rate(self) -> float:
        return sum(self.found_tokens.values()) / self.prompt_tokens


def routed(trace: PathTrace, num_machines: int) -> tuple[Sequence[int], int]:
    """Return each request's machine, and how many machines there are.

    A trace that names machines keeps them. Else a request goes where half of its prompt or more was
    last, unless that machine has had far more than its share; then to the least busy one.
    """
    names = {name: number for number, name in enumerate(sorted(set(trace.machine)))}
    if len(names) > 1:
        return [names[name] for name in trace.machine], len(names)
    if num_machines == 1:
        return array("q", bytes(8 * len(trace))), 1
    return _spread(trace, num_machines), num_machines


def _spread(trace: PathTrace, num_machines: int) -> Sequence[int]:
    owner: dict[int, int] = {}
    loads, total, chosen = [0] * num_machines, 0, array("q")
    idle = [(0, machine) for machine in range(num_machines)]
    for request in range(len(trace)):
        path = trace.path(request)
        num_blocks = trace.start[path[-1]] + trace.size[path[-1]] if path else 0
        known = next((s for s in reversed(path) if s in owner), None)
        has = trace.start[known] + trace.size[known] if known is not None else 0
        machine = owner[known] if known is not None else -1
        most = _TOO_BUSY * total / num_machines + trace.prompt_tokens[request]
        if machine < 0 or has < _AFFINITY * num_blocks or loads[machine] > most:
            while idle[0][0] != loads[idle[0][1]]:
                heapq.heapreplace(idle, (loads[idle[0][1]], idle[0][1]))
            machine = idle[0][1]
        loads[machine] += trace.prompt_tokens[request]
        total += trace.prompt_tokens[request]
        owner.update(dict.fromkeys(path, machine))
        chosen.append(machine)
    return chosen


def replay(
    trace: PathTrace,
    tiers: Sequence[TierPlan],
    speed: Speed,
    rule: str,
    machines: Sequence[int],
) -> Replay:
    """Replay all requests through the tiers, the fastest first; `machines` has each one's."""
    new_cache, block_tokens = RULES[rule], trace.block_tokens
    sizes = [int(tier.num_bytes / (speed.token_bytes * block_tokens)) for tier in tiers]
    caches = [
        _caches(new_cache, trace, size, tier, machines)
        for size, tier in zip(sizes, tiers, strict=True)
    ]
    planner = speed.planner(tiers)
    by_tier: Counter[str] = Counter({tier.name: 0 for tier in tiers})
    first_token_s, computed_s, all_s = array("d"), 0.0, 0.0
    for request, machine in enumerate(machines):
        path, num_tokens = trace.path(request), trace.prompt_tokens[request]
        found, most = [], 0
        for tier, tier_caches in zip(tiers, caches, strict=True):
            cache = tier_caches[0 if tier.is_shared else machine]
            here = min(cache.find(path) * block_tokens, num_tokens - 1)
            cache.add(path, request)
            if here > most:
                by_tier[tier.name] += here - most
                most = here
            found.append(most)
        first_token_s.append(speed.seconds(planner, tiers, found, num_tokens))
        computed_s += planner.seconds_to_compute(num_tokens - most, most) or 0.0
        all_s += planner.seconds_to_compute(num_tokens) or 0.0
    saved = 1 - computed_s / all_s if all_s else 0.0
    return Replay(rule, dict(by_tier), sum(trace.prompt_tokens), first_token_s, saved)


def _caches(
    new_cache: Rule, trace: PathTrace, size: int, tier: TierPlan, machines: Sequence[int]
) -> list[SimulatedCache]:
    count = 1 if tier.is_shared else max(machines, default=0) + 1
    first = new_cache(trace, size, tier, machines)
    return [first, *(first.like() for _ in range(count - 1))]
