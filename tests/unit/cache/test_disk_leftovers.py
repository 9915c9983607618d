"""What cut-off, failed and rival processes leave in a store: reclaimed, and never called damage."""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cache.disk import db, model_dirs, table
from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.model_dirs import Sizes, tree_bytes
from kvchat.cache.disk.table import PackTable
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.tier import BlockRun, DamagedRecord, GoneRecord
from support.pack_chains import LAYOUT, find, num_found, open_tier, payload_files, restored, save

IDS = [1, 2, 3, 4, 5, 6]
LIMIT = 5 << 20


def payload_only(directory: Path, ids: list[int]) -> None:
    """Leave what a process leaves that is killed between a pack's payload and its row."""
    tier = open_tier(directory)
    save(tier, ids)
    [found] = find(tier, ids)
    tier._db.table._execute("DELETE FROM Pack WHERE key = ?", (found.key,))
    tier.close()


def test_payloads_of_processes_that_were_killed_between_two_writes_do_not_pile_up(tmp_path):
    """Eviction looks at heads: payloads without one filled the store for good."""
    for number in range(20):
        payload_only(tmp_path, [number, *IDS, 7])

    tier = open_tier(tmp_path, LIMIT)

    assert payload_files(tmp_path) == []
    assert save(tier, IDS)
    assert restored(tier, IDS) == 3


def test_a_row_that_cannot_be_written_leaves_no_payload_behind(tmp_path, monkeypatch):
    tier = open_tier(tmp_path)
    with contextmanager(failing)(monkeypatch, tier, "INSERT", False):
        for number in range(5):
            assert not save(tier, [number, *IDS, 7])
        assert payload_files(tmp_path) == []
    assert save(tier, IDS)

    assert len(payload_files(tmp_path)) == 1


def read_while(
    tier: DiskTier, found: BlockRun, change: Callable[[], object], patch: pytest.MonkeyPatch
) -> None:
    """Read a pack that is gone because the store changes between its row and its payload."""
    table = tier._db.table
    image = table.image

    def changed(*arguments: object) -> object:
        patch.undo()
        change()
        return image(*arguments)

    patch.setattr(table, "image", changed)
    with pytest.raises(GoneRecord, match="gone"):
        tier.read(found)


def test_a_pack_exchanged_while_it_is_read_is_left_alone(tmp_path, monkeypatch):
    """A head and another pack's payload looked like damage, and the good new pack was deleted."""
    reader, other = open_tier(tmp_path), open_tier(tmp_path)
    save(reader, IDS)
    [found] = find(reader, IDS)

    def exchange() -> None:
        other.forget([found.key])
        save(other, [1, 2, 9, 9, 9, 9])

    read_while(reader, found, exchange, monkeypatch)

    assert reader.status().num_damaged == 0
    assert restored(other, [1, 2, 9, 9, 9, 9]) == 3


def test_a_store_emptied_while_it_is_read_holds_no_damage(tmp_path, monkeypatch):
    """The old table, deleted and still open, had the head of a payload that was gone."""
    tier = open_tier(tmp_path)
    save(tier, IDS)
    [found] = find(tier, IDS)

    read_while(tier, found, StoreAdmin(tmp_path).clear, monkeypatch)

    assert (tier.status().num_damaged, tier.status().trouble) == (0, "")
    assert save(tier, IDS)


def test_a_full_disk_can_be_tidied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark in the lock's file is a byte that a full disk has no room for."""

    class FullDisk:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def pwrite(self, *_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    payload_only(tmp_path, IDS)
    monkeypatch.setattr(db, "os", FullDisk())

    tier = open_tier(tmp_path)
    tier.gc()

    assert payload_files(tmp_path) == []
    assert tier.status().trouble == ""


def test_another_model_dir_is_measured_once_until_it_changes(tmp_path, monkeypatch):
    """Every write of a pack once walked all files of all other models."""
    writer = open_tier(tmp_path)
    save(writer, IDS)
    [model_dir] = model_dirs.find_model_dirs(tmp_path)
    age(model_dir)
    sizes, walked = Sizes(), []

    def counted(path: Path) -> int:
        walked.append(path)
        return tree_bytes(path)

    monkeypatch.setattr(model_dirs, "tree_bytes", counted)
    monkeypatch.setattr(model_dirs, "_CLOCK_STEP_S", 3600.0)  # what is aged here is of 2001
    first = sizes.of(model_dir)
    assert sizes.of(model_dir) == first == tree_bytes(model_dir)
    assert len(walked) == 1

    save(writer, [9, 9, 9, 9])

    assert sizes.of(model_dir) == tree_bytes(model_dir) > first
    assert sizes.of(model_dir) == tree_bytes(model_dir)
    assert len(walked) == 3, "a table changed this moment may change again unnoticed"


def age(model_dir: Path) -> None:
    for path in model_dir.glob("cache.db*"):
        os.utime(path, (1e9, 1e9))


def test_a_tier_counts_what_other_models_write_meanwhile(tmp_path: Path) -> None:
    layout = replace(LAYOUT, identity=b"another model...")
    tier, other = open_tier(tmp_path), open_tier(tmp_path, layout=layout)
    before = tier.status().num_bytes
    save(other, IDS, layout)

    assert tier.status().num_bytes >= before + 3 * layout.block_bytes


def failing(
    monkeypatch: pytest.MonkeyPatch, tier: DiskTier, verb: str, takes_back: bool
) -> Iterator[None]:
    """Fail every statement that begins with `verb`, as SQLite does where a disk is full."""
    execute = PackTable._execute

    def run(table: PackTable, statement: str, values: tuple[object, ...] = ()) -> object:
        if statement.startswith(verb):
            if takes_back:
                table._connection.rollback()
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return execute(table, statement, values)

    with monkeypatch.context() as patch:
        patch.setattr(PackTable, "_execute", run)
        yield


@pytest.mark.parametrize(("verb", "takes_back"), [("INSERT", True), ("COMMIT", False)])
def test_a_full_disk_neither_empties_the_store_nor_locks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, takes_back: bool
) -> None:
    """SQLite takes some changes back by itself: to take them back once more was an error that looks
    like a broken table's. Others stay open, and no process could write while this one ran.
    """
    tier = open_tier(tmp_path)
    save(tier, IDS)
    with contextmanager(failing)(monkeypatch, tier, verb, takes_back):
        assert not save(tier, [8, 8, 8, 8])

    assert restored(tier, IDS) == 3
    assert save(open_tier(tmp_path), [7, 7, 7, 7])
    assert save(tier, [9, 9, 9, 9])


def test_a_pack_that_can_never_fit_costs_no_other_its_place(tmp_path: Path) -> None:
    """Room was made for it by forgetting everything, and then there was too little."""
    tier = open_tier(tmp_path, LIMIT)
    save(tier, IDS)

    assert not save(tier, [7, 7, *range(300)])

    assert restored(tier, IDS) == 3


def test_a_pack_whose_file_is_gone_can_be_written_again(tmp_path, monkeypatch):
    """The row alone kept the pack from being written once more."""
    monkeypatch.setattr(table, "MIN_FILE_BYTES", 64)
    tier = open_tier(tmp_path)
    save(tier, IDS)
    for path in payload_files(tmp_path):
        path.unlink()

    with pytest.raises(DamagedRecord):
        restored(tier, IDS)
    assert num_found(tier, IDS) == 0
    assert save(tier, IDS)
    assert restored(tier, IDS) == 3


def test_a_directory_of_somebody_else_stays_whatever_it_is_called(tmp_path: Path) -> None:
    """In a directory of the user's choice, all that was called by 32 hexadecimal digits went."""
    foreign = tmp_path / "d41d8cd98f00b204e9800998ecf8427e"
    (foreign / "ab").mkdir(parents=True)
    (foreign / "thesis.txt").write_text("not ours")

    tier = open_tier(tmp_path)
    save(tier, IDS)
    tier.gc()
    tier.close()
    StoreAdmin(tmp_path, 1 << 30).clear()

    assert (foreign / "thesis.txt").read_text() == "not ours"


def diskcache_store(directory: Path) -> None:
    """Leave a store as kvchat 0.1.0 did, whose table was diskcache's: a pack and a pin."""
    tier = open_tier(directory)
    save(tier, IDS)
    tier.close()
    [own] = model_dirs.find_model_dirs(directory)
    [payload] = payload_files(directory)
    (own / "cache.db").unlink()
    (own / "pinned").touch()
    with sqlite3.connect(own / "cache.db") as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE Settings (key TEXT NOT NULL UNIQUE, value)")
        connection.execute(
            "CREATE TABLE Cache (rowid INTEGER PRIMARY KEY, key BLOB, raw INTEGER, store_time REAL,"
            " expire_time REAL, access_time REAL, access_count INTEGER DEFAULT 0, tag BLOB,"
            " size INTEGER DEFAULT 0, mode INTEGER DEFAULT 0, filename TEXT, value BLOB)"
        )
        connection.execute(
            "INSERT INTO Cache (key, raw, size, mode, filename) VALUES (?, 1, ?, 2, ?)",
            (b"p" + bytes(16), payload.stat().st_size, payload.name),
        )
    connection.close()


def test_a_store_of_an_earlier_version_is_a_miss_and_is_begun_anew(tmp_path: Path) -> None:
    diskcache_store(tmp_path)
    status = StoreAdmin(tmp_path).status()
    assert "another version of kvchat" in status.trouble
    assert StoreAdmin(tmp_path).locate([("", IDS)])[0].cached.disk == 0

    tier = open_tier(tmp_path)

    assert tier.is_begun_anew
    assert "another version of kvchat" in tier.status().trouble
    assert payload_files(tmp_path) == []
    assert not list(tmp_path.glob("*/pinned"))
    assert num_found(tier, IDS) == 0
    assert save(tier, IDS)
    tier.close()
    again = open_tier(tmp_path)
    assert restored(again, IDS) == 3
    assert again.status().trouble == ""
