"""DiskTier: packs of KV in files, found through diskcache's SQLite table, which is the only index.

A pack has two entries under its first block's key: its payload in a file, then its head in the
table, so that a head vouches for a payload. Raw bytes only. What is broken is a miss that is
counted. Several processes may share a directory. Knows packs; knows no device.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvchat.cache.block_key import root_key
from kvchat.cache.codec import (
    DamagedRecord,
    Layout,
    PackHead,
    decode_head,
    decode_payload,
    encode_head,
    payload_checksum,
    payload_prefix,
)
from kvchat.cache.disk_budget import leaves_free
from kvchat.cache.generations import (
    DATABASE,
    FILE_OVERHEAD_BYTES,
    Sizes,
    drop,
    file_bytes,
    file_number,
    generations,
    last_used,
)
from kvchat.cache.raw_disk import RawCache, is_passing
from kvchat.cache.retention import TIME_TO_LIVE_S, KnownPack, eviction_order
from kvchat.cache.store_lock import LOCK_NAME, StoreLock
from kvchat.cache.tier import Found
from kvchat.core.config import format_bytes
from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory
from kvchat.core.stats import TierStatus

T = TypeVar("T")

_log = logging.getLogger(__name__)

_HEAD, _PAYLOAD = b"h", b"p"
# A busy database is a miss: whoever holds it longer than this is not worth waiting for.
_PATIENCE_S = 1.0
_GENERATION_TO_LIVE_S = 14 * 86400.0
# What a full store makes room for beyond what is asked, so that not every pack pays for the search.
_ROOM_SHARE = 0.05
# SQLite's tables, its log, and the directories, before anything is in them.
_FIXED_BYTES = 2 << 20


class DiskTier:
    """One identity's packs, in a directory that all identities share and together keep bounded.

    `limit_bytes` holds for the whole directory at every instant; `min_free_bytes` of the disk are
    left alone. Raises StoreError where the directory cannot be used at all. One thread uses it.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        limit_bytes: int,
        min_free_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._own = directory / layout.identity.hex()
        self._layout = layout
        self._limit_bytes = limit_bytes
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._root = root_key(layout.identity)
        self._status = TierStatus(limit_bytes=limit_bytes)
        self._lock = StoreLock(directory / LOCK_NAME, _PATIENCE_S)
        self._sizes = Sizes()
        self._may_begin_anew, self._has_leftovers = True, False
        self._cache = self._opened()
        self._attempt(self._tidy, None)

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""
        return self._root

    # Finding and reading

    def find(self, keys: Sequence[bytes], packed: bytes) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, in order and without a hole."""
        return self._attempt(lambda: list(self._walk(keys, packed)), [])

    def _walk(self, keys: Sequence[bytes], packed: bytes) -> Iterator[Found]:
        self._follow()
        block = 0
        while block < len(keys):
            head = self._head(keys[block])
            shared = head.num_shared(packed, block, self._layout) if head is not None else 0
            if head is None or not shared:
                return
            yield Found(keys[block], block, shared, head.checksum)
            block += shared

    def _head(self, key: bytes) -> PackHead | None:
        data = self._cache.get(_HEAD + key)
        if data is None:
            return None
        try:
            return decode_head(data, self._layout)
        except DamagedRecord as damage:
            self._quarantine(key, damage)
            return None

    def read(self, found: Found) -> memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord, and forgets it."""
        image = self._verified(found)
        self._count(bytes_read=len(image))
        self._attempt(lambda: self._cache.touch(_HEAD + found.key, expire=TIME_TO_LIVE_S), False)
        return image[: found.num_blocks * self._layout.block_bytes]

    def _verified(self, found: Found) -> memoryview:
        try:
            image = self._read_twice(found)
        except Exception as error:
            if isinstance(error, DamagedRecord):
                raise
            self._note_trouble(error)
            raise DamagedRecord("unreadable") from error
        if image is None:
            raise DamagedRecord("gone")
        return image

    def _read_twice(self, found: Found) -> memoryview | None:
        """Read again what looks damaged while nobody writes: it may have been exchanged meanwhile.

        What is damaged still is forgotten.
        """
        with suppress(DamagedRecord):
            return self._read_whole(found)
        with self._lock.held():
            self._follow()
            try:
                return self._read_whole(found)
            except DamagedRecord as damage:
                self._quarantine(found.key, damage)
                raise

    def _read_whole(self, found: Found) -> memoryview | None:
        """Return a pack's images; None where it was forgotten, or exchanged, since it was found."""
        head_data = self._cache.get(_HEAD + found.key)
        payload = self._cache.get(_PAYLOAD + found.key)
        if head_data is None:
            return None
        head = decode_head(head_data, self._layout)
        if found.checksum not in (b"", head.checksum):
            return None
        if payload is None:
            raise DamagedRecord("without its payload")
        return decode_payload(payload, found.key, head, self._layout)

    def _quarantine(self, key: bytes, damage: DamagedRecord) -> None:
        """Forget a damaged pack; its place is free for a good one."""
        _log.warning("damaged pack key=%s: %s", key.hex(), damage)
        self._count(num_damaged=1)
        self._status = replace(self._status, trouble=f"a stored block was damaged ({damage}).")
        self._attempt(lambda: self._remove(key), None)

    def _remove(self, key: bytes) -> None:
        with self._lock.held():
            self._cache.delete(_HEAD + key)
            self._cache.delete(_PAYLOAD + key)

    # Writing

    def write(self, head: PackHead, image: memoryview) -> bool:
        """Keep a pack; false, and why in the status, where the world did not let it."""
        num_blocks = head.num_blocks(self._layout)
        assert len(image) == num_blocks * self._layout.block_bytes
        complete = replace(head, checksum=payload_checksum(image))
        is_written = self._attempt(lambda: self._write(complete, image), False)
        self._count(num_failed_writes=not is_written, bytes_written=is_written * len(image))
        return is_written

    def _write(self, head: PackHead, image: memoryview) -> bool:
        self._follow()
        key = head.keys(self._layout)[0]
        with self._lock.held() as was_cut_off:
            if was_cut_off or self._has_leftovers:
                self._tidy()
            if self._head(key) is not None:
                return True
            num_bytes = len(image) + 2 * len(head.ids) + FILE_OVERHEAD_BYTES
            if not self._make_room(num_bytes, head.parent):
                return False
            prefix = payload_prefix(key, head, len(image), self._layout)
            try:
                self._cache.set(_PAYLOAD + key, b"".join((prefix, image)))
                data = encode_head(head, self._layout)
                self._cache.set(_HEAD + key, data, expire=TIME_TO_LIVE_S)
            except Exception:
                self._has_leftovers = True
                raise
        return True

    def _make_room(self, num_bytes: int, parent: bytes) -> bool:
        """Forget packs until `num_bytes` more fit under the limit; false where they cannot.

        What a pack after `parent` continues is not forgotten for its sake.
        """
        if not leaves_free(self._own, num_bytes, self._min_free_bytes):
            self._status = replace(self._status, trouble="the disk is nearly full.")
            return False
        if not self._shrink(num_bytes, parent):
            limit = format_bytes(self._limit_bytes)
            self._status = replace(self._status, trouble=f"--disk-cache allows only {limit}.")
            return False
        return True

    def _shrink(self, num_bytes: int, parent: bytes) -> bool:
        """Forget what was used longest ago until `num_bytes` more fit; false if they never will.

        What a pack after `parent` continues stays. Another generation goes as a whole, when its
        turn comes.
        """
        excess = self._used_bytes() + num_bytes - self._limit_bytes
        if excess <= 0:
            return True
        if num_bytes and _FIXED_BYTES + num_bytes > self._limit_bytes:
            return False
        packs = dict(self._known_packs())
        # Once something has to go, more goes than is needed: not every pack pays for the search.
        to_free = excess + int(_ROOM_SHARE * self._limit_bytes)
        for key in eviction_order(packs, parent):
            to_free -= self._drop_older(packs[key].last_used)
            if to_free <= 0:
                break
            self._remove(key)
            self._count(num_evicted=1)
            to_free -= packs[key].num_bytes
        if to_free > 0:
            self._drop_older(math.inf)
        return self._used_bytes() + num_bytes <= self._limit_bytes

    def _drop_older(self, used_s: float) -> int:
        """Drop the generations last used before `used_s`; return how many bytes they had."""
        return sum(drop(path) for path in self._others() if last_used(path) < used_s)

    def _known_packs(self) -> Iterator[tuple[bytes, KnownPack]]:
        for name in list(self._cache.iterkeys()):
            if name[:1] != _HEAD:
                continue
            data, expires = self._cache.get(name, expire_time=True)
            if data is None:  # out of date
                self._remove(name[1:])
                continue
            try:
                head = decode_head(data, self._layout)
            except DamagedRecord as damage:
                self._quarantine(name[1:], damage)
                continue
            keys = tuple(head.keys(self._layout))
            num_bytes = len(keys) * self._layout.block_bytes + FILE_OVERHEAD_BYTES
            used_s = float(expires or 0.0) - TIME_TO_LIVE_S
            yield name[1:], KnownPack(head.parent, keys, used_s, num_bytes)

    def _used_bytes(self) -> int:
        """Return what the directory takes at most, this moment, all generations together."""
        files = int(self._cache.reset("size")) + len(self._cache) * FILE_OVERHEAD_BYTES
        tables = sum(file_bytes(self._own / f"{DATABASE}{end}") for end in ("", "-wal", "-shm"))
        others = sum(self._sizes.of(path) for path in self._others())
        return _FIXED_BYTES + files + tables + others

    # Housekeeping

    def status(self) -> TierStatus:
        """Return totals, and what the store holds now."""
        used = self._attempt(self._used_bytes, 0)
        num_packs = self._attempt(lambda: len(self._cache) // 2, 0)
        return replace(self._status, num_bytes=used, num_packs=num_packs)

    def verify(self, goes_on: Callable[[], bool] = lambda: True) -> tuple[int, int]:
        """Read every pack; return how many are sound, and how many were not and are gone.

        That is no use of them: what is forgotten first stays the same. `goes_on` false ends it.
        """
        before = self._status.num_damaged
        num_sound = 0
        names: list[bytes] = self._attempt(lambda: list(self._cache), [])
        for key in (name[1:] for name in names if name[:1] == _HEAD and goes_on()):
            with suppress(DamagedRecord):
                self._verified(Found(key, 0, 0))
                num_sound += 1
        return num_sound, self._status.num_damaged - before

    def gc(self) -> None:
        """Remove what is out of date, what nothing leads to, and dead generations.

        Every opening does, and every first write after a process was cut off.
        """
        self._attempt(self._tidy, None)

    def _tidy(self) -> None:
        with self._lock.held():
            self._sizes.forget()
            self._drop_older(self._clock() - _GENERATION_TO_LIVE_S)
            self._cache.expire(self._clock())
            self._drop_payloads()
            self._has_leftovers = False
            self._cache.sweep()
            self._shrink(0, self._root)

    def _drop_payloads(self) -> None:
        """Remove payloads without a head: no eviction would ever meet them."""
        names = list(self._cache)
        heads = {name[1:] for name in names if name[:1] == _HEAD}
        for name in (name for name in names if name[1:] not in heads):
            self._cache.delete(name)

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self._cache.close()

    def _others(self) -> list[Path]:
        """Return what other models, or other settings of this one, have left here."""
        return [path for path in generations(self._directory) if path != self._own]

    # What the world may break

    def _opened(self) -> RawCache:
        """Open the store; one whose table cannot be used is begun anew."""
        for path in (self._directory, self._own):
            if path.is_symlink():
                raise StoreError(f"{path} is a symbolic link.", "Remove it.")
        try:
            return self._open()
        except Exception as error:
            self._note_trouble(error)
            if is_passing(error):
                raise
            with self._lock.held():
                shutil.rmtree(self._own, ignore_errors=True)
            return self._open()

    def _open(self) -> RawCache:
        private_directory(self._directory)
        private_directory(self._own).chmod(0o700)
        # SQLite gives its log the mode of its file; both are the user's alone.
        descriptor = open_private(self._own / DATABASE, os.O_RDWR | os.O_CREAT)
        self._file = file_number(self._own / DATABASE)
        os.close(descriptor)
        return RawCache(self._own, _PATIENCE_S)

    def _follow(self) -> None:
        """Reopen where the directory is not the one that was opened, or is no more."""
        if file_number(self._own / DATABASE) != self._file:
            self._cache.close()
            self._cache = self._opened()

    def _attempt(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except Exception as error:  # a table with damage in it makes diskcache fail in any way
            self._note_trouble(error)
            with suppress(Exception):
                self._cache.take_back()
            if self._may_begin_anew and not is_passing(error):
                self._may_begin_anew = False
                self._attempt(self._begin_anew, None)
            return otherwise

    def _begin_anew(self) -> None:
        with self._lock.held():
            if file_number(self._own / DATABASE) == self._file:
                shutil.rmtree(self._own, ignore_errors=True)
        self._follow()

    def _note_trouble(self, error: Exception) -> None:
        _log.warning("disk tier: %r", error)
        reason = getattr(error, "strerror", None) or str(error).rstrip(".") or type(error).__name__
        self._status = replace(self._status, trouble=f"the disk cache failed: {reason}.")

    def _count(self, **amounts: int) -> None:
        totals = {name: getattr(self._status, name) + int(n) for name, n in amounts.items()}
        self._status = replace(self._status, **totals)
