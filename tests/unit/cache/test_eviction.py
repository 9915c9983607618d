"""What goes first: leaves before what they continue, what is worth least; never what is pinned."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from kvchat.cache.disk.eviction import (
    HALF_LIFE_S,
    TIME_TO_LIVE_S,
    KnownPack,
    Use,
    eviction_order,
    expired,
    first_use,
    log2_value,
    used_again,
)

DAY_S = 86400.0
Packs = dict[bytes, KnownPack]


def encode_ids(parent: str, keys: str, day: float) -> KnownPack:
    blocks = tuple(bytes([k]) for k in keys.encode())
    use = first_use(day * DAY_S, False)
    return KnownPack(parent.encode(), blocks, len(blocks), len(blocks), use)


def random_forest(rng: random.Random, count: int = 30) -> Packs:
    packs: Packs = {}
    known = [b""]
    for number in range(count):
        keys = tuple(bytes([number, part]) for part in range(rng.randrange(1, 4)))
        used = Use(rng.random() * 90 * DAY_S, rng.random() * 90 * DAY_S, 1, rng.randrange(3))
        size = rng.randrange(1, 9)
        packs[keys[0]] = KnownPack(rng.choice(known), keys, len(keys), size, used)
        known.extend(keys)
    return packs


def assert_parents_stay_until_children_go(packs: Packs, order: list[bytes]) -> None:
    gone: set[bytes] = set()
    for name in order:
        assert packs[name].parent not in gone
        gone.update(packs[name].keys)


# The order


# By names: the key that a pack continues, its own keys, and when it was used.
_ROW = {"a": ("", "ab", 1), "c": ("b", "c", 2), "d": ("c", "d", 3)}
_PAIR = {"a": ("", "ab", 1), "c": ("b", "cd", 2), "e": ("d", "e", 9)}


@pytest.mark.parametrize(
    ("packs", "newcomer", "pinned", "order"),
    [
        (
            {"a": ("", "ab", 1), "c": ("b", "c", 9), "d": ("a", "d", 5), "x": ("", "x", 7)},
            "",
            "",
            "dxca",
        ),
        (_ROW, "c", "", "d"),  # what a newcomer continues stays to the root
        (_ROW, "d", "", ""),
        (_PAIR, "", "d", "e"),  # what is pinned stays, and what that continues
        (_PAIR, "", "?", "eca"),
        # A table that says that packs continue each other in a circle ends nothing.
        ({"a": ("b", "a", 1), "b": ("a", "b", 1), "c": ("", "c", 2)}, "", "", "c"),
    ],
)
def test_leaves_go_oldest_first_and_then_what_they_continued(packs, newcomer, pinned, order):
    known = {name.encode(): encode_ids(*pack) for name, pack in packs.items()}
    kept = {pinned.encode()} if pinned else set()

    assert b"".join(eviction_order(known, newcomer.encode(), kept)).decode() == order


def test_no_pack_ever_goes_before_one_that_continues_it() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        packs = random_forest(rng)
        pinned = {rng.choice(list(packs)) for _ in range(rng.randrange(4))}

        order = list(eviction_order(packs, b"", pinned))

        assert_parents_stay_until_children_go(packs, order)
        assert not pinned & set(order), seed
        assert pinned or sorted(order) == sorted(packs), seed
        old = expired(packs, 90 * DAY_S, pinned)
        assert_parents_stay_until_children_go(packs, old)
        assert all(packs[name].use.last_s < 90 * DAY_S - TIME_TO_LIVE_S for name in old), seed


# What a pack is worth


def value(
    num_tokens: int = 100, num_bytes: int = 100, position: int = 0, use: Use | None = None
) -> float:
    known = KnownPack(b"", (b"k",), num_tokens, num_bytes, use or first_use(0.0, False))
    return log2_value(known, position)


def test_a_half_life_of_disuse_halves_the_value_and_a_second_use_nearly_doubles_it() -> None:
    old, young = first_use(0.0, False), first_use(HALF_LIFE_S, False)
    assert value(use=young) - value(use=old) == pytest.approx(1.0)

    twice = used_again(old, 120.0, False)

    assert value(use=twice) - value(use=old) == pytest.approx(1.0, abs=0.01)
    assert twice.num_uses == 2


def test_credit_is_the_sum_of_all_uses_each_half_as_much_a_half_life_later() -> None:
    """The plain twin of the running credit: the sum itself."""
    rng = random.Random(3)
    moments = sorted(rng.random() * 10 * DAY_S for _ in range(40))
    moments = [at_s + 61.0 * number for number, at_s in enumerate(moments)]
    use = first_use(moments[0], False)
    for at_s in moments[1:]:
        use = used_again(use, at_s, False)

    weight = sum(2.0 ** ((at_s - moments[-1]) / HALF_LIFE_S) for at_s in moments)

    assert use.credit_s == pytest.approx(moments[-1] + HALF_LIFE_S * math.log2(weight), abs=1.0)


def test_looking_for_a_context_twice_in_a_turn_is_one_use() -> None:
    use = first_use(0.0, False)

    assert used_again(use, 2.0, False) == Use(2.0, 0.0, 1)


def test_what_was_asked_once_is_worth_little_until_it_is_used_again() -> None:
    once = first_use(0.0, True)
    assert value(use=first_use(0.0, False)) - value(use=once) == pytest.approx(6.0)

    followed = used_again(once, 5.0, False)

    assert followed.credit_s >= 5.0


def test_later_tokens_and_smaller_bytes_are_worth_more() -> None:
    assert value(position=8192) > value(position=0) + 0.9
    assert value(num_bytes=50) == pytest.approx(value() + 1.0)


def test_what_many_chats_continued_outlasts_them() -> None:
    prompt = KnownPack(b"", (b"k",), 1, 1, Use(0.0, 0.0, 1, 8))

    assert log2_value(prompt, 0) == pytest.approx(value(1, 1) + 3.0, abs=0.01)


# A mixed workload, against bare recency


@dataclass
class Store:
    """A store of packs with a limit; `order` decides what goes."""

    limit_bytes: int
    order: Callable[[Packs, bytes], Iterator[bytes]]
    packs: Packs = field(default_factory=dict)
    num_recomputed: int = 0
    seen: set[bytes] = field(default_factory=set)

    def turn(self, chain: list[tuple[bytes, int]], now_s: float, is_one_shot: bool) -> None:
        """Go through a context of packs and their tokens: what is not there is computed, kept."""
        parent, is_whole = b"", True
        for name, num_tokens in chain:
            known = self.packs.get(name)
            if known is not None and is_whole:
                use = used_again(known.use, now_s, is_one_shot)
                self.packs[name] = replace(known, use=use)
            else:
                is_whole = False
                self.num_recomputed += num_tokens * (name in self.seen)
                self.seen.add(name)
                self._keep(name, parent, num_tokens, first_use(now_s, is_one_shot))
            parent = name
            self.check()

    def _keep(self, name: bytes, parent: bytes, num_tokens: int, use: Use) -> None:
        num_bytes = num_tokens + 8
        room = self.limit_bytes - num_bytes - sum(p.num_bytes for p in self.packs.values())
        for victim in self.order(dict(self.packs), parent) if room < 0 else ():
            room += self.packs.pop(victim).num_bytes
            if room >= 0:
                break
        if room >= 0 and (not parent or parent in self.packs):
            self.packs[name] = KnownPack(parent, (name,), num_tokens, num_bytes, use)
            if parent:
                before = self.packs[parent]
                use = replace(before.use, num_followed=before.use.num_followed + 1)
                self.packs[parent] = replace(before, use=use)

    def check(self) -> None:
        assert sum(known.num_bytes for known in self.packs.values()) <= self.limit_bytes
        assert all(not p.parent or p.parent in self.packs for p in self.packs.values())


def by_recency(packs: Packs, newcomer: bytes) -> Iterator[bytes]:
    """What was done before: of the leaves, the one used longest ago."""
    left = dict(packs)
    while True:
        parents = {known.parent for known in left.values()} | {newcomer}
        leaves = [name for name in left if name not in parents]
        if not leaves:
            return
        oldest = min(leaves, key=lambda name: left[name].use.last_s)
        del left[oldest]
        yield oldest


def workload(rng: random.Random) -> Iterator[tuple[list[tuple[bytes, int]], float, bool]]:
    """Two weeks of a user: long chats gone on with for days, chats of a day, and scripts.

    All begin with one of two system prompts. A burst of a hundred one-shot prompts comes each day.
    """
    chats: dict[str, list[tuple[bytes, int]]] = {}
    now_s = 0.0
    for day in range(14):
        names = [f"long-{day // 4}-0", f"long-{day // 4}-1", *(f"{day}-{n}" for n in range(3))]
        deeds = [rng.choice(names) for _ in range(25)] + [f"once-{day}-{n}" for n in range(100)]
        rng.shuffle(deeds)
        for number, name in enumerate(deeds):
            now_s = day * DAY_S + number * DAY_S / len(deeds)
            system = f"system-{sum(name.encode()) % 2}".encode()
            chain = chats.setdefault(name, [(system, 200)])
            size = rng.choice([50, 100, 400])
            chain.append((f"{name}/{len(chain)}".encode(), size))
            yield list(chain), now_s, name.startswith("once")


@pytest.mark.parametrize(
    ("limit_bytes", "most"), [(8_000, 1.0), (16_000, 0.5), (32_000, 0.1)], ids=lambda x: f"{x}"
)
def test_value_for_bytes_computes_less_again_than_recency(limit_bytes: int, most: float) -> None:
    """Where not even the chats of a day fit there is little to win."""
    valued = Store(limit_bytes, lambda packs, newcomer: eviction_order(packs, newcomer))
    recent = Store(limit_bytes, by_recency)
    for chain, now_s, is_one_shot in workload(random.Random(1)):
        valued.turn(chain, now_s, is_one_shot)
        recent.turn(chain, now_s, is_one_shot)

    assert recent.num_recomputed > 0
    assert valued.num_recomputed < most * recent.num_recomputed
