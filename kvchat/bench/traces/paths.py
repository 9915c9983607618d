"""PathTrace: a trace whose blocks are merged into segments, so that a request is few steps long.

A segment is a longest run of blocks that every request of the trace has all of or none of, so all
of its blocks have one history. A request is a path of segments from the root, named by its last.
"""

from array import array
from collections.abc import Iterable

from kvchat.bench.traces.records import TraceRequest

ROOT = 0


class PathTrace:
    """The requests of a trace and its segments, by number.

    parent, size, start   of a segment: the one before it, its blocks, the blocks before it
    end, time_s, prompt_tokens, answer_tokens, one_shot, machine   of a request; `end` is the last
                          segment of its path
    """

    def __init__(self, block_tokens: int, requests: Iterable[TraceRequest]) -> None:
        self.block_tokens = block_tokens
        self.parent = [ROOT]
        self._ids: list[list[object]] = [[]]
        self._children: list[dict[object, int]] = [{}]
        self.end, self.prompt_tokens, self.answer_tokens = array("q"), array("q"), array("q")
        self.time_s = array("d")
        self.one_shot = bytearray()
        self.machine: list[str] = []
        latest = -float("inf")
        for request in requests:
            latest = max(latest, request.time_s)
            self.end.append(self._insert(list(request.blocks)))
            self.time_s.append(latest)
            self.prompt_tokens.append(max(1, request.prompt_tokens))
            self.answer_tokens.append(max(0, request.answer_tokens))
            self.one_shot.append(request.is_one_shot)
            self.machine.append(request.machine)
        self.size = [len(ids) for ids in self._ids]
        self._ids, self._children = [], []
        self.start = self._starts()

    def __len__(self) -> int:
        return len(self.end)

    @property
    def num_blocks(self) -> int:
        """Blocks that differ."""
        return sum(self.size)

    def path(self, request: int) -> list[int]:
        """Return a request's segments, the first first."""
        parent, segment, path = self.parent, self.end[request], []
        while segment:
            path.append(segment)
            segment = parent[segment]
        path.reverse()
        return path

    def _insert(self, blocks: list[object]) -> int:
        """Add a path; return its last segment."""
        node, position = ROOT, 0
        while position < len(blocks):
            child = self._children[node].get(blocks[position])
            if child is None:
                return self._new(node, blocks[position:])
            ids = self._ids[child]
            given = blocks[position : position + len(ids)]
            if given == ids:
                node, position = child, position + len(ids)
                continue
            same = next(
                (n for n, (a, b) in enumerate(zip(given, ids, strict=False)) if a != b), len(given)
            )
            node, position = self._split(child, same), position + same
        return node

    def _new(self, parent: int, ids: list[object]) -> int:
        self.parent.append(parent)
        self._ids.append(ids)
        self._children.append({})
        self._children[parent][ids[0]] = len(self.parent) - 1
        return len(self.parent) - 1

    def _split(self, segment: int, count: int) -> int:
        """Split a segment; return the new upper one. The lower one keeps its number, and so the
        paths that end there.
        """
        ids = self._ids[segment]
        upper = self._new(self.parent[segment], ids[:count])
        self._ids[segment] = ids[count:]
        self._children[upper][ids[count]] = segment
        self.parent[segment] = upper
        return upper

    def _starts(self) -> list[int]:
        """Return how many blocks stand before each segment."""
        start = [-1] * len(self.parent)
        start[ROOT] = 0
        for segment in range(len(start)):
            pending = []
            while start[segment] < 0:
                pending.append(segment)
                segment = self.parent[segment]
            for below in reversed(pending):
                before = self.parent[below]
                start[below] = start[before] + self.size[before]
        return start
