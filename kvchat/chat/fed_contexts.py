"""FedContexts: the token ids behind the responses that a server stores, answers included.

By them the KV of a response is found when it is deleted, and KV that another stored response has
too is known. They are in the file of the responses, under the same ids.
"""

import logging
import sqlite3
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvchat.chat.private_database import drop_oldest, erase, open_private_database

_log = logging.getLogger(__name__)

_NAME = "contexts"
_TABLE = (
    f"CREATE TABLE IF NOT EXISTS {_NAME} "
    "(key TEXT PRIMARY KEY, ids BLOB, answer BLOB, used_s REAL) WITHOUT ROWID"
)
_DEFAULT_MAX_BYTES = 64 << 20


@dataclass(slots=True)
class Fed:
    """What a request was: all ids of its context, and the key of its answer in the AnswerMemory."""

    token_ids: list[int] = field(default_factory=list)
    answer_key: bytes = b""


class FedContexts:
    """Contexts by the ids of responses, the oldest dropped first. One thread uses it.

    `path` is the file, None keeps them in memory. `max_bytes` limits the bytes of ids.
    """

    def __init__(self, path: Path | None, max_bytes: int = _DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._db = open_private_database(path, _TABLE)

    def put(self, response_id: str, fed: Fed) -> None:
        """Keep a context; what cannot be written is dropped."""
        ids = array("I", fed.token_ids).tobytes()
        row = (response_id, ids, fed.answer_key, time.time())
        try:
            self._db.execute(f"INSERT OR REPLACE INTO {_NAME} VALUES (?, ?, ?, ?)", row)
            drop_oldest(self._db, _NAME, "ids", self._max_bytes)
        except sqlite3.Error as error:
            _log.warning("a context cannot be kept: %s", error)

    def find(self, response_id: str) -> Fed | None:
        """Return a context; None where it is not known or cannot be read."""
        try:
            row = self._db.execute(
                f"SELECT ids, answer FROM {_NAME} WHERE key = ?", (response_id,)
            ).fetchone()
            return Fed(_ids(row[0]), bytes(row[1])) if row is not None else None
        except (sqlite3.Error, ValueError, TypeError) as error:
            _log.warning("a context cannot be read: %s", error)
            return None

    def others(self, response_id: str = "") -> list[list[int]]:
        """Return the contexts of all other responses; none where they cannot be read."""
        try:
            rows = self._db.execute(f"SELECT ids FROM {_NAME} WHERE key <> ?", (response_id,))
            return [_ids(ids) for (ids,) in rows]
        except (sqlite3.Error, ValueError, TypeError) as error:
            _log.warning("contexts cannot be read: %s", error)
            return []

    def remove(self, response_id: str) -> None:
        """Remove a context for good. Raises StoreError."""
        erase(self._db, _NAME, response_id)

    def close(self) -> None:
        self._db.close()


def stored_contexts(path: Path | None) -> Sequence[list[int]]:
    """Return the contexts of all responses stored in a file, which need not exist."""
    if path is None or not path.is_file():
        return ()
    contexts = FedContexts(path)
    try:
        return contexts.others()
    finally:
        contexts.close()


def _ids(data: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()
