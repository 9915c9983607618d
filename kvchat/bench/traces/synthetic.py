"""Synthetic traces: chats, agents, documents and scans, as `kvchat bench trace NAME` replays them.

Each imitates a habit by its known shape: turns that grow, system prompts that many share, pauses of
seconds to days, popular and unpopular documents, and programs that read everything once.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvchat.bench.traces.records import BLOCK_TOKENS, TraceRequest

_DAY_S = 86400.0


@dataclass(slots=True)
class _Ids:
    """Gives each block of each trace a number of its own."""

    last: int = 0

    def new(self, num_tokens: float) -> list[object]:
        """Return the blocks of so many tokens, at least one."""
        first = self.last + 1
        self.last += max(1, round(num_tokens / BLOCK_TOKENS))
        return list(range(first, self.last + 1))


@dataclass(slots=True)
class _Context:
    """A context that grows by turns; `prefix` is shared with others."""

    blocks: list[object]

    def turn(
        self, ids: _Ids, time_s: float, asked: float, answered: float, is_one_shot: bool = False
    ) -> TraceRequest:
        """Return the request of the next turn, and grow by it."""
        self.blocks = [*self.blocks, *ids.new(asked + answered)]
        whole = len(self.blocks) * BLOCK_TOKENS
        return TraceRequest(time_s, whole - int(answered), int(answered), self.blocks, is_one_shot)


def _popular(rng: random.Random, count: int, skew: float) -> Callable[[], int]:
    """Return what draws a number below `count`, the first ones more often (Zipf's law)."""
    weights = [1.0 / (rank + 1) ** skew for rank in range(count)]
    return lambda: rng.choices(range(count), weights)[0]


def _chats(rng: random.Random, ids: _Ids, rate: float) -> Iterator[TraceRequest]:
    """Conversations: about eight turns a minute apart, some taken up again hours or days later."""
    systems = [ids.new(600) for _ in range(3)]
    pending: list[tuple[float, int, _Context]] = []
    now_s, number = 0.0, 0
    while True:
        now_s += rng.expovariate(rate / 8)
        while pending and pending[0][0] < now_s:
            time_s, _, context = heapq.heappop(pending)
            yield context.turn(
                ids, time_s, rng.lognormvariate(4.5, 1), rng.lognormvariate(5.5, 0.7)
            )
            if rng.random() < 0.875:
                is_pause = rng.random() < 0.12
                pause_s = rng.uniform(0.1, 3) * _DAY_S if is_pause else rng.lognormvariate(4, 0.8)
                number += 1
                heapq.heappush(pending, (time_s + pause_s, number, context))
        number += 1
        heapq.heappush(pending, (now_s, number, _Context(rng.choice(systems))))


def _agents(rng: random.Random, ids: _Ids, rate: float) -> Iterator[TraceRequest]:
    """Agents: a fixed prompt of 6,000 to 20,000 tokens, then some thirty steps, seconds apart."""
    prompts = [ids.new(tokens) for tokens in (6000, 7000, 12000, 17000, 20000)]
    pending: list[tuple[float, int, _Context]] = []
    draw, now_s, number = _popular(rng, len(prompts), 1.0), 0.0, 0
    while True:
        now_s += rng.expovariate(rate / 30)
        while pending and pending[0][0] < now_s:
            time_s, _, context = heapq.heappop(pending)
            yield context.turn(
                ids, time_s, rng.lognormvariate(6, 1.1), rng.lognormvariate(4.5, 0.8)
            )
            if rng.random() < 1 - 1 / 30 and len(context.blocks) < 120_000 // BLOCK_TOKENS:
                number += 1
                heapq.heappush(pending, (time_s + rng.lognormvariate(2.5, 1), number, context))
        number += 1
        heapq.heappush(pending, (now_s, number, _Context(prompts[draw()])))


def _documents(rng: random.Random, ids: _Ids, rate: float) -> Iterator[TraceRequest]:
    """Questions on 300 documents of 2,000 to 60,000 tokens, a few at a time, some far oftener."""
    documents = [ids.new(min(60_000, 2000 + rng.lognormvariate(8.8, 1))) for _ in range(300)]
    draw, now_s = _popular(rng, len(documents), 0.9), 0.0
    while True:
        now_s += rng.expovariate(rate / 2.5)
        document, time_s = documents[draw()], now_s
        for _ in range(min(8, 1 + int(rng.expovariate(1 / 2)))):
            context = _Context(document)
            yield context.turn(
                ids, time_s, rng.lognormvariate(3.5, 0.6), rng.lognormvariate(5, 0.8)
            )
            time_s += rng.lognormvariate(3.5, 0.7)


def _scans(rng: random.Random, ids: _Ids, rate: float) -> Iterator[TraceRequest]:
    """A program that reads 500 files one after another, once, with one instruction before each."""
    now_s = 0.0
    while True:
        now_s += rng.expovariate(rate / 500)
        instruction, time_s = ids.new(400), now_s
        for _ in range(500):
            tokens = min(30_000, rng.lognormvariate(8, 0.9))
            yield _Context(instruction).turn(ids, time_s, tokens, 120, is_one_shot=True)
            time_s += rng.lognormvariate(1.5, 0.5)


_HABITS = {"chats": _chats, "agents": _agents, "documents": _documents, "scans": _scans}
# Requests a second of each habit, of about thirty people.
_RATES = {"chats": 0.02, "agents": 0.03, "documents": 0.01, "scans": 0.02}
NAMES = (*_HABITS, "mixed")


def synthetic(name: str, num_requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Yield so many requests of a habit, or of all `mixed`, in order of time."""
    ids = _Ids()
    names = tuple(_HABITS) if name == "mixed" else (name,)
    streams = [
        _ordered(_HABITS[each](random.Random(f"{seed} {each}"), ids, _RATES[each]))
        for each in names
    ]
    merged = heapq.merge(*streams, key=lambda request: request.time_s)
    for _ in range(num_requests):
        yield next(merged)


def _ordered(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield requests by time: some habits tell a whole visit at once."""
    waiting: list[tuple[float, int, TraceRequest]] = []
    for number, request in enumerate(requests):
        heapq.heappush(waiting, (request.time_s, number, request))
        if len(waiting) > 2000:
            yield heapq.heappop(waiting)[2]
