"""A process that ends while it makes a store's table leaves an empty store, and no "other version".

A fresh machine's first short chat ended before the table was done: `kvchat cache` told of another
version of kvchat, and `kvchat doctor` failed.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.table import PackTable
from support.pack_chains import LAYOUT, num_found, open_tier, save

IDS = [1, 2, 3, 4, 5, 6]


def check_is_empty_and_usable(directory: Path) -> None:
    status = StoreAdmin(directory).status()
    assert (status.trouble, status.num_packs) == ("", 0)

    tier = open_tier(directory)
    assert tier.status().trouble == ""
    save(tier, IDS)
    assert num_found(tier, IDS) == 3
    tier.close()
    assert StoreAdmin(directory).status().num_packs == 1


def test_a_process_that_is_killed_between_any_two_statements_leaves_an_empty_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, copies = PackTable._execute, []

    def noted(table: PackTable, statement: str, values: tuple[object, ...] = ()) -> Any:
        copies.append(tmp_path / f"killed-{len(copies)}")
        shutil.copytree(tmp_path / "kv", copies[-1])
        return execute(table, statement, values)

    with monkeypatch.context() as patch:
        patch.setattr(PackTable, "_execute", noted)
        open_tier(tmp_path / "kv").close()

    assert len(copies) > 10
    for copy in copies:
        check_is_empty_and_usable(copy)


@pytest.mark.parametrize("journal", [b"", b"\0" * 512])
def test_a_journal_that_stays_is_that_of_a_table_which_was_not_finished(tmp_path, journal):
    open_tier(tmp_path).close()
    table = tmp_path / LAYOUT.identity.hex() / "cache.db"
    table.write_bytes(b"")
    table.with_name("cache.db-journal").write_bytes(journal)

    check_is_empty_and_usable(tmp_path)
