"""Others at work in a store: files, links, pipes and directories come and go, and the clock jumps.

Two tiers, a model's and its draft's, write, read, forget and collect in one directory, while at
random, between two calls of the operating system too, something is planted in the store, taken
away, or exchanged. Nothing of others may change, no limit be exceeded, no KV be wrong, nothing be
raised, and no reason given that cannot be.
"""

import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.model_dirs import DATABASE, PACK_FILE, find_model_dirs, sizes
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from kvchat.cache.tier import DamagedRecord
from kvchat.core.errors import StoreError
from kvchat.core.text import Size
from kvchat.core.types import MissReason
from support.canary_tree import plant
from support.pack_chains import LAYOUT, find, keys_of, restored, save
from support.soak_sizes import short_and_long

LIMIT = 2 << 20
DRAFT = replace(LAYOUT, identity=b"a draft of it...")
OUR_NAMES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal", "fates")
IN_BETWEEN = ("open", "stat", "lstat", "listdir", "unlink", "mkdir", "rmdir")
_DAY_S = 86400.0


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where the machine has one: no disk is to be waited for."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


class Others:
    """Plants, takes away and exchanges what is in a store; `strike` does one of these at random."""

    def __init__(self, rng: random.Random, store: Path, outside: Path) -> None:
        self.canaries = plant(store, outside)
        self.digest = self.canaries.digest()
        self.now_s = time.time()
        self.num_struck: Counter[str] = Counter()
        self.kept: dict[Path, bytes] = {}  # files of others, and what is in them
        self._rng, self._store, self._outside = rng, store, outside
        # A few names only: the more entries a store has, the more calls look at them, and the more
        # often a deed comes between two calls. New names for ever: nothing restored at last.
        self._names = [rng.randbytes(16).hex() for _ in range(12)]
        self._chance, self._is_between_calls = 0.0, False
        self._deeds = (
            self.plant_a_file,
            self.plant_a_link,
            self.plant_a_pipe,
            self.plant_a_directory,
            self.delete_a_generation,
            self.delete_a_file,
            self.cut_a_file,
            self.exchange_a_generation,
            self.step_the_clock,
        )

    def strike(self) -> None:
        deed = self._rng.choice(self._deeds)
        with suppress(OSError):
            deed()
            self.num_struck[deed.__name__] += 1

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have something happen before calls of the operating system, now and then."""
        for name in IN_BETWEEN:
            patch.setattr(os, name, self._after_a_strike(getattr(os, name)))

    def _after_a_strike(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **settings: Any) -> Any:
            if self._rng.random() < self._chance:
                chance, self._chance = self._chance, 0.0
                self._is_between_calls = True
                self.strike()
                self._chance, self._is_between_calls = chance, False
            return call(*arguments, **settings)

        return run

    def busy(self, chance: float) -> None:
        self._chance = chance

    # Deeds

    def _generation(self) -> Path:
        return self._store / self._rng.choice((LAYOUT, DRAFT)).identity.hex()

    def _inside(self) -> Path:
        """Return a model directory that is a directory; what is behind a link is not ours to
        change.
        """
        path = self._generation()
        return path if not path.is_symlink() else self._store / "none"

    def _place(self) -> Path:
        """Return where something is planted: under a name of ours, or of others."""
        random_name = self._rng.choice(self._names)
        name = self._rng.choice([*OUR_NAMES, f"{random_name}.kv", random_name, "notes.txt", "ab"])
        return self._rng.choice([self._inside(), self._inside(), self._store]) / name

    def plant_a_file(self) -> None:
        place = self._inside() / f"{self._rng.randbytes(2).hex()}.txt"
        place.write_bytes(b"of others")
        self.kept[place] = b"of others"

    def plant_a_link(self) -> None:
        place, target = self._place(), self._rng.choice(["", "letter.txt", DATABASE, "ab"])
        self._make_room(place)
        is_for_a_link = self._is_between_calls and place.name.startswith(DATABASE)
        is_hard = target not in ("", "ab") and self._rng.random() < 0.5
        if is_for_a_link:
            # SQLite opens a table by its name. Within the microseconds between our look at a name
            # and its opening only the user's own programs could put a link there, and none does.
            place.mkdir()
        elif is_hard:
            os.link(self._outside / target, place)
        else:
            place.symlink_to(self._outside / target)

    def plant_a_pipe(self) -> None:
        place = self._place()
        self._make_room(place)
        if self._is_between_calls and place.name.startswith(DATABASE):
            place.mkdir()  # see `plant_a_link`: SQLite would wait for the pipe's other end
        else:
            os.mkfifo(place)

    def plant_a_directory(self) -> None:
        place = self._place()
        self._make_room(place)
        place.mkdir()
        (place / "cache.db").write_bytes(b"of others")

    def _make_room(self, place: Path) -> None:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    def delete_a_generation(self) -> None:
        path = self._generation()
        self._make_room(path)
        self._forget_below(path)

    def delete_a_file(self) -> None:
        files = [p for p in self._inside().iterdir() if p.is_file() and p not in self.kept]
        self._rng.choice(files or [self._store / "none"]).unlink()

    def cut_a_file(self) -> None:
        files = [
            p for p in self._inside().iterdir() if PACK_FILE.fullmatch(p.name) or p.name == DATABASE
        ]
        for path in files[:1]:
            if not path.is_symlink() and path.is_file() and path.stat().st_nlink == 1:
                os.truncate(path, path.stat().st_size // 2)

    def exchange_a_generation(self) -> None:
        """Have a link, or an empty directory, in its place."""
        path = self._generation()
        self._make_room(path)
        self._forget_below(path)
        # Not between two calls: see `plant_a_link`.
        if self._rng.random() < 0.5 and not self._is_between_calls:
            path.symlink_to(self._outside)
        else:
            path.mkdir()

    def _forget_below(self, path: Path) -> None:
        self.kept = {p: data for p, data in self.kept.items() if path not in p.parents}

    def step_the_clock(self) -> None:
        self.now_s += self._rng.uniform(-20, 20) * _DAY_S

    def settle(self) -> None:
        """Take away what keeps the store from being used, as a user would who is told of it."""
        for layout in (LAYOUT, DRAFT):
            path = self._store / layout.identity.hex()
            if path not in find_model_dirs(self._store) and os.path.lexists(path):
                self._make_room(path)
                self._forget_below(path)

    def check(self) -> None:
        assert self.canaries.digest() == self.digest
        for path, data in self.kept.items():
            assert path.read_bytes() == data, path


class Users:
    """A model's tier and its draft's, and the store's maintenance."""

    def __init__(self, rng: random.Random, store: Path, others: Others) -> None:
        self._rng, self._store, self._others = rng, store, others
        self._tiers: dict[bool, DiskTier] = {}
        self._contexts: list[list[int]] = [[1, 2, 3, 4]]
        self.num_restored = 0
        self.reasons: Counter[MissReason] = Counter()

    def do_something(self) -> None:
        is_draft = self._rng.random() < 0.4
        tier = self._tier(is_draft)
        layout = DRAFT if is_draft else LAYOUT
        deed = self._rng.choice(["save"] * 6 + ["restore"] * 6 + ["forget", "pin", "tend", "end"])
        ids = self._rng.choice(self._contexts)
        if deed == "tend":
            self._tend()
        elif tier is None:
            return
        elif deed == "save":
            ids = [*ids[: 2 * self._rng.randint(0, 4)], *self._rng.choices(range(9), k=6)]
            self._contexts = [*self._contexts[-20:], ids]
            save(tier, ids, layout)
        elif deed == "restore":
            self._restore(tier, ids, is_draft)
        elif deed == "forget":
            tier.forget(keys_of(tier, ids, layout)[2:])
        elif deed == "pin":
            tier.pin(keys_of(tier, ids, layout), encode_ids(ids), f"{self._rng.randint(0, 1)}")
        else:
            tier.close()
            del self._tiers[is_draft]

    def _tier(self, is_draft: bool) -> DiskTier | None:
        if is_draft not in self._tiers:
            layout = DRAFT if is_draft else LAYOUT
            with suppress(StoreError, OSError, sqlite3.Error):  # a chat goes on without a tier
                self._tiers[is_draft] = DiskTier(
                    self._store, layout, LIMIT, 0, lambda: self._others.now_s, is_draft
                )
        return self._tiers.get(is_draft)

    def _restore(self, tier: DiskTier, ids: list[int], is_draft: bool) -> None:
        layout = DRAFT if is_draft else LAYOUT
        with suppress(DamagedRecord):
            self.num_restored += restored(tier, ids, layout)
        keys = keys_of(tier, ids, layout)
        num_found = sum(found.num_blocks for found in find(tier, ids, layout))
        if num_found < len(keys) and not is_draft:
            self.reasons[tier.why(keys[num_found], encode_ids(ids), num_found)] += 1

    def _tend(self) -> None:
        kept = StoreAdmin(self._store, Size(num_bytes=LIMIT))
        deeds = [kept.verify, kept.gc, kept.status, kept.tree]
        with suppress(StoreError):
            self._rng.choice([*deeds * 5, kept.clear])()

    def end(self) -> None:
        for tier in self._tiers.values():
            tier.close()


def used_by_us(store: Path) -> int:
    """Return what the files of ours take on the disk."""
    return sum(
        (path / name).lstat().st_blocks * 512
        for path in find_model_dirs(store)
        for name in sizes(path)
        if (path / name).lstat().st_nlink == 1
    )


@short_and_long(60, 3000)
def test_whatever_others_do_in_a_store_nothing_of_theirs_is_touched(directory, monkeypatch, size):
    rng = random.Random(size)
    store = directory / "store"
    others = Others(rng, store, directory / "outside")
    users = Users(rng, store, others)
    others.install(monkeypatch)
    began_s = time.monotonic()
    for number in range(size):
        others.strike()
        others.busy(0.01)
        for _ in range(5):
            users.do_something()
        others.busy(0.0)
        others.check()
        others.settle()
        assert used_by_us(store) <= LIMIT, number
    users.end()
    others.check()

    assert users.num_restored > size // 4
    assert not users.reasons.keys() & {MissReason.OTHER_MODEL, MissReason.QUARANTINED}
    again = DiskTier(store, LAYOUT, LIMIT, 0)
    again.forget(keys_of(again, [1] * 8))
    assert save(again, [1] * 8), again.status()
    assert restored(again, [1] * 8) == 4
    again.close()
    seconds = time.monotonic() - began_s
    print(f"\n{size} rounds in {seconds:.0f} s, {sum(others.num_struck.values())} faults,")  # noqa: T201
    print(f"{others.num_struck}, {users.num_restored} blocks restored, {users.reasons}")  # noqa: T201
