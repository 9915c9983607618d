"""Forgetting is written down too: what that takes must not be what it was to free.

Where packs were forgotten one after the other the table's log grew by more than they had held: a
store of small packs forgot half of what it kept, had as little room as before, and put it to pins.
"""

import random
from dataclasses import replace
from pathlib import Path

from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from support.pack_chains import LAYOUT, keys_of, restored, save, used_bytes

SMALL = replace(LAYOUT, block_bytes=3200)
NUM_LARGE = 620
LIMIT = 5 << 20


def test_of_many_pins_only_as_many_go_as_exceed_the_limit(tmp_path: Path) -> None:
    rng = random.Random(0)
    tier = DiskTier(tmp_path, SMALL, 8 * LIMIT, min_free_bytes=0)
    for label in range(600):
        ids = rng.choices(range(50), k=4)
        assert save(tier, ids, SMALL)
        tier.pin(keys_of(tier, ids, SMALL), encode_ids(ids), str(label))
    tier.close()
    tier = DiskTier(tmp_path, SMALL, 8 * LIMIT, min_free_bytes=0)  # its log is short again
    limit = tier._quota.used_bytes(tier._db.table) - 100_000
    tier.close()

    tier = DiskTier(tmp_path, SMALL, limit, min_free_bytes=0)

    assert used_bytes(tmp_path) <= limit
    assert 570 < tier.status().num_packs < 600
    tier.close()


def test_a_store_of_small_packs_makes_room_for_as_much_as_they_held(tmp_path: Path) -> None:
    rng = random.Random(0)
    tier = DiskTier(tmp_path, SMALL, LIMIT, min_free_bytes=0)
    while not tier.status().num_evicted:
        assert save(tier, rng.choices(range(50), k=4), SMALL)
    num_kept = tier.status().num_packs
    tier.close()

    tier = DiskTier(tmp_path, SMALL, LIMIT, min_free_bytes=0)  # its log is short again
    large = rng.choices(range(50), k=2 * NUM_LARGE)
    assert save(tier, large, SMALL), tier.status()
    assert restored(tier, large, SMALL) == len(large) // 2
    assert 0 < tier.status().num_packs < num_kept
    assert used_bytes(tmp_path) <= LIMIT
    tier.close()
