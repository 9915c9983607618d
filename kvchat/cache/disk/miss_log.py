"""MissReasonLog: why a pack that was there, or should have been, is not.

A small file beside a table, appended to: the key of a pack's first block and one byte. The last
record of a key counts, and the table before any. A file that cannot be used says nothing.
"""

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from kvchat.cache.disk.inventory import num_stored_blocks
from kvchat.cache.disk.model_dirs import MISS_LOG, file_bytes, find_model_dirs, open_in
from kvchat.cache.keys import KEY_BYTES
from kvchat.core.errors import StoreError
from kvchat.core.types import MissReason

_RECORD_BYTES = KEY_BYTES + 1
_MAX_BYTES = 4096 * _RECORD_BYTES
_CODES = {
    MissReason.EVICTED: b"e",
    MissReason.CORRUPT: b"c",
    MissReason.OVER_BUDGET: b"o",
    MissReason.QUARANTINED: b"q",
}
_REASONS = {code: reason for reason, code in _CODES.items()}

_log = logging.getLogger(__name__)


class MissReasonLog:
    """Why packs of one identity are missing, in its `directory` of a store. One thread uses it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def note(self, keys: Iterable[bytes], reason: MissReason) -> None:
        """Record why the packs that begin with these blocks are missing."""
        if not (records := b"".join(key + _CODES[reason] for key in keys)):
            return
        try:
            if file_bytes(self._directory / MISS_LOG) + len(records) > _MAX_BYTES:
                self._write(
                    (self._read() + records)[-_MAX_BYTES // 2 // _RECORD_BYTES * _RECORD_BYTES :]
                )
            else:
                self._write(records, os.O_APPEND)
        except (StoreError, OSError) as error:
            _log.info("a miss reason could not be kept: %s", error)

    def why(self, key: bytes, encoded: bytes, num_found: int, block_size: int) -> MissReason:
        """Return why the block of `key` is not there, after `num_found` of a context that are.

        Where nothing is there and nothing known, another model that answered may have KV of it.
        """
        if (reason := self.of(key)) is not None:
            return reason
        if not num_found:
            others = [g for g in find_model_dirs(self._directory.parent) if g != self._directory]
            if any(num_stored_blocks(other, encoded, block_size) for other in others):
                return MissReason.OTHER_MODEL
        return MissReason.NEVER_WRITTEN

    def of(self, key: bytes) -> MissReason | None:
        """Return why a pack is not there, None where nothing is known."""
        data = self._read()
        found = None
        for start in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
            if data[start : start + KEY_BYTES] == key:
                found = _REASONS.get(data[start + KEY_BYTES : start + _RECORD_BYTES])
        return found

    def forget(self, keys: Collection[bytes]) -> None:
        """Remove all records of these keys."""
        data = self._read()
        gone = set(keys)
        records = [data[n : n + _RECORD_BYTES] for n in range(0, len(data), _RECORD_BYTES)]
        kept = b"".join(record for record in records if record[:KEY_BYTES] not in gone)
        if len(kept) == len(data):
            return
        try:
            self._write(kept)
        except (StoreError, OSError) as error:
            _log.warning("a miss reason could not be forgotten: %s", error)

    def _read(self) -> bytes:
        try:
            descriptor = open_in(self._directory, MISS_LOG, os.O_RDONLY)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(_MAX_BYTES)
        except (StoreError, OSError):
            return b""
        return data[: len(data) // _RECORD_BYTES * _RECORD_BYTES]

    def _write(self, records: bytes, how: int = os.O_TRUNC) -> None:
        descriptor = open_in(self._directory, MISS_LOG, os.O_WRONLY | os.O_CREAT | how)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(records)
