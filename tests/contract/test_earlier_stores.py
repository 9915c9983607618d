"""Stores of other versions of kvchat: a miss that is said once."""

import sqlite3
from pathlib import Path

from kvchat.cache.disk.admin import StoreAdmin
from support.pack_chains import LAYOUT, open_tier, restored, save

IDS = [1, 2, 3, 4, 5, 6]


def store_of_version(directory: Path, version: int) -> None:
    """Make the store of a model, as another version numbers it."""
    tier = open_tier(directory)
    assert save(tier, IDS)
    tier.close()
    with sqlite3.connect(directory / LAYOUT.identity.hex() / "cache.db") as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


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


def test_a_look_at_an_earlier_version_tells_what_it_is(tmp_path: Path) -> None:
    store_of_version(tmp_path, 1)

    assert "another version of kvchat" in StoreAdmin(tmp_path).status().trouble
    assert StoreAdmin(tmp_path).verify().num_tables == 1
    assert StoreAdmin(tmp_path).status().trouble == ""
