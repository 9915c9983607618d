"""ColdCoder: codes payloads that were not read for long in fewer bytes, while nothing else is done.

A coded payload takes 0.7 of the bytes and some time to decode. That pays on a disk that is slow,
and in a store that is nearly full: what it would have to evict would be computed again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvchat.cache.disk.model_dirs import FILE_OVERHEAD_BYTES
from kvchat.cache.disk.pack_rows import PackRow, require_whole
from kvchat.cache.disk.quota import DiskQuota, leaves_free
from kvchat.cache.disk.table import PackTable
from kvchat.cache.page_memory import ReadBuffers
from kvchat.cache.tier import DamagedRecord

# A pack that was not used for so long is cold: it is hardly in the system's page cache.
COLD_S = 3600.0
# Below, the code is not KV's of 16 bits, and saves too little.
LEAST_RATIO = 1.2
# Reading a coded payload may take so many times as long as reading it as it was.
_MOST_SLOWER = 1 / 0.7
# A busy disk must not look slow.
_NUM_READS = 3
# From this share of its limit on a store is nearly full.
_NEARLY_FULL = 0.75


@dataclass(frozen=True, slots=True)
class Trial:
    """What coding a payload gains: its bytes before and after, seconds to read and decode it."""

    num_bytes: int
    coded_bytes: int
    read_s: float
    decode_s: float

    @property
    def ratio(self) -> float:
        return self.num_bytes / self.coded_bytes

    @property
    def reads_as_fast(self) -> bool:
        """Whether reading it coded takes hardly longer, from a disk as fast as at this reading."""
        return self.read_s / self.ratio + self.decode_s <= _MOST_SLOWER * self.read_s


class ColdCoder:
    """Codes the packs of one identity in a store whose lock its caller holds.

    `clock` returns seconds since the epoch, `timer` seconds.
    """

    def __init__(
        self,
        quota: DiskQuota,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._quota = quota
        self._clock = clock
        self._timer = timer
        self._buffers = ReadBuffers(max_kept=1)

    def code_next(self, table: PackTable) -> bool:
        """Code the cold payload used least recently, where that pays; return whether it did.

        Raises DamagedRecord or OSError where it cannot be read or written.
        """
        key = table.used_least(self._clock() - COLD_S)
        row = table.row(key) if key is not None else None
        if row is None or row.file is None or row.layout.block_bytes % 2:
            return False
        coded, trial = self._try(table, row, row.file)
        is_nearly_full = self._quota.used_bytes(table) > _NEARLY_FULL * self._quota.limit_bytes
        pays = trial.ratio >= LEAST_RATIO and (is_nearly_full or trial.reads_as_fast)
        if not pays or not self._has_room(table, len(coded)):
            return False
        table.replace_payload(row, memoryview(coded))
        return True

    def _try(self, table: PackTable, row: PackRow, file: str) -> tuple[bytes, Trial]:
        """Return the code of a payload, which decodes to that payload, and what it gains."""
        # numpy takes 0.1 s, which opening a store must not.
        from kvchat.cache.disk.pack_code import decode, encode

        image, read_s = self._read(table, row, file)
        require_whole(row, image)
        coded = encode(image)
        again = memoryview(bytearray(len(image)))
        start_s = self._timer()
        decode(memoryview(coded), again)
        decode_s = self._timer() - start_s
        if again != image:
            raise DamagedRecord("changed by its code")
        return coded, Trial(len(image), len(coded), read_s, decode_s)

    def _read(self, table: PackTable, row: PackRow, file: str) -> tuple[memoryview, float]:
        """Return a payload, and the least seconds that reading it from the disk took."""
        seconds = []
        for _ in range(_NUM_READS):
            table.files.drop_pages(file)
            start_s = self._timer()
            image = table.image(row, self._buffers)
            seconds.append(self._timer() - start_s)
        return image, min(seconds)

    def _has_room(self, table: PackTable, num_bytes: int) -> bool:
        """Whether both files fit for a moment: the old one goes after the new one is entered."""
        needed = num_bytes + FILE_OVERHEAD_BYTES
        floor = self._quota.min_free_bytes
        return self._quota.has_room(table, needed) and leaves_free(self._quota.own, needed, floor)
