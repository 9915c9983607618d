"""SQLite's locks on a table outlive whatever else this process does with the file.

Two programs at once once destroyed kept KV: a table was created, or looked at, by opening and
closing its file beside SQLite, and closing any descriptor ends all of a process's locks on it. The
next process to leave then took away the log that the first went on writing to.
"""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvchat.cache.disk.inventory import prefetch_pages, reading
from kvchat.cache.disk.model_dirs import find_model_dirs
from support.pack_chains import open_tier, save

CONTEXT = list(range(1, 21))
COME_AND_GO = """
import sqlite3, sys
table = sqlite3.connect(sys.argv[1])
table.execute("SELECT count(*) FROM Pack").fetchall()
table.close()
"""


def log_after_a_visit(store: Path) -> Path:
    """Let another process open and close the store's table; return where the table's log is."""
    [table] = store.glob("*/cache.db")
    subprocess.run([sys.executable, "-c", COME_AND_GO, str(table)], check=True)
    return table.with_name("cache.db-wal")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tier = open_tier(tmp_path)
    assert save(tier, CONTEXT[:6])
    tier.close()
    return tmp_path


def test_a_visitor_leaves_the_log_of_a_table_that_was_read_ahead(store: Path) -> None:
    writer = open_tier(store)
    assert save(writer, CONTEXT[:14])
    [model_dir] = find_model_dirs(store)
    with reading(model_dir) as packs:
        assert packs is not None
        assert list(packs.rows())
        second = open_tier(store)
    prefetch_pages(store, CONTEXT, 2)

    assert log_after_a_visit(store).exists()
    second.close()
    assert log_after_a_visit(store).exists()
    writer.close()


def test_a_table_opened_while_it_is_read_keeps_its_locks(store: Path) -> None:
    [table] = store.glob("*/cache.db")
    with closing(sqlite3.connect(table)) as reader:
        reader.execute("SELECT count(*) FROM Pack").fetchall()
        tier = open_tier(store)
        assert save(tier, CONTEXT[:14])

    assert log_after_a_visit(store).exists()
    assert save(tier, CONTEXT)
    tier.close()
