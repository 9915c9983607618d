"""AnswerMemory and ResponseMemory: ids of answers that were generated, and of responses that a
client may continue, across restarts.

Clients of the HTTP API send a conversation back as text. Encoding that text again may give other
ids than those that were generated, and from the first other id on the KV would not match. So the
ids of every answer are kept under a digest of the ids before it and of its text.
"""

import hashlib
import json
import logging
import sqlite3
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvchat.chat.text_codec import Segment, TextCodec
from kvchat.core.errors import KvchatError, StoreError
from kvchat.core.paths import private_database
from kvchat.core.types import FinishReason

_log = logging.getLogger(__name__)

# SQLite from the standard library: the rows are small, several processes may write, and a row is
# either there or not. A file that cannot be used is a loss of reuse, never of an answer.

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
            return KnownAnswer(tuple(array("I", found[1])), FinishReason(found[0]))
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


# A record is JSON: what the client gave and what it got. It is kept as token ids, as the answers in
# the same file are, so the file shows no words to a search; who has the tokenizer can decode them.
# Beside a record stand the ids of the request's whole context: by them its KV is found when the
# response is deleted, and KV that another stored response has too is known. They go with the
# record. The records of a stabiliser are kept in the same way, in a table of their own.

_RESPONSES = "responses"
_COLUMNS = "(key BLOB PRIMARY KEY, ids BLOB, used_s REAL) WITHOUT ROWID"
_LATER_COLUMNS = ("context", "answer")  # earlier versions made the table without them
_SIZED = ("ids", "context")
_PIECE_CHARACTERS = 1 << 16
# Making ids of a million characters takes most of a second, in which no other request is encoded.
_DEFAULT_MAX_CHARACTERS = 1 << 20


@dataclass(slots=True)
class Fed:
    """What a request was: all ids of its context, and the key of its answer in the AnswerMemory."""

    token_ids: list[int] = field(default_factory=list)
    answer_key: bytes = b""


class ResponseMemory:
    """Records by id, the least recently used dropped first. One thread uses it.

    `path` is the file, None keeps them in memory. `max_bytes` limits the bytes of all records and
    their contexts, `max_characters` the JSON of one. `table` is a name of this program's own.
    """

    def __init__(
        self,
        path: Path | None,
        tokenizer: TextCodec,
        max_bytes: int = _DEFAULT_MAX_BYTES,
        max_characters: int = _DEFAULT_MAX_CHARACTERS,
        table: str = _RESPONSES,
    ) -> None:
        self._table = table
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._max_characters = max_characters
        self._db = _open(path, table)

    def put(self, name: str, record: Mapping[str, Any], fed: Fed | None = None) -> None:
        """Keep a record of JSON's types, and what its request was; what is too long or cannot be
        written is dropped.
        """
        text = json.dumps(record, separators=(",", ":"))
        if len(text) > self._max_characters:
            _log.warning("a record of %d characters is too long to be kept", len(text))
            return
        try:
            ids = self._ids(text)
            if ids is None:
                return
            context = array("i", fed.token_ids).tobytes() if fed is not None else None
            answer = fed.answer_key if fed is not None else None
            row = (self._key(name), ids, time.time(), context, answer)
            self._db.execute(
                f"INSERT OR REPLACE INTO {self._table} (key, ids, used_s, context, answer) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )
            drop_oldest(self._db, self._table, _SIZED, self._max_bytes)
        except (sqlite3.Error, KvchatError) as error:
            _log.warning("a record cannot be kept: %s", error)

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a record, or None where it is not known or cannot be read."""
        key = self._key(name)
        try:
            row = self._db.execute(f"SELECT ids FROM {self._table} WHERE key = ?", (key,))
            found = row.fetchone()
            if found is None:
                return None
            note_use(self._db, self._table, key)
            record = json.loads(self._text(found[0]))
            return record if isinstance(record, dict) else None
        except (sqlite3.Error, KvchatError, ValueError, TypeError, RecursionError) as error:
            _log.warning("a record cannot be read: %s", type(error).__name__)
            return None

    def fed(self, name: str) -> Fed | None:
        """Return what the request of a record was; None where it is not known."""
        query = f"SELECT context, answer FROM {self._table} WHERE key = ?"
        try:
            row = self._db.execute(query, (self._key(name),)).fetchone()
            known = row is not None and row[0] is not None
            return Fed(list(array("i", row[0])), bytes(row[1])) if known else None
        except (sqlite3.Error, ValueError, TypeError) as error:
            _log.warning("a context cannot be read: %s", error)
            return None

    def other_contexts(self, name: str) -> "list[array[int]]":
        """Return the contexts of all other records; none where they cannot be read."""
        return _contexts(self._db, self._table, self._key(name))

    def remove(self, name: str) -> bool:
        """Remove a record for good; return whether it was there. Raises StoreError."""
        return erase(self._db, self._table, self._key(name))

    def close(self) -> None:
        self._db.close()

    def _key(self, name: str) -> bytes:
        """Return what a record is found by: the ids mean something with this tokenizer alone."""
        whole = f"{self._tokenizer.digest}\0{name}"
        return hashlib.blake2b(whole.encode(errors="replace"), digest_size=16).digest()

    def _ids(self, text: str) -> bytes | None:
        """Return the token ids of a text as bytes, None if they would not give it back.

        Before the ids of each piece stands their number: some tokenizers put a space before a text.
        """
        ids = array("I")
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            encoded = self._tokenizer.encode([Segment(piece, is_inert=True)])
            ids.extend((len(encoded), *encoded))
            if len(ids) * ids.itemsize > self._max_bytes:
                return None
        kept = ids.tobytes()
        if self._text(kept) != text:
            _log.warning("this tokenizer does not give texts back: no records are kept")
            return None
        return kept

    def _text(self, kept: bytes) -> str:
        ids, pieces, place = array("I", kept), [], 0
        while place < len(ids):
            end = place + 1 + ids[place]
            pieces.append(self._tokenizer.decode(ids[place + 1 : end]))
            place = end
        return "".join(pieces)


def stored_contexts(path: Path | None) -> "list[array[int]]":
    """Return the contexts of all responses stored in a file, which need not exist."""
    if path is None or not path.is_file():
        return []
    db = _open(path, _RESPONSES)
    try:
        return _contexts(db, _RESPONSES)
    finally:
        db.close()


def _open(path: Path | None, table: str) -> sqlite3.Connection:
    db = open_private_database(path, f"CREATE TABLE IF NOT EXISTS {table} {_COLUMNS}")
    with suppress(sqlite3.Error):
        known = {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")}
        for column in _LATER_COLUMNS:
            if column not in known:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {column} BLOB")
        db.execute("DROP TABLE IF EXISTS contexts")  # where earlier versions kept contexts
    return db


def _contexts(db: sqlite3.Connection, table: str, but: bytes = b"") -> "list[array[int]]":
    query = f"SELECT context FROM {table} WHERE context IS NOT NULL AND key <> ?"
    try:
        return [array("i", ids) for (ids,) in db.execute(query, (but,))]
    except (sqlite3.Error, ValueError, TypeError) as error:
        _log.warning("contexts cannot be read: %s", error)
        return []
