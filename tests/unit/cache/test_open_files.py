"""What a tier opens it closes: whatever fails, and whichever thread opened it.

A table that stays open in a process that opens its store again, as `/model` does, shares SQLite's
locks and log with the new one, and makes that fail.
"""

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk import model_dirs
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.transfer import TransferThread
from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private
from support.failing_files import Faults, StuckFiles
from support.pack_chains import open_tier, restored, save

IDS = [1, 2, 3, 4, 5, 6]


def open_below(directory: Path) -> list[str]:
    """Return what this process has open in a directory; what is deleted but open is there too."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(str(directory)):
            found.append(target)
    return found


def test_a_hundred_tiers_opened_and_closed_leave_nothing_open(tmp_path: Path) -> None:
    for _ in range(100):
        tier = open_tier(tmp_path)
        tier.close()
    del tier

    assert open_below(tmp_path) == []


def test_opening_that_fails_leaves_no_file_open_while_its_error_is_kept(tmp_path, monkeypatch):
    """Who opens tiers keeps the error to tell of it, and with it all that was half open."""
    save(tier := open_tier(tmp_path), IDS)
    tier.close()
    del tier
    faults, errors = Faults(), []
    faults.install(monkeypatch)
    for number in range(300):
        with faults.armed(fail_at=number):
            try:
                open_tier(tmp_path).close()
            except (OSError, StoreError, sqlite3.Error) as error:
                errors.append(error)
        assert open_below(tmp_path) == [], f"call {number} failed"

    assert len(errors) > 20, "hardly any opening failed"


def test_closing_closes_what_another_thread_has_opened(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    used, done = threading.Event(), threading.Event()

    def use() -> None:
        save(tier, IDS)
        used.set()
        done.wait(60)

    thread = threading.Thread(target=use)
    thread.start()
    assert used.wait(60)
    tier.close()
    tables = [path for path in open_below(tmp_path) if "cache.db" in path]
    done.set()
    thread.join()

    assert tables == []


def test_a_store_that_one_thread_opens_and_others_use_is_opened_once(tmp_path, monkeypatch):
    """A restart's first prompt waited while its thread opened what had just been opened."""
    tier = open_tier(tmp_path)
    opened: list[object] = []
    connect = sqlite3.connect

    def counting(*arguments: Any, **settings: Any) -> sqlite3.Connection:
        if str(arguments[0]).startswith(str(tmp_path)):  # threads of other tests may still open
            opened.append(arguments)
        return connect(*arguments, **settings)

    monkeypatch.setattr(sqlite3, "connect", counting)
    found: list[int] = []
    for use in (lambda: save(tier, IDS), lambda: found.append(restored(tier, IDS))):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    here = restored(tier, IDS)
    tier.close()

    assert (found, opened) == ([here], [])
    assert here
    assert open_below(tmp_path) == []


def test_a_file_that_cannot_be_looked_at_is_closed(tmp_path, monkeypatch):
    faults = Faults()
    faults.install(monkeypatch)
    with faults.armed(fail_at=1), pytest.raises(StoreError, match="Cannot use"):
        open_private(tmp_path / "file", os.O_RDWR | os.O_CREAT)

    assert open_below(tmp_path) == []


def test_a_table_that_cannot_be_deleted_keeps_its_log(tmp_path, monkeypatch):
    """Without it, a second connection began another log: SQLite read the one by the other's
    index, and said that the disk had failed.
    """
    tier = open_tier(tmp_path)
    save(tier, IDS)
    [table] = tmp_path.glob("*/cache.db")
    stuck = StuckFiles(monkeypatch)
    stuck.endings = ("cache.db",)
    model_dirs.empty(table.parent)

    assert (table.parent / "cache.db-wal").exists()
    other = open_tier(tmp_path)
    assert save(other, [7, 7, 7, 7])
    assert restored(other, [7, 7, 7, 7]) == 2


def test_a_log_without_a_table_is_not_taken_for_that_of_the_next(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    save(tier, IDS)
    [table] = tmp_path.glob("*/cache.db")
    table.unlink()

    other = open_tier(tmp_path)

    assert save(other, IDS)
    assert restored(other, IDS) == 3


def test_an_opening_that_meets_a_failing_disk_leaves_a_chat_without_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    faults.install(monkeypatch)

    def failing() -> DiskTier:
        monkeypatch.setattr(faults, "strikes", lambda kind: kind == "sql CREATE")
        return open_tier(tmp_path)

    thread = TransferThread(failing, 0)
    assert thread.flush(60)

    assert thread.is_without_tier
    assert isinstance(thread.failure, sqlite3.OperationalError)
    assert "the tier could not be opened" in caplog.text
    assert open_below(tmp_path) == []
    thread.close(60)
