"""Eviction order of packs: the least value per byte first. Pure functions.

The value of a pack is its expected rate of use times the time to compute it again.

*How often.* Every use predicts another, and half as strongly with each half-life H that passes:
after uses at t_i of weight w_i the expected rate is W(t) = sum of w_i 2^(-(t - t_i)/H). Recency
alone is the case of one use, frequency that of H without end (Lee et al., "LRFU", IEEE Trans.
Computers 2001). Its logarithm is a straight line: log2 W(t) = (c - t)/H, with the *credit*
c = H log2 sum of w_i 2^(t_i/H), a moment in time that only a use changes. So two packs compare the
same at any t, and one number stands for all uses. A chat asked once and left uses what it reads
with a weight of 2^-6: its packs are as good as six half-lives old when they are written, while a
system prompt that scripts send a hundred times a day stays. A pack that b chats have continued is
wanted by each of them, and by the next to begin like them: b times the rate.

*How fast it ages.* H is a day where the last uses of a store's packs span more than a week. A store
that is full within hours forgets by the hour: where they span S seconds a pack ages by half in S/8,
so that recency has its say beside frequency and cost. Its frequency is what the credit says, which
keeps to days. Replayed traces chose the eighth (docs/benchmarks/traces.md): with a day for all
stores a small one had up to 20 points fewer hits than by recency alone.

*What it costs.* Computing a token takes a(1 + p/A) seconds at position p, since attention looks
back at p tokens and all else does not depend on it; with A the context at which both take as long.
n tokens from position s take a n (1 + (s + n/2)/A). Within one identity `a` is common to all.

A pack goes before the packs it continues, never after: KV without its prefix is useless. What a pin
names stays, and so does what that continues.
"""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kvchat.cache.disk.model_dirs import FILE_OVERHEAD_BYTES
from kvchat.cache.tier import Layout, PackHead

# A pack unused for this long expires.
TIME_TO_LIVE_S = 30 * 86400.0
HALF_LIFE_S = 86400.0
# A pack ages by half in this share of the time that all packs' last uses span, but in no more than
# HALF_LIFE_S; in steps of half an octave, so that orders do not change with each use.
_SHARE_OF_SPAN = 1 / 8
# Seconds do not decide an order.
_LEAST_SPAN_S = 600.0
# A pause in which nothing is used makes packs no older than this.
MOST_PAUSE_S = 7 * 86400.0
# A use so long after now was noted before the clock was set back.
_CLOCK_ERROR_S = 86400.0
# Uses this close to each other are one: a turn looks for its context more than once.
_SAME_USE_S = 60.0
_ONE_SHOT_WEIGHT = 2.0**-6
# A context of so many tokens spends as long on attention as on everything else: measured between
# 2,000 (0.4 B parameters, two CPU cores) and 25,000 (8 B on a GPU, from its counts of operations).
_ATTENTION_TOKENS = 8192.0


@dataclass(frozen=True, slots=True)
class Use:
    """What is remembered of a pack's uses. `last_s` and `credit_s` are seconds since the epoch.

    num_uses       how many there were, writing it included
    num_followed   how many packs have been written behind it
    """

    last_s: float
    credit_s: float
    num_uses: int = 1
    num_followed: int = 0


def first_use(now_s: float, is_one_shot: bool) -> Use:
    """Return what is known of a pack that is written now."""
    return Use(now_s, now_s + HALF_LIFE_S * math.log2(_weight(is_one_shot)))


def used_again(use: Use, now_s: float, is_one_shot: bool) -> Use:
    """Return what is known after another use."""
    last_s = now_s if now_s > use.last_s else use.last_s
    if now_s - use.last_s < _SAME_USE_S and (is_one_shot or use.credit_s >= use.last_s):
        return Use(last_s, use.credit_s, use.num_uses, use.num_followed)
    old = (use.credit_s - now_s) / HALF_LIFE_S
    weight = 2.0 ** min(old, 60.0) + _weight(is_one_shot)
    credit_s = now_s + HALF_LIFE_S * math.log2(weight)
    return Use(last_s, credit_s, use.num_uses + 1, use.num_followed)


def _weight(is_one_shot: bool) -> float:
    return _ONE_SHOT_WEIGHT if is_one_shot else 1.0


def clock_shift(newest_s: float, now_s: float) -> float:
    """Return by how many seconds all uses are moved before their age is judged, 0 mostly.

    `newest_s` is the last use. A clock that jumps ahead by years looks like a pause without a use:
    neither may delete packs. If the clock was set back, the last use becomes one of now.
    """
    pause_s = now_s - newest_s
    if not math.isfinite(pause_s):
        return 0.0
    return pause_s if pause_s < -_CLOCK_ERROR_S else max(0.0, pause_s - MOST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class KnownPack:
    """What retention knows of a pack: its blocks' keys, the key before them, and its uses."""

    parent: bytes
    keys: tuple[bytes, ...]
    num_tokens: int
    num_bytes: int
    use: Use


def known_pack(head: PackHead, layout: Layout, use: Use) -> KnownPack:
    """Return what is known of a pack by its head."""
    keys = tuple(head.keys(layout))
    num_bytes = len(keys) * layout.block_bytes + FILE_OVERHEAD_BYTES
    return KnownPack(head.parent, keys, len(keys) * layout.block_size, num_bytes, use)


def ageing_s(newest_s: float, oldest_s: float) -> float:
    """Return in how many seconds a pack ages by half, of packs last used between these moments."""
    span_s = max(_LEAST_SPAN_S, newest_s - oldest_s)
    steps = math.ceil(2 * math.log2(HALF_LIFE_S / (_SHARE_OF_SPAN * span_s)))
    return HALF_LIFE_S * 2.0 ** (-max(0, steps) / 2)


def log2_value(pack: KnownPack, position: int, half_life_s: float = HALF_LIFE_S) -> float:
    """Return the logarithm of a pack's value for a byte, up to what all packs have in common.

    `position` counts the tokens before it; `half_life_s` is how fast it ages.
    """
    return log2_value_of(pack.use, pack.num_tokens, pack.num_bytes, position, half_life_s)


def log2_value_of(
    use: Use, num_tokens: int, num_bytes: int, position: int, half_life_s: float
) -> float:
    """Return `log2_value` of what is used so, stands at `position` and has so many bytes."""
    cost = num_tokens * (1.0 + (position + num_tokens / 2) / _ATTENTION_TOKENS)
    frequency = max(0.0, use.credit_s - use.last_s) / HALF_LIFE_S
    return (
        min(use.last_s, use.credit_s) / half_life_s  # what was asked once counts as days old
        + frequency
        + math.log2(max(1, use.num_followed) * cost / num_bytes)
    )


def eviction_order(
    packs: Mapping[bytes, KnownPack], newcomer: bytes, pinned: Collection[bytes] = ()
) -> Iterator[bytes]:
    """Yield the names of packs in the order in which they should go: the least value first.

    `newcomer` is the parent of the pack that room is made for: what that continues stays. So does
    what holds a `pinned` block, and what that continues.
    """
    forest = _Forest(packs)
    held = Counter(owner for key in (newcomer, *pinned) if (owner := forest.owners.get(key)))
    last_s = [pack.use.last_s for pack in packs.values()]
    half_life_s = ageing_s(max(last_s, default=0.0), min(last_s, default=0.0))
    values = {
        name: log2_value(pack, forest.position(name), half_life_s) for name, pack in packs.items()
    }
    yield from forest.leaves_first(values, held)


def expired(
    packs: Mapping[bytes, KnownPack], now_s: float, pinned: Collection[bytes] = ()
) -> list[bytes]:
    """Return the names of packs unused for their time to live, leaves first."""
    forest = _Forest(packs)
    oldest_s = now_s - TIME_TO_LIVE_S
    held = Counter(owner for key in pinned if (owner := forest.owners.get(key)))
    held.update(name for name, pack in packs.items() if pack.use.last_s >= oldest_s)
    return list(forest.leaves_first({name: p.use.last_s for name, p in packs.items()}, held))


class _Forest:
    """Packs and what they continue."""

    def __init__(self, packs: Mapping[bytes, KnownPack]) -> None:
        self._packs = packs
        self.owners = {key: name for name, pack in packs.items() for key in pack.keys}
        self._positions: dict[bytes, int] = {}

    def parent(self, name: bytes) -> bytes | None:
        """Return the pack that a pack continues, None where it is a beginning, or that is gone."""
        return self.owners.get(self._packs[name].parent)

    def position(self, name: bytes) -> int:
        """Return how many tokens stand before a pack, as far as they are known."""
        path: dict[bytes, None] = {}
        current: bytes | None = name
        while current is not None and current not in self._positions and current not in path:
            path[current] = None
            current = self.parent(current)
        for current in reversed(path):
            self._positions[current] = self._behind_parent(current)
        return self._positions[name]

    def _behind_parent(self, name: bytes) -> int:
        parent = self.parent(name)
        if parent is None or parent not in self._positions:
            return 0
        pack = self._packs[parent]
        block = pack.keys.index(self._packs[name].parent)
        return self._positions[parent] + (block + 1) * pack.num_tokens // len(pack.keys)

    def leaves_first(
        self, values: Mapping[bytes, float], held: Mapping[bytes, int]
    ) -> Iterator[bytes]:
        """Yield those that are not `held` up, the least value first, each after its children."""
        num_children = Counter(held)
        for name in self._packs:
            if (parent := self.parent(name)) is not None:
                num_children[parent] += 1
        leaves = [(values[name], name) for name in self._packs if not num_children[name]]
        heapq.heapify(leaves)
        while leaves:
            _, name = heapq.heappop(leaves)
            yield name
            parent = self.parent(name)
            if parent is not None:
                num_children[parent] -= 1
                if not num_children[parent]:
                    heapq.heappush(leaves, (values[parent], parent))


def cuts(packs: Mapping[bytes, KnownPack], keys: Collection[bytes]) -> list[tuple[bytes, int]]:
    """Return the packs that lose blocks and how many of each stay; a pack stands before the one
    that it continues.

    Blocks after a forgotten one are no good without it, in the same pack and behind it.
    """
    gone = set(keys)
    num_kept: dict[bytes, int] = {}
    pending = dict(packs)
    while True:
        hit = {name: cut for name, pack in pending.items() if (cut := _cut(pack, gone)) is not None}
        if not hit:
            order = eviction_order(packs, b"")
            return [(name, num_kept[name]) for name in order if name in num_kept]
        for name, cut in hit.items():
            gone.update(pending.pop(name).keys[cut:])
        num_kept.update(hit)


def _cut(pack: KnownPack, gone: set[bytes]) -> int | None:
    """Return how many of a pack's blocks stay, None where all do."""
    if pack.parent in gone:
        return 0
    return next((number for number, key in enumerate(pack.keys) if key in gone), None)
