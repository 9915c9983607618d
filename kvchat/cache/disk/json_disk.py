"""The table behind DiskMemory: a diskcache whose rows are text, never pickles and never files.

diskcache pickles values of types that SQLite lacks, and unpickles such rows. A program that can
write a row could then run code here.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from diskcache import UNKNOWN, Cache, Disk

from kvchat.core.errors import StoreError

MAX_FACT_BYTES = 1 << 20
_LIMIT_BYTES = 16 << 20
_TABLES = {"Settings", "Cache"}


class JsonDisk(Disk):
    """Stores values as JSON text and keys as text. A row of any other form is a miss."""

    def put(self, key: str) -> tuple[str, bool]:
        return key, True

    def get(self, key: Any, raw: bool) -> str:
        if not raw or type(key) is not str:
            raise OSError("a key that is no text")
        return key

    def store(self, value: object, read: bool, key: object = UNKNOWN) -> Any:
        text = json.dumps(value)
        if len(text) > MAX_FACT_BYTES:
            raise ValueError(f"a fact of {len(text)} bytes")
        self.min_file_size = MAX_FACT_BYTES + 1  # text below this stays in the table
        return super().store(text, False, key)

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> object:
        """Return a value. Raises OSError, which diskcache takes for a miss."""
        if filename is not None or type(value) is not str:
            raise OSError("a value that is no text")
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise OSError("a value that is no JSON") from error

    def remove(self, file_path: str) -> None:
        """Deletes nothing: no row of ours names a file."""


def open_table(path: Path, patience_s: float) -> Cache:
    """Open the table in the file `path`, called cache.db; make it in an empty file.

    A call on it waits `patience_s` for other writers. Raises StoreError for a file of another
    program, sqlite3.Error for one that is locked or broken.
    """
    with closing(sqlite3.connect(path, timeout=patience_s, isolation_level=None)) as connection:
        # diskcache would wait a minute for a process that was stopped while it wrote.
        connection.execute("BEGIN IMMEDIATE")
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        connection.execute("ROLLBACK")
        if not {name for (name,) in rows} <= _TABLES:
            raise StoreError(f"{path} was not made by kvchat.", "Move it.")
        # While this connection is open, no other one empties the log at its end.
        return Cache(
            str(path.parent),
            timeout=patience_s,
            disk=JsonDisk,
            size_limit=_LIMIT_BYTES,
            eviction_policy="least-recently-stored",
            cull_limit=10,
            statistics=0,
            tag_index=0,
            # If another process truncates a mapped table, the reading process is killed.
            sqlite_mmap_size=0,
        )
