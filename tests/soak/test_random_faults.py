"""Ten thousand random faults: reads, writes, locks and statements fail at random under two tiers.

Two identities share a directory and a limit. Whatever fails, nothing is raised but what a reader
expects, KV that comes back is right, the limit holds after every operation, files beside the store
stay as they were, and a disk that works again is used as if nothing had been.
"""

import random
import sqlite3
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from kvchat.cache.tier import DamagedRecord
from kvchat.core.errors import StoreError
from support.failing_files import CODES, Faults
from support.outside import Outside
from support.pack_chains import LAYOUT, keys_of, open_tier, restored, save, used_bytes
from support.soak_sizes import short_and_long

LIMIT = 6 << 20
NUM_ACTS = 25
LAYOUTS = (LAYOUT, replace(LAYOUT, identity=b"another model..."))


class RandomFaults(Faults):
    """Lets calls fail at `rate` while it is armed, each with an error of its own."""

    def __init__(self, rng: random.Random, totals: Counter[str]) -> None:
        super().__init__()
        self._rng, self._totals = rng, totals
        self.rate = 0.0

    def strikes(self, kind: str) -> bool:
        if not self._is_armed or self._rng.random() >= self.rate:
            return False
        self._code = self._rng.choice(CODES)
        self._totals[f"faults: {kind}"] += 1
        self.num_failed += 1
        return True


class Life:
    """One process's tier, under one of two identities, and what it is asked."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._rng = rng
        self._layout = rng.choice(LAYOUTS)
        self._tier: DiskTier = open_tier(directory, LIMIT, self._layout)

    def act(self) -> None:
        rng, tier = self._rng, self._tier
        ids = [rng.randrange(3) for _ in range(2 * rng.choice([1, 2, 8, 20]))]
        chosen = rng.random()
        if chosen < 0.45:
            save(tier, ids, self._layout)
        elif chosen < 0.85:
            with suppress(DamagedRecord):
                restored(tier, ids, self._layout)
        elif chosen < 0.9:
            tier.pin(keys_of(tier, ids, self._layout), encode_ids(ids), "a label")
        elif chosen < 0.94:
            tier.quarantine(keys_of(tier, ids, self._layout)[:1])
        else:
            rng.choice([tier.gc, tier.verify, tier.status])()

    def end(self) -> None:
        self._tier.close()


@short_and_long(8, 1500)
def test_no_random_fault_gives_wrong_kv_or_passes_the_limit(tmp_path, monkeypatch, totals, size):
    rng = random.Random(size)
    directory, outside = tmp_path / ".cache/kvchat/kv", Outside(tmp_path)
    faults = RandomFaults(rng, totals)
    faults.install(monkeypatch)
    for number in range(size):
        rate = rng.choice([0.003, 0.01, 0.05, 0.3])
        faults.rate = rate / 10  # or hardly any tier would open
        with faults.armed(), suppress(OSError, StoreError, sqlite3.Error):
            life = Life(directory, rng)
            faults.rate = rate
            live(life, faults, directory, totals)
        outside.assert_untouched()
        assert_all_is_well(directory, number)
    totals["lives under random faults"] += size


def live(life: Life, faults: Faults, directory: Path, totals: Counter[str]) -> None:
    """Have a tier asked many things; nothing it raises is expected from here on."""
    try:
        for _ in range(NUM_ACTS):
            life.act()
            with faults.disarmed():
                assert used_bytes(directory) <= LIMIT
        life.end()
    except Exception as error:
        raise AssertionError("a tier raised") from error


def assert_all_is_well(directory: Path, number: int) -> None:
    for layout in LAYOUTS:
        pinned = open_tier(directory, LIMIT, layout)
        pinned.unpin("a label")  # or what may not be evicted would fill the disk by and by
        pinned.close()
    tier = open_tier(directory, LIMIT)
    ids = [9, 9, number % 7, 9]
    assert save(tier, ids)
    try:
        assert restored(tier, ids) == 2
    except DamagedRecord:  # a fault has cost it its payload: seen once, and then it is replaced
        assert save(tier, ids)
        assert restored(tier, ids) == 2
    assert used_bytes(directory) <= LIMIT
    tier.close()
