"""Stores of other versions of kvchat: a miss that is said once, and files that go."""

import sqlite3
from dataclasses import replace
from pathlib import Path

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.model_dirs import find_model_dirs
from kvchat.cache.tier import Layout
from support.pack_chains import LAYOUT, open_tier, restored, save, used_bytes

IDS = [1, 2, 3, 4, 5, 6]
OTHER = Layout(identity=b"another model...", block_size=2, block_bytes=40_000)


def store_of_version(directory: Path, version: int, layout: Layout = LAYOUT) -> Path:
    """Make the store of a model, as another version numbers it; return its directory."""
    tier = open_tier(directory, layout=layout)
    assert save(tier, IDS, layout)
    tier.close()
    model_dir = directory / layout.identity.hex()
    with sqlite3.connect(model_dir / "cache.db") as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    return model_dir


def test_a_models_own_store_of_an_earlier_version_begins_anew(tmp_path: Path) -> None:
    store_of_version(tmp_path, 1)

    tier = open_tier(tmp_path)
    assert restored(tier, IDS) == 0
    assert "another version of kvchat" in tier.status().trouble
    assert save(tier, IDS)
    tier.close()

    again = open_tier(tmp_path)
    assert restored(again, IDS) == 3
    assert again.status().trouble == ""


def test_what_earlier_versions_left_of_other_models_goes_and_is_said_once(tmp_path: Path) -> None:
    """It took room until it was two weeks old, though nothing could read it."""
    left = store_of_version(tmp_path, 1, OTHER)
    (left / "notes.txt").write_text("not kvchat's")
    tier = open_tier(tmp_path)
    assert save(tier, IDS)
    before = used_bytes(tmp_path)

    tier.drop_earlier()

    assert "earlier version" in tier.status().trouble
    assert used_bytes(tmp_path) < before
    assert [path.name for path in left.iterdir() if path.suffix != ".kvchat"] == ["notes.txt"]
    tier.close()
    again = open_tier(tmp_path)
    again.drop_earlier()
    assert again.status().trouble == ""
    assert restored(again, IDS) == 3


def test_what_this_model_stored_in_another_form_goes_too(tmp_path: Path) -> None:
    """KV of 8 bits whose keys were not turned has another identity."""
    other = open_tier(tmp_path, layout=OTHER)
    assert save(other, IDS, OTHER)
    other.close()
    tier = open_tier(tmp_path, layout=replace(LAYOUT, earlier=(OTHER.identity,)))
    assert save(tier, IDS)

    tier.drop_earlier()

    assert "earlier version" in tier.status().trouble
    assert [path.name for path in find_model_dirs(tmp_path)] == [LAYOUT.identity.hex()]
    assert restored(tier, IDS) == 3


def test_a_later_version_and_this_one_stay(tmp_path: Path) -> None:
    store_of_version(tmp_path, 99, OTHER)
    third = Layout(b"a third model...", 2, 40_000)
    other = open_tier(tmp_path, layout=third)
    assert save(other, IDS, third)
    tier = open_tier(tmp_path)

    tier.drop_earlier()

    assert len(find_model_dirs(tmp_path)) == 3
    assert tier.status().trouble == ""
    assert restored(other, IDS, third) == 3


def test_a_look_at_an_earlier_version_tells_what_it_is(tmp_path: Path) -> None:
    store_of_version(tmp_path, 1)

    assert "another version of kvchat" in StoreAdmin(tmp_path).status().trouble
    assert StoreAdmin(tmp_path).verify().num_tables == 1
    assert StoreAdmin(tmp_path).status().trouble == ""
