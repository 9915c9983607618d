"""DiskTier: packs of KV in files, found through diskcache's SQLite table, which is the only index.

A pack has two entries under its first block's key: its payload in a file, then its head in the
table, so that a head vouches for a payload. Raw bytes only. What is broken is a miss that is
counted. Several processes may share a directory. Knows packs; knows no device.
"""

import fcntl
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import diskcache

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
from kvchat.cache.raw_disk import RawDisk
from kvchat.cache.retention import KnownPack, eviction_order
from kvchat.cache.tier import Found, TierStatus
from kvchat.core.config import format_bytes
from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory

T = TypeVar("T")

_log = logging.getLogger(__name__)

_HEAD, _PAYLOAD = b"h", b"p"
_LOCK_NAME = "lock"
_DATABASE = "cache.db"
# A busy database is a miss: whoever holds it longer than this is not worth waiting for.
_PATIENCE_S = 1.0
_TIME_TO_LIVE_S = 30 * 86400.0
_GENERATION_TO_LIVE_S = 14 * 86400.0
_MIN_FREE_BYTES = 1 << 30
_MIN_FREE_SHARE = 0.05
# What a full store makes room for beyond what is asked, so that not every pack pays for the search.
_ROOM_SHARE = 0.05
# A file's tail fills a page of the disk, and its name some of a directory.
_FILE_OVERHEAD_BYTES = 8192
# SQLite's tables, its log, and the directories, before anything is in them.
_FIXED_BYTES = 2 << 20
_TROUBLES = (OSError, sqlite3.Error, diskcache.Timeout, StoreError)


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
        self._cache = self._opened()
        self._drop_stale_generations()

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""
        return self._root

    # Finding and reading

    def find(self, keys: Sequence[bytes], packed: bytes) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, in order and without a hole."""
        return self._attempt(lambda: list(self._walk(keys, packed)), [])

    def _walk(self, keys: Sequence[bytes], packed: bytes) -> Iterator[Found]:
        block = 0
        while block < len(keys):
            head = self._head(keys[block])
            shared = _num_shared(head, packed, block, self._layout) if head is not None else 0
            if not shared:
                return
            yield Found(keys[block], block, shared)
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
        try:
            image = self._read_whole(found.key)
        except DamagedRecord as damage:
            self._quarantine(found.key, damage)
            raise
        except _TROUBLES as error:
            self._note_trouble(error)
            raise DamagedRecord("unreadable") from error
        self._count(bytes_read=len(image))
        self._attempt(lambda: self._cache.touch(_HEAD + found.key, expire=_TIME_TO_LIVE_S), False)
        return image[: found.num_blocks * self._layout.block_bytes]

    def _read_whole(self, key: bytes) -> memoryview:
        head_data, payload = self._cache.get(_HEAD + key), self._cache.get(_PAYLOAD + key)
        if head_data is None or payload is None:
            raise DamagedRecord("gone")
        return decode_payload(payload, key, decode_head(head_data, self._layout), self._layout)

    def _quarantine(self, key: bytes, damage: DamagedRecord) -> None:
        """Forget a damaged pack; its place is free for a good one."""
        _log.warning("damaged pack key=%s: %s", key.hex(), damage)
        self._count(num_damaged=1)
        self._status = replace(self._status, trouble=f"a stored block was damaged ({damage}).")
        self._attempt(lambda: self._remove(key), None)

    def _remove(self, key: bytes) -> None:
        self._cache.delete(_HEAD + key)
        self._cache.delete(_PAYLOAD + key)

    # Writing

    def write(self, head: PackHead, image: memoryview) -> bool:
        """Keep a pack; false, and why in the status, where the world did not let it."""
        num_blocks = head.num_blocks(self._layout)
        assert len(image) == num_blocks * self._layout.block_bytes
        complete = replace(head, checksum=payload_checksum(image))
        try:
            if not (self._own / _DATABASE).exists():
                self._cache.close()
                self._cache = self._opened()
            with self._locked():
                is_written = self._write(complete, image)
        except _TROUBLES as error:
            self._note_trouble(error)
            is_written = False
        self._count(num_failed_writes=not is_written, bytes_written=is_written * len(image))
        return is_written

    def _write(self, head: PackHead, image: memoryview) -> bool:
        key = head.keys(self._layout)[0]
        if (_HEAD + key) in self._cache:
            return True
        num_bytes = len(image) + 2 * len(head.ids) + _FILE_OVERHEAD_BYTES
        if not self._make_room(num_bytes, head.parent):
            return False
        prefix = payload_prefix(key, head, len(image), self._layout)
        self._cache.set(_PAYLOAD + key, b"".join((prefix, image)))
        self._cache.set(_HEAD + key, encode_head(head, self._layout), expire=_TIME_TO_LIVE_S)
        return True

    def _make_room(self, num_bytes: int, parent: bytes) -> bool:
        """Forget packs until `num_bytes` more fit under the limit; false where they cannot.

        What a pack after `parent` continues is not forgotten for its sake.
        """
        disk = shutil.disk_usage(self._own)
        floor = self._min_free_bytes
        if floor is None:
            floor = min(_MIN_FREE_BYTES, int(disk.total * _MIN_FREE_SHARE))
        if disk.free - num_bytes < floor:
            self._status = replace(self._status, trouble="the disk is nearly full.")
            return False
        used = self._used_bytes()
        excess = used + num_bytes - self._limit_bytes
        if excess > 0:
            self._evict(excess + int(_ROOM_SHARE * self._limit_bytes), parent)
            excess = self._used_bytes() + num_bytes - self._limit_bytes
        if excess > 0:
            self._drop_generations(lambda age_s: True)
            excess = self._used_bytes() + num_bytes - self._limit_bytes
        if excess > 0:
            limit = format_bytes(self._limit_bytes)
            self._status = replace(self._status, trouble=f"--disk-cache allows only {limit}.")
        return excess <= 0

    def _evict(self, num_bytes: int, parent: bytes) -> None:
        packs = dict(self._known_packs())
        freed = 0
        for key in eviction_order(packs, parent):
            if freed >= num_bytes:
                break
            self._remove(key)
            self._count(num_evicted=1)
            freed += packs[key].num_bytes

    def _known_packs(self) -> Iterator[tuple[bytes, KnownPack]]:
        for name in list(self._cache.iterkeys()):
            if name[:1] != _HEAD:
                continue
            data, expires = self._cache.get(name, expire_time=True)
            try:
                head = decode_head(data or b"", self._layout)
            except DamagedRecord as damage:
                self._quarantine(name[1:], damage)
                continue
            keys = tuple(head.keys(self._layout))
            num_bytes = len(keys) * self._layout.block_bytes + _FILE_OVERHEAD_BYTES
            yield name[1:], KnownPack(head.parent, keys, expires or 0.0, num_bytes)

    def _used_bytes(self) -> int:
        """Return what the directory takes at most, this moment, all generations together."""
        files = int(self._cache.reset("size")) + len(self._cache) * _FILE_OVERHEAD_BYTES
        tables = sum(_size(self._own / f"{_DATABASE}{end}") for end in ("", "-wal", "-shm"))
        others = sum(_tree_bytes(path) for path in self._generations())
        return _FIXED_BYTES + files + tables + others

    # Housekeeping

    def status(self) -> TierStatus:
        """Return totals, and what the store holds now."""
        used = self._attempt(self._used_bytes, 0)
        num_packs = self._attempt(lambda: len(self._cache) // 2, 0)
        return replace(self._status, num_bytes=used, num_packs=num_packs)

    def verify(self) -> tuple[int, int]:
        """Read every pack; return how many are sound, and how many were not and are gone."""
        before = self._status.num_damaged
        num_sound = 0
        names: list[bytes] = self._attempt(lambda: list(self._cache), [])
        for key in (name[1:] for name in names if name[:1] == _HEAD):
            with suppress(DamagedRecord):
                self.read(Found(key, 0, 0))
                num_sound += 1
        return num_sound, self._status.num_damaged - before

    def gc(self) -> None:
        """Remove what is out of date, what nothing leads to, and dead generations."""
        self._attempt(self._collect, None)

    def _collect(self) -> None:
        with self._locked():
            self._cache.expire()
            heads = {name[1:] for name in self._cache if name[:1] == _HEAD}
            for name in list(self._cache):
                if name[1:] not in heads:
                    self._cache.delete(name)
            self._cache.check(fix=True)
            self._drop_stale_generations()

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self._cache.close()

    # Generations: what other models, or other settings of this one, have left here

    def _generations(self) -> list[Path]:
        with suppress(OSError):
            return [p for p in self._directory.iterdir() if p.is_dir() and p != self._own]
        return []

    def _drop_stale_generations(self) -> None:
        self._drop_generations(lambda age_s: age_s > _GENERATION_TO_LIVE_S)

    def _drop_generations(self, is_due: Callable[[float], bool]) -> None:
        for path in self._generations():
            with suppress(OSError):
                if is_due(self._clock() - (path / _DATABASE).stat().st_mtime):
                    shutil.rmtree(path, ignore_errors=True)

    # What the world may break

    def _opened(self) -> diskcache.Cache:
        """Open the store; one that SQLite cannot use is begun anew."""
        private_directory(self._directory)
        if self._own.is_symlink():
            raise StoreError(f"{self._own} is a symbolic link.", "Remove it.")
        try:
            return self._open()
        except (sqlite3.Error, diskcache.Timeout) as error:
            self._note_trouble(error)
            shutil.rmtree(self._own, ignore_errors=True)
            return self._open()

    def _open(self) -> diskcache.Cache:
        private_directory(self._own)
        # SQLite gives its log the mode of its file; both are the user's alone.
        os.close(open_private(self._own / _DATABASE, os.O_RDWR | os.O_CREAT))
        return diskcache.Cache(
            str(self._own),
            timeout=_PATIENCE_S,
            disk=RawDisk,
            disk_min_file_size=1 << 16,
            eviction_policy="none",
            cull_limit=0,
            size_limit=1 << 62,
            statistics=0,
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing, so that all of them together keep the limit."""
        descriptor = open_private(self._directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _attempt(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except _TROUBLES as error:
            self._note_trouble(error)
            return otherwise

    def _note_trouble(self, error: Exception) -> None:
        _log.warning("disk tier: %r", error)
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self._status = replace(self._status, trouble=f"the disk cache failed: {reason}.")

    def _count(self, **amounts: int) -> None:
        totals = {name: getattr(self._status, name) + int(n) for name, n in amounts.items()}
        self._status = replace(self._status, **totals)


def _num_shared(head: PackHead, packed: bytes, block: int, layout: Layout) -> int:
    """Return how many whole blocks of a pack stand in `packed` from `block` on."""
    start, size = block * layout.ids_bytes, layout.ids_bytes
    count = 0
    while (
        count < head.num_blocks(layout)
        and head.ids[count * size : (count + 1) * size]
        == packed[start + count * size : start + (count + 1) * size]
    ):
        count += 1
    return count


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tree_bytes(directory: Path) -> int:
    paths = (Path(top) / name for top, _, names in os.walk(directory) for name in names)
    return sum(_size(path) + _FILE_OVERHEAD_BYTES for path in paths)
