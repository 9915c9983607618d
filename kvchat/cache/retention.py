"""What a full store forgets first. Pure functions of what is known about its packs.

A pack goes before the packs it continues, never after: KV without its prefix is useless. Among
those that could go, the one used longest ago goes first.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# What nobody has read for so long expires.
TIME_TO_LIVE_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class KnownPack:
    """What retention knows of a pack: its blocks' keys, the key before them, and its last use."""

    parent: bytes
    keys: tuple[bytes, ...]
    last_used: float
    num_bytes: int


def eviction_order(packs: Mapping[bytes, KnownPack], newcomer: bytes) -> Iterator[bytes]:
    """Yield the names of packs in the order in which they should go.

    `newcomer` is the parent of the pack that room is made for: what that continues stays.
    """
    owners = {key: name for name, pack in packs.items() for key in pack.keys}
    parents = [newcomer, *(pack.parent for pack in packs.values())]
    num_children = Counter(owners[parent] for parent in parents if parent in owners)
    leaves = [(p.last_used, name) for name, p in packs.items() if not num_children[name]]
    heapq.heapify(leaves)
    while leaves:
        _, name = heapq.heappop(leaves)
        yield name
        parent = owners.get(packs[name].parent)
        if parent is not None:
            num_children[parent] -= 1
            if not num_children[parent]:
                heapq.heappush(leaves, (packs[parent].last_used, parent))
