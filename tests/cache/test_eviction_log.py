"""Forgetting is written down too: what that takes must not be what it was to free.

Where packs were forgotten one after the other the table's log grew by more than they had held: a
store of small packs forgot half of what it kept, had as little room as before, and put it to pins.
"""

import random
from dataclasses import replace
from pathlib import Path

from kvchat.cache.disk_tier import DiskTier
from support.pack_chains import LAYOUT, restored, save, used_bytes

SMALL = replace(LAYOUT, block_bytes=3200)
NUM_LARGE = 620
LIMIT = 5 << 20


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
