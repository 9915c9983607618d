"""ResponseMemory: the responses that a client may continue by their id, across restarts.

A record is JSON: what the client gave and what it got. It is kept as token ids, as the answers in
the same file are, so the file shows no words to a search; who has the tokenizer can decode them.
Beside a record stand the ids of the request's whole context: by them its KV is found when the
response is deleted, and KV that another stored response has too is known. They go with the record.
The records of a stabiliser are kept in the same way, in a table of their own.
"""

import hashlib
import json
import logging
import sqlite3
import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvchat.chat.private_database import drop_oldest, erase, note_use, open_private_database
from kvchat.chat.tokenizer import Segment, TextCodec
from kvchat.core.errors import KvchatError

_log = logging.getLogger(__name__)

_RESPONSES = "responses"
_COLUMNS = "(key BLOB PRIMARY KEY, ids BLOB, used_s REAL) WITHOUT ROWID"
_LATER_COLUMNS = ("context", "answer")  # earlier versions made the table without them
_SIZED = ("ids", "context")
_DEFAULT_MAX_BYTES = 64 << 20
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
            return Fed(_context(row[0]).tolist(), bytes(row[1])) if known else None
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
        ids = array("I")
        ids.frombytes(kept)
        pieces, place = [], 0
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
        return [_context(ids) for (ids,) in db.execute(query, (but,))]
    except (sqlite3.Error, ValueError, TypeError) as error:
        _log.warning("contexts cannot be read: %s", error)
        return []


def _context(data: bytes) -> "array[int]":
    ids = array("i")
    ids.frombytes(data)
    return ids
