"""FateLog: why a pack that was there, or should have been, is not. Told to whoever asks for it.

A small file beside a table, appended to: the key of a pack's first block and one byte. The last
word about a key counts, and the table before any. A file that cannot be used says nothing.
"""

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from kvchat.cache.disk.inventory import holds_answers
from kvchat.cache.disk.model_dirs import FATES, file_bytes, generations, open_in
from kvchat.cache.keys import KEY_BYTES
from kvchat.core.errors import StoreError
from kvchat.core.types import Lack

_RECORD_BYTES = KEY_BYTES + 1
_MAX_BYTES = 4096 * _RECORD_BYTES
_CODES = {
    Lack.EVICTED: b"e",
    Lack.CORRUPT: b"c",
    Lack.OVER_BUDGET: b"o",
    Lack.QUARANTINED: b"q",
}
_LACKS = {code: lack for lack, code in _CODES.items()}

_log = logging.getLogger(__name__)


class FateLog:
    """The fates of one identity's packs, in its `directory` of a store. One thread uses it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def note(self, keys: Iterable[bytes], lack: Lack) -> None:
        """Say why packs that begin with these blocks are not there."""
        if not (records := b"".join(key + _CODES[lack] for key in keys)):
            return
        try:
            if file_bytes(self._directory / FATES) + len(records) > _MAX_BYTES:
                self._write(
                    (self._read() + records)[-_MAX_BYTES // 2 // _RECORD_BYTES * _RECORD_BYTES :]
                )
            else:
                self._write(records, os.O_APPEND)
        except (StoreError, OSError) as error:
            _log.info("a fate could not be kept: %s", error)

    def why(self, key: bytes, packed: bytes, num_found: int, block_size: int) -> Lack:
        """Return why the block of `key` is not there, after `num_found` of a context that are.

        Where nothing is there and nothing known, another model that answered may have KV of it.
        """
        if (fate := self.of(key)) is not None:
            return fate
        if not num_found:
            others = [g for g in generations(self._directory.parent) if g != self._directory]
            if any(holds_answers(other, packed, block_size) for other in others):
                return Lack.OTHER_MODEL
        return Lack.NEVER_WRITTEN

    def of(self, key: bytes) -> Lack | None:
        """Return why a pack is not there, None where nothing is known."""
        fates = self._read()
        found = None
        for start in range(0, len(fates) - _RECORD_BYTES + 1, _RECORD_BYTES):
            if fates[start : start + KEY_BYTES] == key:
                found = _LACKS.get(fates[start + KEY_BYTES : start + _RECORD_BYTES])
        return found

    def forget(self, keys: Collection[bytes]) -> None:
        """Leave no trace of these."""
        fates = self._read()
        gone = set(keys)
        records = [fates[n : n + _RECORD_BYTES] for n in range(0, len(fates), _RECORD_BYTES)]
        kept = b"".join(record for record in records if record[:KEY_BYTES] not in gone)
        if len(kept) == len(fates):
            return
        try:
            self._write(kept)
        except (StoreError, OSError) as error:
            _log.warning("a fate could not be forgotten: %s", error)

    def _read(self) -> bytes:
        try:
            descriptor = open_in(self._directory, FATES, os.O_RDONLY)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(_MAX_BYTES)
        except (StoreError, OSError):
            return b""
        return data[: len(data) // _RECORD_BYTES * _RECORD_BYTES]

    def _write(self, records: bytes, how: int = os.O_TRUNC) -> None:
        descriptor = open_in(self._directory, FATES, os.O_WRONLY | os.O_CREAT | how)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(records)
