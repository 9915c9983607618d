"""PackReader: finds one identity's packs by their keys, reads them, and trusts none unverified.

What is damaged is counted, forgotten and told as corrupt. Knows heads, payloads and checksums;
knows no bounds, and writes nothing.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvchat.cache.codec import (
    PREFIX_BYTES,
    DamagedRecord,
    GoneRecord,
    HeldRecord,
    Layout,
    OtherGeometry,
    PackHead,
    check_payload,
    decode_head,
)
from kvchat.cache.fates import FateLog
from kvchat.cache.pack_table import PackTable
from kvchat.cache.read_buffers import ReadBuffers
from kvchat.cache.retention import KnownPack, known_pack
from kvchat.cache.table_keeper import TableKeeper, is_held
from kvchat.cache.tally import Tally
from kvchat.cache.tier import Found
from kvchat.core.types import Lack

_log = logging.getLogger(__name__)

# Images that were read and are not yet on the device: rarely more than these at once.
_MAX_BUFFERS, _WARM_BUFFERS = 8, 4


class PackReader:
    """Reads the packs of the table that `keeper` keeps open. One thread uses it."""

    def __init__(self, layout: Layout, keeper: TableKeeper, fates: FateLog, tally: Tally) -> None:
        self._layout = layout
        self._keeper = keeper
        self._fates = fates
        self._tally = tally
        self._buffers = ReadBuffers(_MAX_BUFFERS)
        self._files: dict[bytes, str | None] = {}  # of the packs found last

    def warm_up(self) -> None:
        """Have memory ready for the packs that will be read first."""
        if largest := self._keeper.table.largest():
            self._buffers.warm(largest, _WARM_BUFFERS)

    def walk(self, keys: Sequence[bytes], packed: bytes) -> Iterator[Found]:
        """Yield the packs that hold a prompt's leading blocks, in order and without a hole."""
        table = self._keeper.follow()
        self._files.clear()
        block = 0
        while block < len(keys):
            head = self.head(table, keys[block])
            shared = head.num_shared(packed, block, self._layout) if head is not None else 0
            if head is None or not shared:
                return
            is_whole = shared == head.num_blocks(self._layout)
            canary = head.canary if is_whole else None
            yield Found(keys[block], block, shared, head.checksum, canary)
            block += shared

    def head(self, table: PackTable, key: bytes) -> PackHead | None:
        """Return a pack's head, None where there is none that is sound."""
        stored = table.head(key)
        if stored is None:
            return None
        data, self._files[key] = stored
        try:
            return decode_head(data, self._layout)
        except DamagedRecord as damage:
            self._quarantine(key, damage)
            return None

    def read(self, found: Found) -> memoryview:
        """Return the images of all blocks of a pack, verified; raises what `Tier.read` does."""
        try:
            image = self._read_twice(found)
        except DamagedRecord:
            raise
        except Exception as error:
            self._tally.note_error(error)
            raise (HeldRecord if is_held(error) else DamagedRecord)("unreadable") from error
        if image is None:
            raise GoneRecord("gone")
        return image

    def _read_twice(self, found: Found) -> memoryview | None:
        """Read again what looks damaged while nobody writes: it may have been exchanged meanwhile.

        What is damaged still is forgotten.
        """
        with suppress(DamagedRecord, OSError):
            return self.images(self._keeper.table, found.key, found.checksum)
        with self._keeper.changing() as table:
            head = self.head(table, found.key)
            if head is None or found.checksum not in (b"", head.checksum):
                return None
            try:
                return self.images(table, found.key, head.checksum)
            except OSError:
                damage = DamagedRecord("without its payload")
            except DamagedRecord as error:
                damage = error
            self._quarantine(found.key, damage)
            raise damage

    def images(self, table: PackTable, key: bytes, checksum: bytes) -> memoryview:
        """Return the images of a pack, of those that `checksum` stands for.

        Raises DamagedRecord or OSError, and forgets nothing.
        """
        file = self._files.pop(key, None)
        payload = table.payload(key, file, PREFIX_BYTES, self._buffers)
        if payload is None:
            raise DamagedRecord("without its payload")
        prefix, image = payload
        check_payload(prefix, image, key, checksum, self._layout)
        return image

    def known_packs(self, table: PackTable) -> dict[bytes, KnownPack]:
        """Return what is known of every pack; what is out of date, or no good, goes."""
        known = {}
        for row in table.rows():
            if not row.head:  # out of date, or its file is gone
                table.remove(row.key)
                continue
            try:
                head = decode_head(row.head, self._layout)
            except DamagedRecord as damage:
                self._quarantine(row.key, damage)
                continue
            known[row.key] = known_pack(head, self._layout, row.use)
        return known

    def _quarantine(self, key: bytes, damage: DamagedRecord) -> None:
        """Forget a damaged pack; its place is free for a good one.

        Who does not know the shape of the packs, as of a store that was empty a moment ago, leaves
        them alone.
        """
        if isinstance(damage, OtherGeometry):
            return
        _log.warning("damaged pack key=%s: %s", key.hex(), damage)
        self._tally.count(num_damaged=1)
        self._fates.note([key], Lack.CORRUPT)
        self._tally.say(f"a stored block was damaged ({damage}).")
        self._keeper.attempt(lambda: self._remove(key), None)

    def _remove(self, key: bytes) -> None:
        with self._keeper.changing() as table:
            table.remove(key)
