"""DiskTier: packs of KV in files, found through diskcache's SQLite table, which is the only index.

Keeps, pins and forgets packs; finding and verifying them is `pack_reader.py`'s, what has to go for
others `disk_room.py`'s. Raw bytes only. Several processes may share a directory. Knows no device.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvchat.cache.block_key import root_key
from kvchat.cache.codec import (
    DamagedRecord,
    Layout,
    PackHead,
    checksum_of,
    encode_head,
    payload_checksum,
    payload_prefix,
)
from kvchat.cache.disk_room import DiskRoom
from kvchat.cache.fates import FateLog
from kvchat.cache.forgetting import cuts
from kvchat.cache.generations import FILE_OVERHEAD_BYTES
from kvchat.cache.pack_reader import PackReader
from kvchat.cache.pack_table import PackRow, PackTable
from kvchat.cache.pin_record import Pin
from kvchat.cache.raw_disk import MIN_FILE_BYTES, Parts
from kvchat.cache.retention import Use, first_use
from kvchat.cache.store_lock import LOCK_NAME, StoreLock
from kvchat.cache.table_keeper import TableKeeper
from kvchat.cache.tally import Tally
from kvchat.cache.tier import Found
from kvchat.core.errors import StoreError
from kvchat.core.stats import TierStatus
from kvchat.core.types import Lack

# A busy database is a miss: whoever holds it longer than this is not worth waiting for.
_PATIENCE_S = 1.0


class DiskTier:
    """One identity's packs, in a directory that all identities share and together keep bounded.

    `limit_bytes` holds for the whole directory at every instant; `min_free_bytes` of the disk are
    left alone. `is_draft` where the KV is that of a model that only drafts for another. Raises
    StoreError where the directory cannot be used at all. One thread uses a tier.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        limit_bytes: int,
        min_free_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
        is_draft: bool = False,
    ) -> None:
        directory = _literal(directory.absolute())
        own = directory / layout.identity.hex()
        self._layout = layout
        self._clock = clock
        self._is_draft = is_draft
        self._root = root_key(layout.identity)
        self._tally = Tally(limit_bytes)
        self._fates = FateLog(own)
        self._room = DiskRoom(directory, own, limit_bytes, min_free_bytes, self._fates)
        self._lock = StoreLock(directory / LOCK_NAME, _PATIENCE_S)
        self._used: dict[bytes, bool] = {}  # whether only by those who ask once
        self._had_no_room = False  # for what was written last
        self._keeper = TableKeeper(directory, own, self._lock, _PATIENCE_S, self._tally.note_error)
        self._attempt = self._keeper.attempt
        self._reader = PackReader(layout, self._keeper, self._fates, self._tally)
        try:
            self.gc()
            self._attempt(self._reader.warm_up, None)
            self._look()
        except BaseException:  # Ctrl-C too
            self._keeper.table.abandon()
            raise

    @property
    def is_begun_anew(self) -> bool:
        """Whether a table that was there could not be used, and an empty one took its place."""
        return self._keeper.is_begun_anew

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""
        return self._root

    # Finding and reading

    def find(self, keys: Sequence[bytes], packed: bytes, is_one_shot: bool = False) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, in order and without a hole."""
        found: list[Found] = self._attempt(lambda: list(self._reader.walk(keys, packed)), [])
        for run in found:  # the last one found is to stand last
            self._used[run.key] = self._used.pop(run.key, True) and is_one_shot
        return found

    def read(self, found: Found) -> memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord, and forgets it;
        HeldRecord where others are busy with it, and keeps it.

        The memory is the caller's while it holds a view of it.
        """
        image = self._reader.read(found)
        self._tally.count(bytes_read=len(image))
        return image[: found.num_blocks * self._layout.block_bytes]

    # Writing

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Keep a pack; false, and why in the status, where the world did not let it."""
        num_blocks = head.num_blocks(self._layout)
        assert len(image) == num_blocks * self._layout.block_bytes
        complete = replace(head, checksum=payload_checksum(image), is_draft=self._is_draft)
        self._had_no_room = False
        is_written = self._attempt(lambda: self._write(complete, image, is_one_shot), False)
        self._tally.count(num_failed_writes=not is_written, bytes_written=is_written * len(image))
        self._look()
        return is_written

    def _write(self, head: PackHead, image: memoryview, is_one_shot: bool) -> bool:
        with self._keeper.changing() as table:
            if self._lock.has_leftovers or table.disk.has_leftovers:
                self._collect(table)
            if self._reader.head(table, head.keys(self._layout)[0]) is not None:
                return True
            followed = self._last_of(head.parent)
            self._note_uses(table)  # what was found may be on its way up: it is not to go for this
            num_bytes = len(image) + 2 * len(head.ids) + FILE_OVERHEAD_BYTES
            if len(image) < MIN_FILE_BYTES:  # it is in the log, and then in the table too
                num_bytes += len(image)
            packs = partial(self._reader.known_packs, table)
            if trouble := self._room.make(table, packs, num_bytes, head.parent):
                self._tally.say(trouble)
                self._had_no_room = True
                self._fates.note(head.keys(self._layout)[:1], Lack.OVER_BUDGET)
                return False
            self._keep(table, head, image, first_use(self._clock(), is_one_shot))
            table.note_followed(followed)
        return True

    def note_declined(self, keys: Sequence[bytes], packed: bytes) -> None:
        """Take in that a context is not offered, as there was no room for what was offered last.

        Where that was refused for another reason, nobody knows what would become of this.
        """
        if not self._had_no_room:
            return
        found: list[Found] = self._attempt(lambda: list(self._reader.walk(keys, packed)), [])
        missing = keys[sum(run.num_blocks for run in found) :][:1]
        self._fates.note(
            [k for k in missing if self._fates.of(k) is not Lack.OVER_BUDGET], Lack.OVER_BUDGET
        )

    def _keep(self, table: PackTable, head: PackHead, image: memoryview, use: Use) -> None:
        key = head.keys(self._layout)[0]
        prefix = payload_prefix(key, head, len(image), self._layout)
        data = encode_head(head, self._layout)
        try:
            table.keep(key, data, Parts(prefix, image), use)
        except Exception:
            self._lock.has_leftovers = True
            raise

    def _last_of(self, parent: bytes) -> bytes | None:
        """Return the pack that was found last: what is written next continues it."""
        return next(reversed(self._used), None) if parent != self._root else None

    def _note_uses(self, table: PackTable) -> None:
        used, self._used = self._used, {}
        if used:
            table.note_uses(used, self._clock())

    # What the user says of contexts

    def pin(self, keys: Sequence[bytes], packed: bytes, label: str) -> int:
        """Never forget what is kept of a context; return how many of its blocks that is.

        `keys` are those of the full blocks of `packed` token ids. A pin of the same label goes.
        """
        return self._attempt(lambda: self._pin(keys, packed, label), 0)

    def _pin(self, keys: Sequence[bytes], packed: bytes, label: str) -> int:
        with self._keeper.changing() as table:
            num_blocks = sum(found.num_blocks for found in self._reader.walk(keys, packed))
            if num_blocks:
                table.pin(Pin(label, tuple(keys[:num_blocks]), self._clock()))
            return num_blocks

    def unpin(self, label: str) -> None:
        """Remove the pin of a label; what it held is forgotten when its turn comes."""

        def unpin() -> None:
            with self._keeper.changing() as table:
                table.unpin(label)

        self._attempt(unpin, None)

    def forget(self, keys: Collection[bytes]) -> int:
        """Remove blocks, and all that continues them, for good; return how many blocks went.

        A pack that holds others too is cut before the first of them.
        """
        self._fates.forget(keys)
        return self._attempt(lambda: self._forget(frozenset(keys)), 0)

    def _forget(self, keys: frozenset[bytes]) -> int:
        num_blocks = 0
        with self._keeper.changing() as table, table.leaving_no_trace():
            packs = self._reader.known_packs(table)
            for name, num_kept in cuts(packs, keys):
                num_blocks += len(packs[name].keys) - num_kept
                self._cut(table, name, num_kept)
        return num_blocks

    def _cut(self, table: PackTable, name: bytes, num_kept: int) -> None:
        head, image, use = self._reader.head(table, name), None, table.use(name)
        if num_kept and head is not None:
            with suppress(DamagedRecord, OSError):
                image = self._reader.images(table, name, head.checksum)
        table.remove(name)
        if head is not None and image is not None and use is not None:
            image = image[: num_kept * self._layout.block_bytes]
            ids = head.ids[: num_kept * self._layout.ids_bytes]
            cut = replace(head, ids=ids, checksum=payload_checksum(image), canary=None)
            self._keep(table, cut, image, use)

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never give out again the packs that hold one of these blocks, nor what continues them."""
        if num_blocks := self.forget(keys):
            self._tally.count(num_quarantined=num_blocks)
            self._fates.note(keys, Lack.QUARANTINED)
            trouble = "what was kept of a conversation is not this model's; it was read again."
            self._tally.say(trouble)

    def why(self, key: bytes, packed: bytes, num_found: int) -> Lack:
        """Return why the block of `key` is not there, after `num_found` of a context that are."""
        return self._fates.why(key, packed, num_found, self._layout.block_size)

    # Housekeeping

    def status(self) -> TierStatus:
        """Return totals, and what the store holds: now, or when its own thread last looked."""
        if threading.get_ident() == self._keeper.thread:
            self._look()
        return self._tally.status

    def _look(self) -> None:
        table = self._keeper.table
        num_bytes = self._attempt(lambda: self._room.held_bytes(table), 0)
        num_packs = self._attempt(table.num_packs, 0)
        self._tally.note_held(num_bytes, num_packs, self._room.num_evicted)

    def verify(self, goes_on: Callable[[], bool] = lambda: True) -> tuple[int, int]:
        """Read every pack; return how many are sound, and how many were not and are gone.

        That is no use of them: what is forgotten first stays the same. `goes_on` false ends it.
        """
        before = self._tally.status.num_damaged
        num_sound = 0
        table = self._keeper.table
        rows: list[PackRow] = self._attempt(lambda: list(table.rows()), [])
        for row in rows:
            if not goes_on():
                break
            with suppress(DamagedRecord):
                self._reader.read(Found(row.key, 0, 0, checksum_of(row.head, self._layout)))
                num_sound += 1
        return num_sound, self._tally.status.num_damaged - before

    def gc(self) -> None:
        """Remove what is out of date, what nothing leads to, and dead generations.

        Every opening does, and every first write after a process was cut off.
        """

        def collect() -> None:
            with self._keeper.changing() as table:
                self._collect(table)

        self._lock.has_leftovers = True  # where this fails, the next write does it first
        self._attempt(collect, None)

    def _collect(self, table: PackTable) -> None:
        self._note_uses(table)
        table.sweep()
        trouble = self._room.collect(table, lambda: self._reader.known_packs(table), self._clock())
        if trouble:
            self._tally.say(trouble)
        self._lock.has_leftovers = False

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        if self._used:
            self._attempt(lambda: self._note_uses(self._keeper.table), None)
        self._keeper.table.close_all()


def _literal(directory: Path) -> Path:
    """Return a directory; raises StoreError for one that diskcache would take for another."""
    if os.path.expandvars(directory) != str(directory):
        raise StoreError(
            f"{directory} has the name of a variable in it.", "Choose another with --cache-dir."
        )
    return directory
