"""DiskTier when the world breaks: a miss that is counted, never an exception, never wrong KV."""

import fcntl
import multiprocessing
import os
import random
import shutil
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.db import LOCK_NAME
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.tier import DamagedRecord
from kvchat.core.errors import StoreError
from support.pack_chains import (
    LAYOUT,
    find,
    num_found,
    open_tier,
    payload_files,
    restored,
    save,
    used_bytes,
)
from support.soak_sizes import short_and_long

IDS = [1, 2, 3, 4, 5, 6]


def filled(directory: Path) -> None:
    tier = open_tier(directory)
    for number in range(8):
        assert save(tier, [number, *IDS])
    assert save(tier, IDS)
    tier.close()


def database(directory: Path) -> Path:
    [path] = directory.glob("**/cache.db")
    return path


def try_all(tier: DiskTier) -> None:
    """Do everything a tier can do; what it reads has to be right."""
    for ids in [IDS, *([number, *IDS] for number in range(8))]:
        with suppress(DamagedRecord):
            restored(tier, ids)
    save(tier, [9, 9, 9, 9])
    tier.status()
    tier.verify()
    tier.gc()


def longer(path: Path) -> None:
    os.truncate(path, 1 << 42)  # a hole: as long as a disk, and hardly a byte of it there


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def a_link(path: Path) -> None:
    target = path.with_suffix(".elsewhere")
    path.rename(target)
    path.symlink_to(target)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        Path.unlink,
        flipped,
        longer,
        a_link,
        a_pipe,
        a_directory,
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 1000),
        lambda path: path.write_bytes(b"XXXX" + path.read_bytes()[4:]),
    ],
    ids=["missing", "flipped", "huge", "link", "pipe", "directory", "empty", "cut", "begun else"],
)
def test_a_spoiled_payload_is_refused_once_and_can_be_written_again(tmp_path, spoil):
    tier = open_tier(tmp_path)
    save(tier, IDS)
    [payload] = payload_files(tmp_path)
    spoil(payload)

    [found] = find(tier, IDS)
    with pytest.raises(DamagedRecord):
        tier.read(found)

    assert tier.status().trouble
    assert find(tier, IDS) == []
    assert save(tier, IDS)
    assert restored(tier, IDS) == 3


def test_verify_reads_everything_and_drops_what_is_damaged(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for first in range(3):
        save(tier, [first, *IDS])
    flipped(payload_files(tmp_path)[0])

    assert tier.verify() == (2, 1)
    assert tier.verify() == (2, 0)


@pytest.mark.parametrize("rounds", [100, pytest.param(2000, marks=pytest.mark.soak)])
def test_flipped_bits_anywhere_in_a_store_are_noticed_or_harmless(tmp_path, rounds):
    original, copy = tmp_path / "original", tmp_path / "copy"
    filled(original)
    rng = random.Random(13)
    for _ in range(rounds):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        # Half of them in the table, which is small beside the payloads.
        paths = [database(copy)] if rng.random() < 0.5 else payload_files(copy)
        path = rng.choice(paths)
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 1, 8, 200])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        tier = open_tier(copy)
        try_all(tier)
        tier.close()


@pytest.mark.parametrize("rubbish", [b"", b"not a database", b"SQLite format 3\0" + b"x" * 9000])
def test_a_table_that_is_none_is_begun_anew(tmp_path: Path, rubbish: bytes) -> None:
    filled(tmp_path)
    database(tmp_path).write_bytes(rubbish)
    tier = open_tier(tmp_path)

    try_all(tier)

    assert save(tier, IDS)
    assert restored(tier, IDS) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE Pack SET key = 'text' WHERE rowid = 1",
        "UPDATE Pack SET key = 99999999999999 WHERE rowid = 1",
        "UPDATE Pack SET file = '../../../lock'",
        "UPDATE Pack SET file = 7",
        "UPDATE Pack SET file = NULL",
        "UPDATE Pack SET file = NULL, size = 0",
        "UPDATE Pack SET file = NULL, size = 0, payload = 12",
        "UPDATE Pack SET ids = 'text'",
        "UPDATE Pack SET parent = 12",
        "UPDATE Pack SET block_size = 'wide', block_bytes = -1",
        "UPDATE Pack SET payload = 'text'",
        "UPDATE Pack SET last_s = 'soon', num_uses = 'many'",
        "UPDATE Pack SET size = 'long'",
        "UPDATE Pack SET size = -1",
        "DROP TABLE Pack",
        "DROP TABLE Pin",
        "DROP INDEX Pack_size",
        "INSERT INTO Pin VALUES ('text', 7, 'late', 8)",
        "PRAGMA user_version = 99",
    ],
)
def test_a_table_that_lies_is_a_miss(tmp_path: Path, statement: str) -> None:
    filled(tmp_path)
    with sqlite3.connect(database(tmp_path)) as connection:
        connection.execute(statement)
    connection.close()
    tier = open_tier(tmp_path)

    try_all(tier)
    tier.close()

    again = open_tier(tmp_path)
    assert save(again, [7, 7, 7, 7]), "a lie must not switch the store off for good"
    assert restored(again, [7, 7, 7, 7]) == 2
    assert used_bytes(tmp_path) <= 8 << 20


def test_a_table_that_lies_about_a_size_takes_no_memory(tmp_path: Path) -> None:
    """As much memory as the largest pack claims to need was once taken and touched, four times."""
    filled(tmp_path)
    with sqlite3.connect(database(tmp_path)) as connection:
        connection.execute(f"UPDATE Pack SET size = {1 << 47}")
    connection.close()

    tier = open_tier(tmp_path)
    assert tier._db.table.largest() == 0
    assert save(tier, IDS)
    assert restored(tier, IDS) == 3


def test_a_lost_table_leaves_files_that_gc_removes(tmp_path: Path) -> None:
    filled(tmp_path)
    for path in database(tmp_path).parent.glob("cache.db*"):
        path.unlink()

    tier = open_tier(tmp_path)
    assert restored(tier, IDS) == 0
    tier.gc()
    assert payload_files(tmp_path) == []
    assert save(tier, IDS)


def test_a_busy_table_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    save(tier, IDS)
    with sqlite3.connect(database(tmp_path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert not save(tier, [7, 7, 7, 7])
        assert tier.status().num_held_up == 1
        assert tier.status().trouble == "", "it passes"
        other.rollback()
    other.close()

    assert save(tier, [7, 7, 7, 7])


def test_a_full_disk_keeps_nothing_more_and_says_so(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, min_free_bytes=1 << 60)

    assert not save(tier, IDS)
    assert "nearly full" in tier.status().trouble
    assert tier.status().num_failed_writes == 1


def test_a_directory_that_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Cannot use the directory"):
        open_tier(Path("/proc/kv"))

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / LAYOUT.identity.hex()).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        open_tier(tmp_path)


def test_a_directory_deleted_while_running_is_made_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    save(tier, IDS)
    [found] = find(tier, IDS)
    shutil.rmtree(tmp_path / "kv")

    with pytest.raises(DamagedRecord):
        tier.read(found)
    assert save(tier, [7, 7, 7, 7])
    assert restored(tier, [7, 7, 7, 7]) == 2


def test_a_directory_that_another_process_deleted_and_made_again_is_noticed(tmp_path):
    """Else rows go into a file without a name, and the payloads are counted nowhere."""
    tier = open_tier(tmp_path / "kv")
    save(tier, IDS)
    shutil.rmtree(tmp_path / "kv")
    other = open_tier(tmp_path / "kv")
    save(other, [5, 5])

    assert save(tier, [7, 7, 7, 7])
    assert num_found(other, [7, 7, 7, 7]) == 2
    assert restored(tier, [5, 5]) == 1


def test_whoever_holds_the_lock_for_long_is_not_waited_for(tmp_path: Path) -> None:
    """A process stopped with Ctrl-Z may hold it for hours."""
    tier = open_tier(tmp_path)
    descriptor = os.open(tmp_path / LOCK_NAME, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    start_s = time.monotonic()

    assert not save(tier, [8, 8, 8, 8])

    assert time.monotonic() - start_s < 30
    os.close(descriptor)
    assert save(tier, [8, 8, 8, 8])


def _truncate_under(directory: Path) -> None:
    tier = open_tier(directory)
    restored(tier, IDS)
    os.truncate(database(directory), 4096)
    try_all(tier)


def test_a_table_cut_short_under_a_running_process_does_not_kill_it(tmp_path: Path) -> None:
    """Memory-mapped pages behind the end of a file are a SIGBUS."""
    filled(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=_truncate_under, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def _write_at_random(directory: Path, seed: int, until_s: float) -> None:
    rng = random.Random(seed)
    tier = open_tier(directory, limit_bytes=6 << 20)
    num_restored = 0
    while time.monotonic() < until_s + (0 if num_restored else 60):  # a busy machine opens late
        ids = [rng.randint(0, 2) for _ in range(rng.randint(2, 16))]
        save(tier, ids)
        with suppress(DamagedRecord):  # forgotten between being found and being read
            num_restored += restored(tier, ids)
        if rng.random() < 0.02:
            tier.gc()
        if rng.random() < 0.002:
            StoreAdmin(directory).clear()
    status = tier.status()
    assert status.num_damaged == 0, status.trouble
    assert num_restored > 0
    tier.close()


@short_and_long((3, 3), (10, 60))
def test_processes_that_share_a_store_keep_the_limit_and_read_only_their_own(tmp_path, size):
    """While all save, restore and collect, one or another empties the whole store.

    That left damage: a table begun anew took for its own the log that the old one had left.
    """
    num_processes, seconds = size
    until_s = time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_write_at_random, args=(tmp_path, seed, until_s))
        for seed in range(num_processes)
    ]
    for process in processes:
        process.start()
    while time.monotonic() < until_s:
        assert used_bytes(tmp_path) <= 6 << 20
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * num_processes
