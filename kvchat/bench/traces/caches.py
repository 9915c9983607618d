"""Simulated caches of segments: the rule of kvchat's disk, LRU, LFU, and Belady's optimum.

All keep whole beginnings: a block goes before the block that it continues. Of the leaves the one of
least value goes first, from its end. A path that is being written is not evicted for itself; only
Belady's optimum, which knows the future, may refuse to keep a new block.
"""

import heapq
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvchat.bench.traces.paths import ROOT, PathTrace
from kvchat.cache.disk.eviction import (
    HALF_LIFE_S,
    Use,
    ageing_s,
    first_use,
    log2_value_of,
    used_again,
)


class SimulatedCache(ABC):
    """A cache of `capacity` blocks. `num_present` has the leading blocks that it has of a segment.

    A leaf of the present blocks is always in the heap, with its value or a lesser one. An entry
    whose value has grown is put back when it comes up.
    """

    may_refuse = False

    def __init__(self, trace: PathTrace, capacity: int) -> None:
        self._trace = trace
        self._capacity = capacity
        self.num_present: dict[int, int] = {}
        self._num_children: dict[int, int] = {}
        self._heap: list[tuple[float, int]] = []
        self.num_used = 0

    def like(self) -> "SimulatedCache":
        """Return an empty cache of this kind and size, of another machine."""
        return type(self)(self._trace, self._capacity)

    @abstractmethod
    def value(self, segment: int) -> float:
        """Return what the last present block of a segment is worth; it grows with uses."""

    @abstractmethod
    def note(self, path: Sequence[int], request: int) -> None:
        """Note that a request used these segments, present or not yet."""

    def written(self, segment: int) -> None:  # noqa: B027  most rules note nothing
        """Note that a segment, of which nothing was present, is written behind its parent."""

    def gone(self, segment: int) -> None:  # noqa: B027
        """Note that nothing of a segment is present any more."""

    def is_leaf(self, segment: int) -> bool:
        """Whether a segment is present and nothing behind it is."""
        return segment in self.num_present and not self._num_children.get(segment)

    def queue(self, segment: int) -> None:
        """Give a leaf its entry in the heap."""
        heapq.heappush(self._heap, (self.value(segment), segment))

    def find(self, path: Sequence[int]) -> int:
        """Return how many leading blocks of a path are present."""
        present, size, count = self.num_present, self._trace.size, 0
        for segment in path:
            here = present.get(segment, 0)
            count += here
            if here < size[segment]:
                break
        return count

    def add(self, path: Sequence[int], request: int) -> None:
        """Note a use of a path, and write what is missing, as far as there is room."""
        self.note(path, request)
        present, size = self.num_present, self._trace.size
        count = len(path)
        while count and present.get(path[count - 1], 0) < size[path[count - 1]]:
            count -= 1
        missing = path[count:]
        needed = sum(size[segment] - present.get(segment, 0) for segment in missing)
        room = needed
        if needed and not self.may_refuse:
            self.evict(self.num_used + needed - self._capacity, frozenset(path))
            room = min(needed, self._capacity - self.num_used)
        new = ROOT
        for segment in missing:
            if room <= 0:
                break
            new = segment if not present.get(segment) else ROOT
            room -= self._write(segment, room)
        if self.may_refuse:  # a use makes its value less, so every use needs a new entry
            new = next((segment for segment in reversed(path) if present.get(segment)), ROOT)
        if new and self.is_leaf(new):
            self.queue(new)
        if self.may_refuse:
            self.evict(self.num_used - self._capacity, frozenset())

    def _write(self, segment: int, room: int) -> int:
        """Write up to `room` missing blocks of a segment; return how many."""
        before = self.num_present.get(segment, 0)
        count = min(room, self._trace.size[segment] - before)
        self.num_present[segment] = before + count
        self.num_used += count
        if not before:
            parent = self._trace.parent[segment]
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
            self.written(segment)
        return count

    def evict(self, num_blocks: int, protected: frozenset[int]) -> None:
        """Evict blocks of the least value, those of `protected` segments excepted."""
        heap, stash = self._heap, []
        while num_blocks > 0 and heap:
            entry = heapq.heappop(heap)
            segment = entry[1]
            if not self.is_leaf(segment):
                continue
            present = self.num_present[segment]
            if segment in protected:
                stash.append(entry)
                continue
            value = self.value(segment)
            if value != entry[0]:
                heapq.heappush(heap, (value, segment))
                continue
            count = min(present, num_blocks)
            num_blocks -= count
            self.num_used -= count
            if count < present:
                self.num_present[segment] = present - count
                heapq.heappush(heap, (self.value(segment), segment))
            else:
                self._remove(segment)
        for entry in stash:
            heapq.heappush(heap, entry)

    def _remove(self, segment: int) -> None:
        del self.num_present[segment]
        self._num_children.pop(segment, None)
        self.gone(segment)
        parent = self._trace.parent[segment]
        left = self._num_children[parent] - 1
        self._num_children[parent] = left
        if parent and not left:
            self.queue(parent)


class RetentionRule(SimulatedCache):
    """kvchat's disk: the arithmetic of `cache/disk/eviction.py`, a block of the trace as a pack."""

    def __init__(self, trace: PathTrace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self._uses: dict[int, Use] = {}
        self._by_age: list[tuple[float, int]] = []  # leaves, as in the heap of values
        self._now_s = self._newest_s = 0.0
        self._half_life_s = HALF_LIFE_S

    def note(self, path: Sequence[int], request: int) -> None:
        now_s, is_one_shot = self._trace.time_s[request], bool(self._trace.one_shot[request])
        uses, present = self._uses, self.num_present
        if path and path[0] in present:
            self._newest_s = now_s
        new = first_use(now_s, is_one_shot)
        for segment in path:
            if segment in present:
                uses[segment] = used_again(uses[segment], now_s, is_one_shot)
            else:
                uses[segment] = new
        self._now_s = now_s

    def written(self, segment: int) -> None:
        self._newest_s = self._now_s
        parent = self._trace.parent[segment]
        if parent:
            use = self._uses[parent]
            self._uses[parent] = replace(use, num_followed=use.num_followed + 1)

    def gone(self, segment: int) -> None:
        del self._uses[segment]

    def queue(self, segment: int) -> None:
        super().queue(segment)
        heapq.heappush(self._by_age, (self._uses[segment].last_s, segment))

    def value(self, segment: int) -> float:
        trace, present = self._trace, self.num_present[segment]
        use = self._uses[segment]
        if present < trace.size[segment]:
            use = replace(use, num_followed=1)  # by the block of its own that was behind it
        tokens = trace.block_tokens
        position = (trace.start[segment] + present - 1) * tokens
        return log2_value_of(use, tokens, tokens, position, self._half_life_s)

    def evict(self, num_blocks: int, protected: frozenset[int]) -> None:
        if num_blocks > 0 and (half_life_s := self._ageing_s()) != self._half_life_s:
            self._half_life_s = half_life_s
            self._heap = [(self.value(s), s) for s in self.num_present if self.is_leaf(s)]
            heapq.heapify(self._heap)
        super().evict(num_blocks, protected)

    def _ageing_s(self) -> float:
        """Return how fast packs age now; a block is used no later than what it continues."""
        oldest, uses = self._by_age, self._uses
        while oldest:
            last_s, segment = oldest[0]
            if not self.is_leaf(segment):
                heapq.heappop(oldest)
            elif last_s < uses[segment].last_s:
                heapq.heapreplace(oldest, (uses[segment].last_s, segment))
            else:
                break
        return ageing_s(self._newest_s, oldest[0][0] if oldest else self._newest_s)


class Lru(SimulatedCache):
    """The least recently used goes first."""

    def __init__(self, trace: PathTrace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self._last: dict[int, int] = {}

    def note(self, path: Sequence[int], request: int) -> None:
        self._last.update(dict.fromkeys(path, request))

    def value(self, segment: int) -> float:
        return self._last[segment]


class Lfu(Lru):
    """The least often used since it was written goes first; of equal ones the least recent."""

    def __init__(self, trace: PathTrace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self._counts: dict[int, int] = {}

    def note(self, path: Sequence[int], request: int) -> None:
        super().note(path, request)
        counts = self._counts
        for segment in path:
            counts[segment] = counts.get(segment, 0) + 1

    def gone(self, segment: int) -> None:
        del self._counts[segment]

    def value(self, segment: int) -> float:
        return self._counts[segment] + self._last[segment] / len(self._trace)


class Belady(SimulatedCache):
    """The optimum of hits: the block whose next use is farthest goes first, or is not written."""

    may_refuse = True

    def __init__(self, trace: PathTrace, capacity: int, future: "Future") -> None:
        super().__init__(trace, capacity)
        self._future = future
        self._next: dict[int, float] = {}

    def like(self) -> "Belady":
        return Belady(self._trace, self._capacity, self._future)

    def note(self, path: Sequence[int], request: int) -> None:
        self._next.update(zip(path, self._future.next_uses(request), strict=True))

    def value(self, segment: int) -> float:
        return -self._next[segment]


class Future:
    """When each segment of each request is used next, by the machine of the request.

    With `machines` None all requests come to one cache.
    """

    def __init__(self, trace: PathTrace, machines: Sequence[int] | None = None) -> None:
        coming: dict[tuple[int, int], float] = {}
        self._first = array("q", bytes(8 * (len(trace) + 1)))
        uses = array("d")
        for request in reversed(range(len(trace))):
            machine = 0 if machines is None else machines[request]
            for segment in reversed(trace.path(request)):
                key = (machine, segment)
                uses.append(coming.get(key, math.inf))
                coming[key] = request
            self._first[request] = len(uses)
        self._uses = uses

    def next_uses(self, request: int) -> Sequence[float]:
        """Return the number of the next request of each of a request's segments, or infinity."""
        end = self._first[request]
        start = self._first[request + 1]
        return self._uses[start:end][::-1]
