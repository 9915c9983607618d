"""The lock of a store: taken by turns, waited for as long as others move on, and no alarm.

Ten processes that cleared and collected one store once told their users that another process held
it: each was waited for as if it were the same. Time here is the sleeper's: no test waits.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvchat.cache.disk import db, tier
from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.db import LOCK_NAME, StoreBusy, StoreLock, StoreLocked
from kvchat.cache.tier import BusyRecord
from support.pack_chains import find, num_found, open_tier, payload_files, restored, save

IDS = [1, 2, 3, 4, 5, 6]


class Holders:
    """Others who hold a lock by turns; `lock` waits for them in a time of its own.

    Each holds it for `turn_s`, and there are `num_turns` of them.
    """

    def __init__(self, path: Path, turn_s: float, num_turns: int) -> None:
        self.now_s = 0.0
        self._path = path
        self._turn_s = turn_s
        self._left = num_turns
        self._stack = ExitStack()
        self._next()

    def _next(self) -> None:
        self._stack.close()
        self._ends_s = self.now_s + self._turn_s
        if self._left:
            self._left -= 1
            self._stack.enter_context(StoreLock(self._path, 0.0).hold())

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self._ends_s:
            self._next()

    def new_lock(self, path: Path, patience_s: float) -> StoreLock:
        return StoreLock(path, patience_s, lambda: self.now_s, self.sleep)

    def leave(self) -> None:
        self._left = 0
        self._next()


@contextmanager
def held_by(path: Path, turn_s: float, num_turns: int) -> Iterator[Holders]:
    holders = Holders(path, turn_s, num_turns)
    try:
        yield holders
    finally:
        holders.leave()


def test_others_who_take_turns_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    with held_by(path, turn_s=0.4, num_turns=10) as holders, holders.new_lock(path, 1.0).hold():
        assert 4.0 <= holders.now_s < 4.1


def test_one_who_does_not_let_go_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    with held_by(path, turn_s=1e9, num_turns=1) as holders:
        with pytest.raises(StoreLocked, match="Another process holds the disk cache") as raised:
            holders.new_lock(path, 1.0).hold().__enter__()
        assert not isinstance(raised.value, StoreBusy)
        assert 1.0 <= holders.now_s < 1.1


def test_turns_without_end_are_waited_for_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    with held_by(path, turn_s=0.4, num_turns=1 << 20) as holders:
        with pytest.raises(StoreBusy):
            holders.new_lock(path, 1.0).hold().__enter__()
        assert 5.0 <= holders.now_s < 5.1


def test_who_has_waited_leaves_no_mark_behind(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    with held_by(path, turn_s=0.4, num_turns=3) as holders:
        lock = holders.new_lock(path, 1.0)
        with lock.hold():
            assert path.stat().st_size > 0
        assert not lock.has_leftovers
    assert path.stat().st_size == 0


# What a tier makes of it


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Holders], None]:
    """Have every tier that is opened from now on wait in the holders' time."""
    return lambda holders: monkeypatch.setattr(tier, "StoreLock", holders.new_lock)


def test_a_busy_store_is_a_miss_that_says_nothing(tmp_path, waits):
    with held_by(tmp_path / LOCK_NAME, turn_s=0.4, num_turns=1) as holders:
        waits(holders)
        tier = open_tier(tmp_path)
        holders._left = 1 << 20
        holders._next()

        assert not save(tier, IDS)
        assert num_found(tier, IDS) == 0
        assert tier.status().trouble == ""
        assert tier.status().num_held_up == 1

    assert save(tier, IDS)
    assert num_found(tier, IDS) == 3


def test_a_store_that_somebody_does_not_let_go_of_is_told(tmp_path, waits):
    open_tier(tmp_path).close()
    with held_by(tmp_path / LOCK_NAME, turn_s=1e9, num_turns=1) as holders:
        waits(holders)
        tier = open_tier(tmp_path)

        assert not save(tier, IDS)
        assert "Another process holds the disk cache" in tier.status().trouble


def test_what_others_keep_from_being_looked_at_is_not_called_damaged(tmp_path, waits):
    """Who reads while others write may meet half of each, and looks again when they are done:
    where they never were, /cache why called what was kept corrupt.
    """
    with held_by(tmp_path / LOCK_NAME, turn_s=0.4, num_turns=1) as holders:
        waits(holders)
        tier = open_tier(tmp_path)
        save(tier, IDS)
        [found] = find(tier, IDS)
        [path] = payload_files(tmp_path)
        sound = path.read_bytes()
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        holders._left = 1 << 20
        holders._next()
        with pytest.raises(BusyRecord):
            tier.read(found)
        assert tier.status().num_damaged == 0

    path.write_bytes(sound)
    assert restored(tier, IDS) == 3


@pytest.mark.parametrize("deed", ["gc", "unpin", "forget"])
def test_what_a_user_asked_for_is_done_or_said_not_to_be(tmp_path, waits, deed):
    """/forget said that it had forgotten what it had never got hold of."""
    tier = open_tier(tmp_path)
    save(tier, IDS)
    tier.close()
    arguments = {"gc": (), "unpin": ("mine",), "forget": ([IDS], [])}[deed]
    with held_by(tmp_path / LOCK_NAME, turn_s=0.4, num_turns=1 << 20) as holders:
        waits(holders)
        with pytest.raises(StoreBusy, match="busy"):
            getattr(StoreAdmin(tmp_path), deed)(*arguments)
    assert num_found(open_tier(tmp_path), IDS) == 3


def test_a_table_that_others_are_at_is_opened_in_the_end(tmp_path, monkeypatch):
    """One moment of many processes left a whole life of one without its disk cache."""
    tier = open_tier(tmp_path)
    save(tier, IDS)
    tier.close()
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
    failures = [busy, busy]
    new_table = db.PackTable

    def opened(*arguments: object) -> object:
        if failures:
            raise failures.pop()
        return new_table(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(db, "PackTable", opened)

    tier = open_tier(tmp_path)

    assert num_found(tier, IDS) == 3
    assert tier.status().trouble == ""
