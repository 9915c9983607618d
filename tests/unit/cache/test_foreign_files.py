"""A store among the files of others: whatever it does, it deletes and changes only its own.

The user names its directory: it may be a home directory, or full of another program's data, whose
directories are called by 32 hexadecimal digits too. Links lead out of it.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cache.disk import model_dirs
from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.db import LOCK_NAME
from kvchat.cache.disk.model_dirs import DATABASE, drop, find_model_dirs, tree_bytes
from kvchat.cache.disk.quota import disk_budget
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from kvchat.core.errors import StoreError
from kvchat.core.text import Size
from support.canary_tree import PACK_NAME, CanaryTree, digest, plant
from support.pack_chains import LAYOUT, keys_of, num_found, open_tier, payload_files, restored, save

IDS = [1, 2, 3, 4, 5, 6]
OWN = LAYOUT.identity.hex()
OTHER = replace(LAYOUT, identity=b"another model...")
LIMIT = 3 << 20


@pytest.fixture
def tree(tmp_path: Path) -> CanaryTree:
    return plant(tmp_path / "store", tmp_path / "outside")


def use_everything(store: Path) -> None:
    """Write, evict, forget, collect, verify, begin damaged tables anew, and clear."""
    for layout in (LAYOUT, OTHER):
        tier = open_tier(store, LIMIT, layout)
        for number in range(40):
            save(tier, [number, *IDS, 7], layout)
        tier.forget(keys_of(tier, [39, *IDS, 7], layout))
        tier.pin(keys_of(tier, [38, *IDS, 7], layout), encode_ids([38, *IDS, 7]), "mine")
        tier.close()
    kept = StoreAdmin(store, Size(num_bytes=LIMIT))
    kept.forget([[37, *IDS, 7]], [])
    kept.verify()
    for path in find_model_dirs(store):
        (path / DATABASE).write_bytes(b"no table at all" * 500)
    kept.verify()
    tier = open_tier(store, LIMIT)
    assert save(tier, IDS)
    tier.close()
    kept.gc()
    kept.clear()


def test_nothing_of_others_in_the_directory_is_touched(tree: CanaryTree) -> None:
    """A chat deleted every directory called by 32 hexadecimal digits that had a file `cache.db`,
    or was empty, or held directories called by two digits; and emptied every file called `lock`.
    """
    before = tree.digest()

    use_everything(tree.store)

    assert tree.digest() == before
    assert find_model_dirs(tree.store) == []


def test_no_link_in_the_store_leads_out_of_it(tree: CanaryTree) -> None:
    """Collecting looked for packs through a linked directory, and deleted what it found there."""
    open_tier(tree.store).close()
    tree.link_into(tree.store / OWN)
    before = tree.digest()

    use_everything(tree.store)

    assert tree.digest() == before
    assert (tree.store / OWN / "notes.txt").read_text() == "of the user"
    assert (tree.store / OWN / "ee" / PACK_NAME).read_bytes() == b"of another program"
    assert (tree.store / OWN / "ab").is_symlink()
    assert tree_bytes(tree.store / OWN) < 20_000, "what others put there is not ours to count"


def test_a_model_dir_with_files_of_others_in_it_stays_ours(tree: CanaryTree) -> None:
    open_tier(tree.store).close()
    tree.link_into(tree.store / OWN)
    StoreAdmin(tree.store).clear()

    tier = open_tier(tree.store)

    assert save(tier, IDS)
    assert restored(tier, IDS) == 3


@pytest.mark.parametrize("content", ["table", "nothing else", "a link"])
def test_a_directory_in_the_place_of_ours_is_refused_and_left_alone(tree, content):
    own = tree.store / OWN
    if content == "a link":
        own.symlink_to(tree.outside)
    else:
        own.mkdir()
        (own / ("cache.db" if content == "table" else "letter.txt")).write_bytes(b"not ours")
    before = tree.digest(), digest([own])

    with pytest.raises(StoreError, match=OWN):
        open_tier(tree.store)
    use = StoreAdmin(tree.store)
    use.verify(), use.gc(), use.clear()

    assert (tree.digest(), digest([own])) == before


def test_a_directory_without_its_mark_is_nobodys(tree: CanaryTree) -> None:
    """So is one that an earlier kvchat left; a mark that was copied into another marks nothing."""
    tier = open_tier(tree.store)
    assert save(tier, IDS)
    tier.close()
    own, copy = tree.store / OWN, tree.store / ("ab" * 16)
    shutil.copytree(own, copy)
    [mark] = own.glob("*.kvchat")
    mark.unlink()
    before = digest([own, copy])

    assert find_model_dirs(tree.store) == []
    assert StoreAdmin(tree.store).clear() == 0
    with pytest.raises(StoreError, match="not made by this kvchat"):
        open_tier(tree.store)

    assert digest([own, copy]) == before


def swapped(path: Path, target: Path) -> None:
    """Put a link in the place of a directory."""
    path.rename(path.with_name("moved away"))
    path.symlink_to(target)


def marked_copy(tree: CanaryTree) -> Path:
    """Have `outside` look like the model directory in all that is looked at by name."""
    model_dirs.make(tree.outside / OWN)
    for path in tree.outside.iterdir():
        if path.name != OWN and path.is_file():
            shutil.copy(path, tree.outside / OWN / path.name)
    return tree.outside / OWN


@pytest.mark.parametrize("moment", ["open", "listdir", "unlink"])
def test_a_directory_swapped_for_a_link_while_it_is_deleted_does_not_lead_out(
    tree: CanaryTree, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between the check and each step of deleting it."""
    tier = open_tier(tree.store)
    assert save(tier, IDS)
    tier.close()
    own, before = tree.store / OWN, tree.digest()
    real: Callable[..., object] = getattr(os, moment)

    def swap_first(*arguments: object, **settings: object) -> object:
        monkeypatch.setattr(os, moment, real)
        swapped(own, tree.outside)
        return real(*arguments, **settings)

    monkeypatch.setattr(os, moment, swap_first)
    drop(own)

    assert tree.digest() == before


@pytest.mark.parametrize("deed", ["save", "gc", "forget", "evict", "verify", "pin", "close"])
def test_a_model_dir_swapped_for_a_link_under_a_tier_does_not_lead_out(tree, deed):
    tier = open_tier(tree.store, LIMIT)
    for number in range(20):
        assert save(tier, [number, *IDS, 7])
    swapped(tree.store / OWN, marked_copy(tree))
    before = tree.digest()

    with suppress(StoreError):
        do(tier, deed)
    tier.close()

    assert tree.digest() == before


def do(tier: DiskTier, deed: str) -> None:
    deeds: dict[str, Callable[[], object]] = {
        "save": lambda: save(tier, [77, *IDS, 7]),
        "gc": tier.gc,
        "forget": lambda: tier.forget(keys_of(tier, [3, *IDS, 7])),
        "evict": lambda: [save(tier, [number, *IDS, 7]) for number in range(50, 70)],
        "verify": tier.verify,
        "pin": lambda: tier.pin(keys_of(tier, [3, *IDS, 7]), encode_ids([3, *IDS, 7]), "mine"),
        "close": tier.close,
    }
    deeds[deed]()


def test_a_lock_of_others_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    os.link(tmp_path / "letter.txt", tmp_path / LOCK_NAME)
    model_dirs.make(tmp_path / OWN)
    with pytest.raises(StoreError, match="another file too"):
        StoreAdmin(tmp_path).clear()
    (tmp_path / LOCK_NAME).unlink()
    (tmp_path / LOCK_NAME).write_text("pid 4711, of another program")

    tier = open_tier(tmp_path)

    assert not save(tier, IDS)
    assert "not made by kvchat" in tier.status().trouble
    assert (tmp_path / LOCK_NAME).read_text() == "pid 4711, of another program"
    assert (tmp_path / "letter.txt").read_text() == "dear"


# What stands where the table belongs


def a_directory(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("not ours")


def a_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / DATABASE)


def another_name(path: Path, outside: Path) -> None:
    os.link(outside / DATABASE, path)


def unreadable(path: Path, outside: Path) -> None:
    path.write_bytes(b"no table")
    path.chmod(0)


@pytest.mark.parametrize("name", [DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"])
@pytest.mark.parametrize("spoil", [a_directory, a_pipe, a_link, another_name, unreadable])
def test_what_stands_in_the_place_of_a_table_makes_way_for_one(tree, spoil, name):
    """A directory called `cache.db` switched the disk cache off for good."""
    tier = open_tier(tree.store)
    assert save(tier, IDS)
    tier.close()
    own, before = tree.store / OWN, tree.digest()
    (own / name).unlink(missing_ok=True)
    spoil(own / name, tree.outside)
    StoreAdmin(tree.store).status()

    tier = open_tier(tree.store)
    assert save(tier, [7, 7, 7, 7])
    assert num_found(tier, [7, 7, 7, 7]) == 2
    spoiled_again = own / DATABASE
    spoiled_again.unlink()
    spoil(spoiled_again, tree.outside)
    assert save(tier, [8, 8, 8, 8]), tier.status()
    assert restored(tier, [8, 8, 8, 8]) == 2
    tier.close()

    assert tree.digest() == before
    theses = list(own.glob("*/thesis.txt"))
    assert all(path.read_text() == "not ours" for path in theses)
    assert bool(theses) == (spoil is a_directory)


def test_a_directory_whose_name_has_a_variable_in_it_is_meant_as_it_is(tmp_path, monkeypatch):
    """A library put in the variable's value: the table came to lie in another directory."""
    monkeypatch.setenv("ELSEWHERE", "elsewhere")
    tier = open_tier(tmp_path / "$ELSEWHERE")
    assert save(tier, IDS)
    tier.close()

    assert [path.name for path in tmp_path.iterdir()] == ["$ELSEWHERE"]
    assert list((tmp_path / "$ELSEWHERE").glob("*/cache.db"))


def test_a_relative_directory_that_begins_with_a_tilde_is_meant_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tier = DiskTier(Path("~root"), LAYOUT, 1 << 30, min_free_bytes=0)
    assert save(tier, IDS)
    tier.close()

    assert payload_files(tmp_path / "~root")


def test_what_others_put_into_the_store_is_not_in_its_budget(tree: CanaryTree) -> None:
    tier = open_tier(tree.store)
    assert save(tier, IDS)
    before = tier.status().num_bytes, disk_budget(Size(num_bytes=LIMIT), tree.store)
    (tree.store / OWN / "film.mkv").write_bytes(bytes(4 << 20))
    tier.gc()

    assert (tier.status().num_bytes, disk_budget(Size(num_bytes=LIMIT), tree.store)) == before
    assert StoreAdmin(tree.store).num_bytes() == before[0]
