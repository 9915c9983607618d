"""A SQLite file of this user's: what the HTTP server knows of earlier answers, across restarts.

SQLite from the standard library: the rows are small, several processes may write, and a row is
either there or not. A file that cannot be used is a loss of reuse, never of an answer.
"""

import logging
import sqlite3
import time
from pathlib import Path

from kvchat.core.errors import StoreError
from kvchat.core.paths import private_database

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
_IN_MEMORY = ":memory:"


def open_private_database(path: Path | None, table: str) -> sqlite3.Connection:
    """Return a connection that commits every statement; the caller closes it.

    path    the file, made with mode 0600; None, or a file that cannot be used, is memory
    table   the statement that makes the table where it is missing

    What is deleted is overwritten.
    """
    if path is not None:
        try:
            private_database(path)
            return _connect(str(path), table)
        except (StoreError, OSError, sqlite3.Error) as error:
            _log.warning("answers are known until the program ends only: %s", error)
    return _connect(_IN_MEMORY, table)


def drop_oldest(
    db: sqlite3.Connection, table: str, columns: tuple[str, ...], max_bytes: int
) -> None:
    """Drop the least recently used rows until three quarters of the limit are used.

    Nothing goes while the blobs of `columns` have at most `max_bytes` together. The table has the
    columns `key` and `used_s`. The names are this program's own, never input.
    """
    size = " + ".join(f"COALESCE(LENGTH({column}), 0)" for column in columns)
    [(used,)] = db.execute(f"SELECT COALESCE(SUM({size}), 0) FROM {table}").fetchall()
    if used <= max_bytes:
        return
    excess = used - max_bytes * 3 // 4
    old = []
    for key, num_bytes in db.execute(f"SELECT key, {size} FROM {table} ORDER BY used_s"):
        if excess <= 0:
            break
        old.append((key,))
        excess -= num_bytes
    db.executemany(f"DELETE FROM {table} WHERE key = ?", old)


def note_use(db: sqlite3.Connection, table: str, key: object) -> None:
    """Note that a row is used now."""
    db.execute(f"UPDATE {table} SET used_s = ? WHERE key = ?", (time.time(), key))


def erase(db: sqlite3.Connection, table: str, key: object) -> bool:
    """Delete a row for good; return whether it was there. Raises StoreError."""
    try:
        removed = db.execute(f"DELETE FROM {table} WHERE key = ?", (key,)).rowcount
        # The log would hold it for a while.
        [(is_held, *_)] = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"What is stored cannot be deleted: {error}.") from error
    if is_held:
        raise StoreError("Other processes read what is stored.", "Try again in a moment.")
    return removed > 0


def _connect(name: str, table: str) -> sqlite3.Connection:
    """Open a database; it is closed again where it cannot be used."""
    db = sqlite3.connect(name, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute(table)
    except sqlite3.Error:
        db.close()
        raise
    return db
