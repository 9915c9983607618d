"""A whole store is looked after without a model: counted, drawn, verified, tidied, emptied."""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cache.disk import admin as caretaker_module
from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.db import LOCK_NAME, StoreBusy
from kvchat.cache.disk.inventory import ModelDir, read_model_dir
from kvchat.cache.disk.model_dirs import find_model_dirs, tree_bytes
from kvchat.cache.disk.quota import disk_budget
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import root_key
from kvchat.cache.tier import Layout
from kvchat.core.errors import StoreError, StoreInUse
from kvchat.core.stats import Verified
from kvchat.core.text import Size
from support.pack_chains import LAYOUT, num_found, open_tier, payload_files, restored, save
from support.stored_packs import OTHER, StoredPacks, stored_packs

UNLIMITED = Size(num_bytes=1 << 40)
DAY_S = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> StoredPacks:
    return stored_packs(tmp_path / "kv")


@pytest.fixture
def store_admin(store: StoredPacks) -> StoreAdmin:
    return StoreAdmin(store.directory, UNLIMITED)


def snapshot(directory: Path) -> dict[str, tuple[int, float]]:
    return {
        str(path.relative_to(directory)): (path.lstat().st_size, path.lstat().st_mtime)
        for path in directory.rglob("*")
    }


def test_packs_of_all_models_are_counted_the_last_used_first(store, store_admin):
    store.age(DAY_S)

    status = store_admin.status()

    mine, other = status.model_dirs
    assert (mine.identity, other.identity) == (LAYOUT.identity.hex(), OTHER.identity.hex())
    assert (mine.num_packs, mine.num_tokens) == (4, 14)
    assert (other.num_packs, other.num_tokens) == (1, 8)
    assert DAY_S / 2 < mine.last_used_s - other.last_used_s < DAY_S * 2
    assert status.num_bytes == sum(tree_bytes(path) for path in find_model_dirs(store.directory))
    assert status.trouble == ""


def test_looking_changes_nothing_and_leaves_no_trace(store, store_admin):
    """The time of a table's change is what says that a model's packs are no longer used."""
    before = snapshot(store.directory)

    store_admin.status()
    store_admin.tree()

    assert snapshot(store.directory) == before


def test_a_store_in_use_is_read_as_it_is_now(store: StoredPacks, store_admin: StoreAdmin) -> None:
    tier = open_tier(store.directory)
    save(tier, [4, 4, 4, 4])

    assert store_admin.status().num_packs == 6
    assert store_admin.verify() == Verified(6)
    store_admin.gc()
    assert store_admin.clear() > 0
    assert num_found(tier, [4, 4, 4, 4]) == 0
    assert save(tier, [4, 4, 4, 4])
    assert restored(tier, [4, 4, 4, 4]) == 2
    tier.close()


def test_the_tree_says_what_continues_what(store_admin: StoreAdmin) -> None:
    trees = {status.identity: packs for status, packs in store_admin.tree()}

    packs = trees[LAYOUT.identity.hex()]
    beginning = next(number for number, pack in enumerate(packs) if pack.num_tokens == 6)
    assert sorted(p.num_tokens for p in packs if p.parent == beginning) == [2, 2]
    assert sorted(p.num_tokens for p in packs if p.parent is None) == [4, 6]
    assert all(pack.parent is None or pack.parent < n for n, pack in enumerate(packs))
    assert not any(pack.is_orphan for pack in packs)
    assert all(abs(pack.last_used_s - time.time()) < 60 for pack in packs)
    assert [p.num_bytes for p in trees[OTHER.identity.hex()]] == [160_000]


def test_what_has_lost_its_beginning_is_told(store: StoredPacks, store_admin: StoreAdmin) -> None:
    table = store.directory / LAYOUT.identity.hex() / "cache.db"
    with sqlite3.connect(table) as connection:
        connection.execute(
            "DELETE FROM Pack WHERE length(ids) = (SELECT max(length(ids)) FROM Pack)"
        )
    connection.close()

    packs = next(tree for status, tree in store_admin.tree() if status.num_packs == 3)
    assert sorted(pack.is_orphan for pack in packs) == [False, True, True]


def test_verifying_finds_what_is_damaged_once_and_counts_as_no_use(store, store_admin):
    store.age(20 * DAY_S)  # too old: opening the other model's packs would have thrown these away
    store.damage()
    used_s = {g.identity: g.last_used_s for g in store_admin.status().model_dirs}
    order = [[pack.last_used_s for pack in packs] for _, packs in store_admin.tree()]

    found = store_admin.verify()

    assert found == Verified(num_sound=4, num_damaged=1)
    assert not found.is_sound
    assert store_admin.verify() == Verified(num_sound=4)
    assert {g.identity: g.last_used_s for g in store_admin.status().model_dirs} == used_s
    times = sorted(time_s for times in order for time_s in times)
    left = sorted(pack.last_used_s for _, packs in store_admin.tree() for pack in packs)
    assert set(left) < set(times)


def test_verifying_ends_when_nobody_waits_for_it(store_admin: StoreAdmin) -> None:
    assert store_admin.verify(lambda: False) == Verified()


def test_a_table_that_is_none_is_told_and_begun_anew(store, store_admin):
    store.spoil_table()

    status = store_admin.status()
    assert "not a database" in status.trouble
    assert status.num_packs == 4
    assert store_admin.verify() == Verified(num_sound=4, num_tables=1)
    assert store_admin.verify() == Verified(num_sound=4)


def make_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_link])
def test_what_is_no_table_is_not_opened(store, store_admin, make):
    table = store.directory / OTHER.identity.hex() / "cache.db"
    table.unlink()
    make(table)

    assert "no file" in store_admin.status().trouble


def test_a_table_of_another_program_is_told_not_believed(store, store_admin):
    table = store.directory / OTHER.identity.hex() / "cache.db"
    table.unlink()
    with sqlite3.connect(table) as connection:
        connection.execute("CREATE TABLE Pack (key TEXT, ids INTEGER)")
        connection.execute("INSERT INTO Pack VALUES ('h', 7)")
    connection.close()

    assert store_admin.status().trouble
    assert store_admin.verify().num_sound == 4


def test_collecting_drops_what_is_too_old_and_what_is_too_much(store: StoredPacks) -> None:
    store.age(20 * DAY_S)
    before = StoreAdmin(store.directory, UNLIMITED).status()

    freed = StoreAdmin(store.directory, UNLIMITED).gc()

    after = StoreAdmin(store.directory, UNLIMITED).status()
    assert [g.num_packs for g in after.model_dirs] == [4]
    assert freed > 160_000
    assert after.num_bytes <= before.num_bytes - freed
    StoreAdmin(store.directory, Size(num_bytes=1)).gc()
    assert StoreAdmin(store.directory, UNLIMITED).status().num_packs == 0


def test_collecting_does_not_keep_a_dying_model_dir_alive(store: StoredPacks) -> None:
    """Opening a table changes it; a store tidied every day would never have lost anything."""
    store.age(10 * DAY_S)
    used_s = StoreAdmin(store.directory).status().model_dirs[1].last_used_s

    StoreAdmin(store.directory, UNLIMITED).gc()

    assert StoreAdmin(store.directory).status().model_dirs[1].last_used_s == used_s


def test_clearing_deletes_packs_and_nothing_else(store, store_admin):
    (store.directory / "letters").mkdir()
    (store.directory / "letters" / "one.txt").write_text("dear")

    assert store_admin.clear() > 440_000
    assert payload_files(store.directory) == []
    assert not list(store.directory.rglob("cache.db"))
    assert (store.directory / "letters" / "one.txt").read_text() == "dear"
    assert store_admin.clear() == 0


def test_where_there_is_no_store_there_is_nothing_and_none_is_made(tmp_path: Path) -> None:
    store_admin = StoreAdmin(tmp_path / "none" / "kv")

    assert store_admin.status().num_packs == 0
    assert store_admin.status().limit_bytes > 0
    assert store_admin.tree() == []
    assert store_admin.verify() == Verified()
    assert store_admin.gc() == store_admin.clear() == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("deed", ["status", "tree", "verify", "gc", "clear"])
def test_a_directory_that_cannot_be_used_is_told_in_a_sentence(tmp_path: Path, deed: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Cannot use the directory .*: Not a directory"):
        getattr(StoreAdmin(tmp_path / "file"), deed)()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="symbolic link"):
        getattr(StoreAdmin(tmp_path / "link"), deed)()


@pytest.fixture
def locked_out(tmp_path: Path) -> Iterator[Path]:
    """A store in a directory that this user may not even look into."""
    store = stored_packs(tmp_path / "closed" / "kv")
    user = os.geteuid()
    (tmp_path / "closed").chmod(0)
    if user == 0:  # root is let in everywhere
        os.seteuid(65534)
    try:
        yield store.directory
    finally:
        os.seteuid(user)
        (tmp_path / "closed").chmod(0o700)


@pytest.mark.parametrize("deed", ["status", "tree", "verify", "gc", "clear"])
def test_a_directory_that_may_not_be_looked_into_is_told(locked_out: Path, deed: str) -> None:
    with pytest.raises(StoreError, match=r"Cannot use the directory .*: Permission denied"):
        getattr(StoreAdmin(locked_out), deed)()


def test_where_nobody_may_look_there_is_a_budget_all_the_same(locked_out: Path) -> None:
    """Asking whether the directory is there was refused, and the model was not loaded for it."""
    assert disk_budget(None, locked_out) > 0


def test_a_store_that_is_held_is_said_to_be(store, store_admin, monkeypatch):
    monkeypatch.setattr("kvchat.cache.disk.tier._PATIENCE_S", 0.05)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX);"
            " print(flush=True); sys.stdin.read()",
            str(store.directory / LOCK_NAME),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with pytest.raises(StoreInUse, match="Another process holds the disk cache"):
            store_admin.gc()
        assert store_admin.verify() == Verified(5), "reading needs no lock"
    finally:
        holder.communicate()


def test_a_share_does_not_shrink_as_the_store_fills(store, monkeypatch):
    """The default was a tenth of what is free *beside* the store: each start threw some away."""
    kept = sum(tree_bytes(path) for path in find_model_dirs(store.directory))
    share, usage = Size(share=1.0), shutil.disk_usage(store.directory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)  # others write to this disk too

    with_store = disk_budget(share, store.directory)
    without = disk_budget(share, store.directory / "elsewhere")
    assert with_store - without == kept
    assert disk_budget(Size(num_bytes=7), store.directory) == 7


def test_a_store_that_was_empty_when_it_was_looked_at_loses_nothing_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packs' shape was not known, so a pack written meanwhile was taken for a damaged one."""
    tier = open_tier(tmp_path)
    [model_dir] = find_model_dirs(tmp_path)
    empty = read_model_dir(model_dir)
    save(tier, [1, 2, 3, 4])
    tier.close()
    monkeypatch.setattr(caretaker_module, "read_model_dir", lambda path: empty)

    StoreAdmin(tmp_path, UNLIMITED).gc()
    StoreAdmin(tmp_path, UNLIMITED).verify()
    StoreAdmin(tmp_path, UNLIMITED).unpin("nothing")

    assert restored(open_tier(tmp_path), [1, 2, 3, 4]) == 2


def test_what_cannot_be_read_is_not_said_to_be_forgotten(tmp_path, monkeypatch):
    tier = open_tier(tmp_path)
    save(tier, [1, 2, 3, 4])
    tier.close()
    [path] = find_model_dirs(tmp_path)
    locked = ModelDir(path, Layout(LAYOUT.identity, 1, 1), trouble="database is locked")
    monkeypatch.setattr(caretaker_module, "read_model_dir", lambda path: locked)

    with pytest.raises(StoreError, match="database is locked"):
        StoreAdmin(tmp_path, UNLIMITED).forget([[1, 2, 3, 4]], [])

    assert restored(open_tier(tmp_path), [1, 2, 3, 4]) == 2


def test_what_was_written_before_a_store_was_opened_is_forgotten_or_told_of(tmp_path, monkeypatch):
    """Looked for as blocks of one token each, for the store had been empty: nothing was found, and
    nothing said.
    """
    tier = open_tier(tmp_path)
    [path] = find_model_dirs(tmp_path)
    reads = [read_model_dir(path)]
    save(tier, [1, 2, 3, 4])
    tier.close()
    monkeypatch.setattr(
        caretaker_module, "read_model_dir", lambda p: reads.pop() if reads else read_model_dir(p)
    )

    with pytest.raises(StoreBusy, match="busy with the disk cache"):
        StoreAdmin(tmp_path, UNLIMITED).forget([[1, 2, 3, 4]], [])
    assert not reads
    assert StoreAdmin(tmp_path, UNLIMITED).forget([[1, 2, 3, 4]], []) == 2


@pytest.mark.parametrize("deed", ["verify", "gc", "unpin", "forget"])
@pytest.mark.parametrize("held", [LAYOUT, OTHER])
def test_a_table_that_others_hold_keeps_nothing_from_being_done_in_the_next(
    store: StoredPacks,
    store_admin: StoreAdmin,
    monkeypatch: pytest.MonkeyPatch,
    held: Layout,
    deed: str,
) -> None:
    arguments = {"unpin": ["mine"], "forget": [[[1, 2, 3, 4]], []]}.get(deed, [])
    done: list[bytes] = []

    def work(tier: DiskTier, *_: object) -> object:
        done.append(tier.root)
        if tier.root == root_key(held.identity):
            tier._stats.count(num_held_up=1)
        return (0, 0) if deed == "verify" else 0

    monkeypatch.setattr(DiskTier, deed, work)
    with pytest.raises(StoreBusy):
        getattr(store_admin, deed)(*arguments)

    assert {root_key(LAYOUT.identity), root_key(OTHER.identity)} <= set(done)


@pytest.mark.parametrize("unreadable", [LAYOUT, OTHER])
def test_what_cannot_be_read_keeps_nothing_else_from_being_forgotten(
    store: StoredPacks, store_admin: StoreAdmin, monkeypatch: pytest.MonkeyPatch, unreadable: Layout
) -> None:
    """One model's locked table once left a forgotten conversation's KV with all that came after."""
    context = [1, 2, 3, 4, 5, 6, 7, 8]
    name = unreadable.identity.hex()

    def read(path: Path) -> ModelDir:
        found = read_model_dir(path)
        return replace(found, trouble="database is locked") if path.name == name else found

    monkeypatch.setattr(caretaker_module, "read_model_dir", read)
    with pytest.raises(StoreError, match="database is locked"):
        store_admin.forget([context], [])

    readable = OTHER if unreadable is LAYOUT else LAYOUT
    tier = open_tier(store.directory, layout=readable)
    assert not restored(tier, context, readable)


def test_a_block_with_tokens_that_were_not_saved_goes_with_those_before_it(tmp_path):
    """A process is killed before the session has the last token. The block began with tokens of the
    conversation, and was under no key of it; the block before it was another conversation's too.
    """
    tier = open_tier(tmp_path)
    for ids in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9]):
        save(tier, ids)
    tier.close()
    admin = StoreAdmin(tmp_path, UNLIMITED)

    assert admin.forget([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 9, 9]]) == 2

    tier = open_tier(tmp_path)
    assert num_found(tier, [1, 2, 3, 4, 5, 6, 7, 8]) == 2
    assert num_found(tier, [1, 2, 3, 4, 9, 9]) == 3
    tier.close()
