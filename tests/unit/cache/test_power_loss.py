"""Power that fails: what was written and not yet synced is there, or in part, or not at all.

SQLite syncs its log before it changes its table, and neither with every commit: after the failure
the table is that of some moment, and its log ends anywhere. Payloads are never synced: each is
whole, cut, empty, full of zeros or gone, and what had been deleted may be back. So the table is
behind its files or ahead of them. What comes back has to be right all the same, or a miss, and the
store has to work on.
"""

import random
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvchat.cache.disk import table
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from kvchat.cache.tier import DamagedRecord
from support.pack_chains import LAYOUT, keys_of, restored, save, used_bytes
from support.soak_sizes import short_and_long

SMALL = replace(LAYOUT, block_bytes=6400)
LIMIT = 3 << 20
NUM_DEEDS = 120
TABLE = ("cache.db", "cache.db-wal")

Files = dict[str, bytes]


@dataclass
class Life:
    """What a store's directory held after each deed of a tier, and which contexts it was given."""

    moments: list[Files]
    contexts: list[list[int]]


def opened(directory: Path) -> DiskTier:
    return DiskTier(directory, SMALL, LIMIT, min_free_bytes=0)


def files_of(directory: Path) -> Files:
    paths = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".db-shm"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def lived(directory: Path, rng: random.Random) -> Life:
    """Save, evict, pin, forget and collect."""
    life = Life([], [])
    tier = opened(directory)
    for _ in range(NUM_DEEDS):
        base = rng.choice([[], *life.contexts])
        ids = [*base[: 2 * rng.randint(0, 6)], *rng.choices(range(50), k=2 * rng.randint(1, 8))]
        save(tier, ids, SMALL)
        life.contexts.append(ids)
        if rng.random() < 0.1:
            tier.pin(keys_of(tier, ids, SMALL), encode_ids(ids), rng.choice("ab"))
        if rng.random() < 0.1:
            tier.forget(keys_of(tier, ids, SMALL)[-1:])
        if rng.random() < 0.1:
            tier.gc()
        life.moments.append(files_of(directory))
    assert tier.status().num_evicted > 0
    tier.close()
    return life


def after_the_failure(life: Life, rng: random.Random) -> Files:
    """Return what might be on the disk after power has failed at some moment."""
    at = rng.randrange(len(life.moments))
    left: Files = {}
    for moment in life.moments[max(0, at - 5) : at + 3]:
        for name, data in moment.items():
            if not name.endswith(TABLE) and rng.random() < 0.95:
                left[name] = data if rng.random() < 0.7 else unsynced(data, rng)
    for name, data in life.moments[at].items():
        if name.endswith(TABLE):
            is_log = name.endswith("-wal")
            left[name] = data[: rng.randrange(len(data) + 1)] if is_log else data
    return left


def unsynced(data: bytes, rng: random.Random) -> bytes:
    """Return what may be left of a file whose bytes were still to be written."""
    reached = rng.choice([0, len(data) // 4096 * 4096 // 2, rng.randrange(len(data) + 1)])
    return data[:reached] + bytes(rng.choice([0, len(data) - reached]))


@short_and_long(15, 500)
def test_a_store_after_a_power_loss_gives_back_what_is_right_and_works_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(table, "MIN_FILE_BYTES", 1024)
    rng = random.Random(size)
    life = lived(tmp_path / "original", rng)
    num_damaged = num_right = 0
    for number in range(size):
        directory = tmp_path / f"{number}"
        for name, data in after_the_failure(life, rng).items():
            path = directory / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(data)

        tier = opened(directory)
        for ids in life.contexts:
            with suppress(DamagedRecord):
                num_right += restored(tier, ids, SMALL) > 0
        tier.verify()  # no prompt meets what has lost its beginning
        num_damaged += tier.status().num_damaged
        assert tier.verify()[1] == 0
        for ids in life.contexts[-5:]:
            assert save(tier, ids, SMALL), tier.status()
            assert restored(tier, ids, SMALL) == len(ids) // 2
        assert used_bytes(directory) <= LIMIT
        tier.close()
    assert num_right > num_damaged > size // 4
    print(f"\n{size} failures: {num_right} contexts right, {num_damaged} packs refused, 0 wrong")  # noqa: T201
