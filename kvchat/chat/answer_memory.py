"""AnswerMemory: the token ids of generated answers, found again by their context and their text.

Clients of the HTTP API send a conversation back as text. Encoding that text again may give other
ids than those that were generated, and from the first other id on the KV would not match. So the
ids of every answer are kept under a digest of the ids before it and of its text.
"""

import hashlib
import logging
import sqlite3
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvchat.chat.private_database import drop_oldest, erase, note_use, open_private_database
from kvchat.core.types import FinishReason

_log = logging.getLogger(__name__)

_NAME = "answers"
_TABLE = (
    f"CREATE TABLE IF NOT EXISTS {_NAME} "
    "(key BLOB PRIMARY KEY, finish TEXT, ids BLOB, used_s REAL) WITHOUT ROWID"
)
_DEFAULT_MAX_BYTES = 64 << 20
_PRUNE_EVERY = 256


class ContextDigest:
    """A running digest of a context's ids; `key` names what follows the context."""

    def __init__(self, tokenizer_digest: str) -> None:
        self._hash = hashlib.blake2b(tokenizer_digest.encode(), digest_size=16)

    def copy(self) -> "ContextDigest":
        """Return a digest of the same context, which is extended by itself."""
        copied = object.__new__(ContextDigest)
        copied._hash = self._hash.copy()
        return copied

    def extend(self, token_ids: Sequence[int]) -> None:
        self._hash.update(array("I", token_ids).tobytes())

    def key(self, text: str) -> bytes:
        """Return the 16 bytes that stand for an answer after this context.

        White space around the text does not count: some clients remove it.
        """
        hash_ = self._hash.copy()
        hash_.update(b"\0answer\0" + text.strip().encode(errors="surrogatepass"))
        return hash_.digest()


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The ids that an answer added to its context, its closing token included."""

    token_ids: tuple[int, ...]
    finish: FinishReason


class AnswerMemory:
    """Answers by key, the least recently used dropped first. One thread uses it.

    `path` is the file, None keeps the answers in memory. `max_bytes` limits the bytes of ids.
    """

    def __init__(self, path: Path | None, max_bytes: int = _DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_puts = 0
        self._num_unpruned = 0  # bytes of ids since the oldest were last dropped
        self._db = open_private_database(path, _TABLE)

    def find(self, key: bytes) -> KnownAnswer | None:
        """Return an answer, or None where it is not known or cannot be read."""
        try:
            row = self._db.execute("SELECT finish, ids FROM answers WHERE key = ?", (key,))
            found = row.fetchone()
            if found is None:
                return None
            note_use(self._db, _NAME, key)
            ids = array("I")
            ids.frombytes(found[1])
            return KnownAnswer(tuple(ids), FinishReason(found[0]))
        except (sqlite3.Error, ValueError, TypeError) as error:
            _log.warning("a known answer cannot be read: %s", error)
            return None

    def put(self, key: bytes, answer: KnownAnswer) -> None:
        """Keep an answer; what cannot be written is dropped."""
        ids = array("I", answer.token_ids).tobytes()
        row = (key, answer.finish.value, ids, time.time())
        try:
            self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)
            self._num_unpruned += len(ids)
            if self._num_puts % _PRUNE_EVERY == 0 or self._num_unpruned > self._max_bytes // 8:
                drop_oldest(self._db, _NAME, ("ids",), self._max_bytes)
                self._num_unpruned = 0
            self._num_puts += 1
        except sqlite3.Error as error:
            _log.warning("an answer's ids cannot be kept: %s", error)

    def remove(self, key: bytes) -> None:
        """Remove an answer for good. Raises StoreError."""
        erase(self._db, _NAME, key)

    def first_time(self, key: bytes, now_s: float) -> float:
        """Return when this key was first asked for, in whole seconds since the epoch."""
        known = self.find(key)
        if known is not None and known.token_ids:
            return float(known.token_ids[0])
        self.put(key, KnownAnswer((int(now_s),), FinishReason.STOP))
        return float(int(now_s))

    def close(self) -> None:
        self._db.close()
