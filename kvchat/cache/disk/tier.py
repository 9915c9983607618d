"""DiskTier: packs of KV in files, found through a SQLite table, which is the only index.

PackReader finds, reads and verifies packs; a damaged pack is counted, removed and reported as
corrupt. DiskTier writes, pins and removes them; `quota.py` decides what is evicted. Several
processes may share a directory. Raw bytes only: no tensors, no device.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvchat.cache.disk.cold_coder import ColdCoder
from kvchat.cache.disk.db import LOCK_NAME, PackDb, StoreBusy, StoreLock, is_locked
from kvchat.cache.disk.eviction import KnownPack, Use, cuts, first_use, known_pack
from kvchat.cache.disk.miss_log import MissReasonLog
from kvchat.cache.disk.model_dirs import FILE_OVERHEAD_BYTES, MISS_LOG
from kvchat.cache.disk.pack_rows import PackRow, Pin, checksum_of, require_whole
from kvchat.cache.disk.quota import DiskQuota
from kvchat.cache.disk.table import MIN_FILE_BYTES, OtherSchema, PackTable, is_busy
from kvchat.cache.keys import root_key
from kvchat.cache.page_memory import ReadBuffers
from kvchat.cache.tier import (
    BlockRun,
    BusyRecord,
    DamagedRecord,
    GoneRecord,
    Layout,
    PackHead,
    Tier,
    trouble_of,
)
from kvchat.core.stats import TierStatus
from kvchat.core.types import MissReason

_log = logging.getLogger(__name__)


class TierStats:
    """The status of one tier. The tier's thread changes it, any thread reads it."""

    def __init__(self, limit_bytes: int) -> None:
        self.status = TierStatus(limit_bytes=limit_bytes, is_shared=True)

    def count(self, **amounts: int) -> None:
        """Add to totals, by their names in TierStatus."""
        totals = {name: getattr(self.status, name) + int(n) for name, n in amounts.items()}
        self.status = replace(self.status, **totals)

    def note_content(self, num_bytes: int, num_packs: int, num_evicted: int) -> None:
        """Set what the store holds now, and how many packs were evicted until now."""
        self.status = replace(
            self.status, num_bytes=num_bytes, num_packs=num_packs, num_evicted=num_evicted
        )

    def say(self, trouble: str) -> None:
        """Set the sentence that tells users of the last problem."""
        self.status = replace(self.status, trouble=trouble)

    def note_error(self, error: Exception) -> None:
        """Count and report an error; only count that other processes are busy, which passes."""
        _log.warning("disk tier: %r", error)
        self.count(num_held_up=is_locked(error))
        if isinstance(error, OtherSchema):
            self.say("what was kept was of another version of kvchat; the disk cache began anew.")
        elif not (is_busy(error) or isinstance(error, StoreBusy)):
            self.say(trouble_of(error))


# Buffers for images that were read and are not yet on the device.
_MAX_BUFFERS, _WARM_BUFFERS = 8, 4


class PackReader:
    """Reads the packs of the table that `db` keeps open. One thread uses it.

    Packs of another layout are passed over: an administrator opens a store with a guessed one.
    """

    def __init__(
        self, layout: Layout, db: PackDb, miss_log: MissReasonLog, stats: TierStats
    ) -> None:
        self._layout = layout
        self._db = db
        self._miss_log = miss_log
        self._stats = stats
        self._buffers = ReadBuffers(_MAX_BUFFERS)
        self._rows: dict[bytes, PackRow] = {}  # of the packs found last

    def warm_up(self) -> None:
        """Allocate memory for the packs that will be read first."""
        if largest := self._db.table.largest():
            self._buffers.warm(largest, _WARM_BUFFERS)

    def walk(self, keys: Sequence[bytes], encoded: bytes) -> Iterator[BlockRun]:
        """Yield the packs that hold a prompt's leading blocks, in order and without a hole."""
        table = self._db.follow()
        self._rows.clear()
        block = 0
        try:
            for row, shared in table.leading(keys, encoded, self._layout.block_size):
                if row.layout != self._layout:
                    return
                self._rows[row.key] = row
                is_whole = shared == row.head.num_blocks(self._layout)
                fingerprint = row.head.fingerprint if is_whole else None
                yield BlockRun(row.key, block, shared, row.head.checksum, fingerprint)
                block += shared
        except DamagedRecord as damage:
            self._quarantine(keys[block], damage)

    def row(self, table: PackTable, key: bytes) -> PackRow | None:
        """Return a pack, None if there is none or it is damaged."""
        try:
            row = table.row(key)
        except DamagedRecord as damage:
            self._quarantine(key, damage)
            return None
        return row if row is not None and row.layout == self._layout else None

    def read(self, run: BlockRun) -> memoryview:
        """Return the images of all blocks of a pack, verified; raises what `Tier.read` does."""
        try:
            image = self._read_twice(run)
        except DamagedRecord:
            raise
        except Exception as error:
            self._stats.note_error(error)
            raise (BusyRecord if is_locked(error) else DamagedRecord)("unreadable") from error
        if image is None:
            raise GoneRecord("gone")
        return image

    def _read_twice(self, run: BlockRun) -> memoryview | None:
        """Read a pack; if it is damaged, once more under the lock, for it may have been replaced.

        Forget it if it is still damaged. None if there is none.
        """
        with suppress(DamagedRecord, OSError):
            table = self._db.table
            row = self._rows.pop(run.key, None) or table.row(run.key)
            if row is not None and row.head.checksum == run.checksum:
                return self.image(table, row)
        with self._db.changing() as table:
            row = self.row(table, run.key)
            if row is None or run.checksum not in (b"", row.head.checksum):
                return None
            try:
                return self.image(table, row)
            except OSError:
                damage = DamagedRecord("without its payload")
            except DamagedRecord as error:
                damage = error
            self._quarantine(run.key, damage)
            raise damage

    def image(self, table: PackTable, row: PackRow) -> memoryview:
        """Return the images of a pack. Raises DamagedRecord or OSError, and removes nothing."""
        image = table.image(row, self._buffers)
        require_whole(row, image)
        return image

    def known_packs(self, table: PackTable) -> dict[bytes, KnownPack]:
        """Return what is known of every pack, by key; damaged packs are removed."""
        known = {}
        for key, row in table.rows():
            if row is None:
                self._quarantine(key, DamagedRecord("no head"))
            elif row.layout == self._layout:
                known[row.key] = known_pack(row.head, row.layout, row.use)
        return known

    def _quarantine(self, key: object, damage: DamagedRecord) -> None:
        """Remove a damaged pack, so that a good one can be written under its key."""
        _log.warning("damaged pack key=%r: %s", key, damage)
        self._stats.count(num_damaged=1)
        if isinstance(key, bytes):
            self._miss_log.note([key], MissReason.CORRUPT)
        self._stats.say(f"a stored block was damaged ({damage}).")
        self._db.attempt(lambda: self._remove(key), None)

    def _remove(self, key: object) -> None:
        with self._db.changing() as table:
            table.remove(key)


# A database that another process holds for longer than this is a miss.
_PATIENCE_S = 1.0


class DiskTier(Tier):
    """One identity's packs, in a directory that all identities share and together keep bounded.

    `limit_bytes` holds for the whole directory at every instant; `min_free_bytes` of the disk are
    left alone. `is_draft` where the KV is that of a model that only drafts for another. Raises
    StoreError where the directory cannot be used at all. One thread uses a tier.
    """

    has_admin = True

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        limit_bytes: int,
        min_free_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
        is_draft: bool = False,
    ) -> None:
        directory = directory.absolute()
        own = directory / layout.identity.hex()
        self._layout = layout
        self._clock = clock
        self._is_draft = is_draft
        self._root = root_key(layout.identity)
        self._stats = TierStats(limit_bytes)
        self._miss_log = MissReasonLog(own)
        self._miss_file = own / MISS_LOG
        self._quota = DiskQuota(
            directory,
            own,
            limit_bytes,
            min_free_bytes,
            self._miss_log,
            layout.block_bytes,
            clock,
        )
        self._coder = ColdCoder(self._quota, clock)
        self._lock = StoreLock(directory / LOCK_NAME, _PATIENCE_S)
        self._used: dict[bytes, bool] = {}  # keys used: whether only by one-shot requests
        self._had_no_room = False  # for the pack of the last write
        self._db = PackDb(directory, own, self._lock, _PATIENCE_S, self._stats.note_error)
        self._attempt = self._db.attempt
        self._reader = PackReader(layout, self._db, self._miss_log, self._stats)
        try:
            self.gc()
            self._attempt(self._reader.warm_up, None)
            self._refresh()
        except BaseException:  # Ctrl-C too
            self._db.close()
            raise

    @property
    def is_begun_anew(self) -> bool:
        """Whether an unusable table was replaced by an empty one."""
        return self._db.is_begun_anew

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""
        return self._root

    # Finding and reading

    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        """Return the packs that hold a prompt's leading blocks, in order and without a hole."""
        runs = self._runs(keys, encoded)
        self._note_runs(runs, is_one_shot)
        return runs

    def _runs(self, keys: Sequence[bytes], encoded: bytes) -> list[BlockRun]:
        return self._attempt(lambda: list(self._reader.walk(keys, encoded)), [])

    def _note_runs(self, runs: Iterable[BlockRun], is_one_shot: bool) -> int:
        """Note the use of packs that were found; return how many blocks they share."""
        num_blocks = 0
        for run in runs:  # used last, so it stands last
            self._used[run.key] = self._used.pop(run.key, True) and is_one_shot
            num_blocks += run.num_blocks
        return num_blocks

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        """Return how many leading blocks `find` would return; does not count as a use."""
        return sum(run.num_blocks for run in self._runs(keys, encoded))

    def read(self, run: BlockRun) -> memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord, and forgets it;
        BusyRecord where others are busy with it, and keeps it.

        The memory is the caller's while it holds a view of it.
        """
        image = self._reader.read(run)
        self._stats.count(bytes_read=len(image))
        return image[: run.num_blocks * self._layout.block_bytes]

    # Writing

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Write a pack; false, with the reason in the status, if that is not possible."""
        num_blocks = head.num_blocks(self._layout)
        assert len(image) == num_blocks * self._layout.block_bytes
        self._had_no_room = False
        own = replace(head, is_draft=self._is_draft)
        is_written = self._attempt(lambda: self._write(own, image, is_one_shot), False)
        self._stats.count(num_failed_writes=not is_written, bytes_written=is_written * len(image))
        self._refresh()
        return is_written

    def _write(self, head: PackHead, image: memoryview, is_one_shot: bool) -> bool:
        with self._db.changing() as table:
            if table.files.has_leftovers:
                self._collect(table)
            # Blocks that other processes have written since they were looked for.
            runs = self._reader.walk(head.keys(self._layout), head.ids)
            num_there = self._note_runs(runs, is_one_shot)
            if num_there == head.num_blocks(self._layout):
                return True
            head, image = self._without(head, image, num_there)
            followed = self._last_of(head.parent)
            self._note_uses(table)  # or the packs before this one could be evicted now
            num_bytes = _pack_bytes(head, image)
            packs = partial(self._reader.known_packs, table)
            if trouble := self._quota.make_room(table, packs, num_bytes, head.parent):
                self._stats.say(trouble)
                self._had_no_room = True
                self._miss_log.note(head.keys(self._layout)[:1], MissReason.OVER_BUDGET)
                return False
            self._keep(table, head, image, first_use(self._clock(), is_one_shot))
            table.note_followed(followed)
        return True

    def _without(
        self, head: PackHead, image: memoryview, num_blocks: int
    ) -> tuple[PackHead, memoryview]:
        """Return a pack without its first `num_blocks` blocks."""
        if not num_blocks:
            return head, image
        parent = head.keys(self._layout)[num_blocks - 1]
        ids = head.ids[num_blocks * self._layout.ids_bytes :]
        rest = image[num_blocks * self._layout.block_bytes :]
        return replace(head, parent=parent, ids=ids), rest

    def note_declined(self, keys: Sequence[bytes], encoded: bytes) -> None:
        """Note that a context is not written because there was no room for the last pack.

        If the last write failed for another reason, nothing is noted.
        """
        if not self._had_no_room:
            return
        missing = keys[self.peek(keys, encoded) :][:1]
        self._miss_log.note(
            [k for k in missing if self._miss_log.of(k) is not MissReason.OVER_BUDGET],
            MissReason.OVER_BUDGET,
        )

    def _keep(self, table: PackTable, head: PackHead, image: memoryview, use: Use) -> None:
        key = head.keys(self._layout)[0]
        whole = replace(head, checksum=checksum_of(key, head, image))
        try:
            table.keep(PackRow(key, self._layout, whole, use, None), image)
        except Exception:
            table.files.has_leftovers = True
            raise

    def _last_of(self, parent: bytes) -> bytes | None:
        """Return the key of the pack found last, which a pack after `parent` continues."""
        return next(reversed(self._used), None) if parent != self._root else None

    def _note_uses(self, table: PackTable) -> None:
        used, self._used = self._used, {}
        if used:
            table.note_uses(used, self._clock())

    # Pinning and forgetting

    def pin(
        self, keys: Sequence[bytes], encoded: bytes, label: str, ttl_s: float = math.inf
    ) -> int:
        """Evict none of a context's stored blocks for `ttl_s` seconds; return their number.

        `keys` are those of the full blocks of `encoded` token ids. Replaces a pin of this label.
        """
        return self._attempt(lambda: self._pin(keys, encoded, label, ttl_s), 0)

    def _pin(self, keys: Sequence[bytes], encoded: bytes, label: str, ttl_s: float) -> int:
        with self._db.changing() as table:
            num_blocks = sum(run.num_blocks for run in self._reader.walk(keys, encoded))
            if num_blocks:
                now_s = self._clock()
                table.pin(Pin(label, tuple(keys[:num_blocks]), now_s, now_s + ttl_s))
            return num_blocks

    def unpin(self, label: str) -> None:
        """Remove the pin of a label; its blocks can then be evicted."""

        def unpin() -> None:
            with self._db.changing() as table:
                table.unpin(label)

        self._attempt(unpin, None)

    def forget(self, keys: Collection[bytes], before: Sequence[bytes] = ()) -> int:
        """Remove blocks, and all that continue them, for good; return how many were removed.

        A pack that begins with other blocks is cut before the first of `keys`.
        """
        self._miss_log.forget(keys)
        return self._attempt(lambda: self._forget(frozenset(keys)), 0)

    def _forget(self, keys: frozenset[bytes]) -> int:
        num_blocks = 0
        with self._db.changing() as table, table.leaving_no_trace():
            packs = self._reader.known_packs(table)
            for name, num_kept in cuts(packs, keys):
                num_blocks += len(packs[name].keys) - num_kept
                self._cut(table, name, num_kept)
        return num_blocks

    def _cut(self, table: PackTable, name: bytes, num_kept: int) -> None:
        row, image = self._reader.row(table, name), None
        if num_kept and row is not None:
            with suppress(DamagedRecord, OSError):
                image = self._reader.image(table, row)
        table.remove(name)
        if row is not None and image is not None:
            image = image[: num_kept * self._layout.block_bytes]
            ids = row.head.ids[: num_kept * self._layout.ids_bytes]
            cut = replace(row.head, ids=ids, fingerprint=None)
            # The old file may still be there: a disk that fails does not delete it.
            if self._quota.has_room(table, _pack_bytes(cut, image)):
                self._keep(table, cut, image, row.use)

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks and all that continue them, because their KV is wrong."""
        if num_blocks := self.forget(keys):
            self._stats.count(num_quarantined=num_blocks)
            self._miss_log.note(keys, MissReason.QUARANTINED)
            trouble = "what was kept of a conversation is not this model's; it was read again."
            self._stats.say(trouble)

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        """Return why the block of `key` is not there, after `num_found` of a context that are."""
        if num_found and not self._miss_file.exists():  # as usual: nothing that was there went
            return MissReason.NEVER_WRITTEN
        return self._miss_log.why(key, encoded, num_found, self._layout.block_size)

    # Housekeeping

    def status(self) -> TierStatus:
        """Return totals and what the store holds; from another thread, as of the last look."""
        if threading.get_ident() == self._db.thread:
            self._refresh()
        return self._stats.status

    def _refresh(self) -> None:
        table = self._db.table
        num_bytes = self._attempt(lambda: self._quota.stored_bytes(table), 0)
        num_packs = self._attempt(table.num_packs, 0)
        self._stats.note_content(num_bytes, num_packs, self._quota.num_evicted)

    def verify(self, goes_on: Callable[[], bool] = lambda: True) -> tuple[int, int]:
        """Read every pack; return how many are sound, and how many were damaged and removed.

        It does not count as a use, so the order of eviction stays. Ends once `goes_on` is false.
        """
        before = self._stats.status.num_damaged
        num_sound = 0
        table = self._db.table
        packs: list[tuple[bytes, PackRow | None]] = self._attempt(lambda: list(table.rows()), [])
        for key, row in packs:
            if not goes_on():
                break
            checksum = row.head.checksum if row is not None else b""
            with suppress(DamagedRecord):
                self._reader.read(BlockRun(key, 0, 0, checksum))
                num_sound += 1
        return num_sound, self._stats.status.num_damaged - before

    def gc(self) -> None:
        """Remove expired packs, files without a row, and model directories not used for long.

        It runs when a tier is opened, and before the first write after a process was killed.
        """

        def collect() -> None:
            with self._db.changing() as table:
                self._collect(table)

        self._attempt(collect, None)

    def tidy(self) -> bool:
        """Code one payload that was not read for long; return whether there may be another."""

        def code() -> bool:
            with self._db.changing() as table, suppress(DamagedRecord, OSError):
                return self._coder.code_next(table)
            return False  # the next read of the pack finds what is wrong with it

        return self._attempt(code, False)

    def _collect(self, table: PackTable) -> None:
        self._note_uses(table)
        table.sweep()
        trouble = self._quota.collect(table, lambda: self._reader.known_packs(table), self._clock())
        if trouble:
            self._stats.say(trouble)
        self._lock.has_leftovers = table.files.has_leftovers

    def close(self) -> None:
        """Close the store. Idempotent."""
        if self._used:
            self._attempt(lambda: self._note_uses(self._db.table), None)
        self._db.close()


def _pack_bytes(head: PackHead, image: memoryview) -> int:
    """Return how many bytes a pack takes at most, with its head."""
    num_copies = 1 if len(image) >= MIN_FILE_BYTES else 2  # it is in the log, and then in the table
    return num_copies * len(image) + 2 * len(head.ids) + FILE_OVERHEAD_BYTES
