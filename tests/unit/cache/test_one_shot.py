"""One-shots and chats through one store at once: each counts as what it is, and a chain that is
gone on with loses the mark.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvchat.cache.disk.eviction import HALF_LIFE_S
from kvchat.cache.disk.tier import DiskTier
from support.pack_chains import LAYOUT, ROOM, keys_of, num_found, save

ONCE = 2.0**-6


class Twin:
    """What a store should know of its packs' uses: the plain list of them, summed up when asked."""

    def __init__(self) -> None:
        self.uses: dict[bytes, list[tuple[float, float]]] = defaultdict(list)

    def credit_s(self, name: bytes) -> float:
        uses = self.uses[name]
        last_s = uses[-1][0]
        weight = sum(weight * 2.0 ** ((at_s - last_s) / HALF_LIFE_S) for at_s, weight in uses)
        return last_s + HALF_LIFE_S * math.log2(weight)


class Store:
    """A tier and its twin. Time passes between any two deeds: none are one use."""

    def __init__(self, directory: Path, limit_bytes: int = ROOM) -> None:
        self.now_s = 1e9
        self.twin = Twin()
        self.tier = DiskTier(
            directory, LAYOUT, limit_bytes, min_free_bytes=0, clock=lambda: self.now_s
        )

    def ask(self, ids: Sequence[int], is_one_shot: bool) -> None:
        """Use what there is of a context, and keep the rest, as a request does."""
        self.now_s += 100.0
        keys = keys_of(self.tier, ids)
        found = self.tier.find(keys, b"".join(i.to_bytes(4, "little") for i in ids))
        names = [run.key for run in found]
        num_known = sum(run.num_blocks for run in found)
        self.tier._used.clear()  # looking was no use
        if num_known == len(keys):
            return  # nothing is written: nor is a use, yet
        assert save(self.tier, ids, is_one_shot=is_one_shot)
        for name in [*names, keys[num_known]]:
            self.twin.uses[name].append((self.now_s, ONCE if is_one_shot else 1.0))

    def check(self) -> None:
        rows = {key: row.use for key, row in self.tier._db.table.rows() if row is not None}
        assert rows.keys() == self.twin.uses.keys()
        for name, use in rows.items():
            assert use.credit_s == pytest.approx(self.twin.credit_s(name), abs=0.01)
            assert use.num_uses == len(self.twin.uses[name])


def test_random_actors_in_one_process_each_count_as_what_they_are(tmp_path: Path) -> None:
    rng = random.Random(11)
    store = Store(tmp_path, limit_bytes=1 << 30)
    chats: list[list[int]] = []
    for number in range(120):
        if rng.random() < 0.4:  # one of two system prompts, and a question
            ids = [rng.randrange(2)] * 8 + [number + 10] * 4
            store.ask(ids, is_one_shot=rng.random() < 0.7)
            chats.append(ids)
        elif chats:
            chat = rng.choice(chats)
            chat.extend([rng.randrange(10)] * rng.choice([2, 4]))
            store.ask(chat, is_one_shot=False)
        store.check()


def test_one_process_may_chat_and_ask_once(tmp_path: Path) -> None:
    """The mark was the process's: a night of single questions beside a chat counted like it."""
    store = Store(tmp_path, limit_bytes=5 << 20)
    chats = [[number] * 12 for number in range(5)]
    for chat in chats:
        store.ask(chat, is_one_shot=False)
    for number in range(10, 60):
        store.ask([number] * 12, is_one_shot=True)

    assert store.tier.status().num_evicted > 20
    assert [num_found(store.tier, chat) for chat in chats] == [6] * 5


def test_what_was_asked_once_and_is_gone_on_with_outlasts_what_was_not(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=5 << 20)
    for number in range(5):
        store.ask([number] * 12, is_one_shot=True)
    continued = [3] * 12 + [9, 9, 9, 9]
    store.ask(continued, is_one_shot=False)
    for number in range(10, 60):
        store.ask([number] * 12, is_one_shot=True)

    assert num_found(store.tier, continued) == 8
    assert [num_found(store.tier, [number] * 12) for number in range(5)].count(6) == 1


def test_a_pack_that_is_cut_stays_what_it_was(tmp_path: Path) -> None:
    """Forgetting the end of a single question made a chat of its beginning."""
    store = Store(tmp_path)
    ids = [1, 1, 2, 2, 3, 3]
    store.ask(ids, is_one_shot=True)
    keys = keys_of(store.tier, ids)
    store.now_s += 1000.0

    assert store.tier.forget(keys[2:]) == 1

    assert num_found(store.tier, ids) == 2
    store.check()
