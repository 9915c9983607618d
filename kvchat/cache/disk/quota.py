"""DiskQuota: the limit in bytes of a store's directory, and the eviction that keeps it.

All identities in the directory share the limit. DiskQuota decides how many bytes to free, and when
another identity's directory is deleted as a whole; `eviction.py` orders the packs of its own.
"""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvchat.cache.disk.eviction import KnownPack, clock_shift, eviction_order, expired
from kvchat.cache.disk.miss_log import MissReasonLog
from kvchat.cache.disk.model_dirs import (
    DATABASE,
    FILE_OVERHEAD_BYTES,
    WEIGHTS,
    Sizes,
    beside_packs_bytes,
    drop,
    file_bytes,
    has_pins,
    last_used,
    list_model_dirs,
    set_last_used,
    tree_bytes,
)
from kvchat.cache.disk.table import LOG_PAGES, PAGE_BYTES, PackTable
from kvchat.core.text import Size, format_bytes
from kvchat.core.types import MissReason

_DEFAULT_SHARE = Size(share=0.10)
_MAX_DEFAULT_BYTES = 20 << 30
_MIN_FREE_BYTES = 1 << 30
_MIN_FREE_SHARE = 0.05


def disk_budget(size: Size | None, directory: Path) -> int:
    """Return the bytes KV may take in `directory`, which need not exist yet; packed weights may
    take as many beside it.

    A share, the default's too, is taken of what would be free without what is there of both: a
    limit that shrank as the store grew would empty it again.
    """
    if size is not None and size.num_bytes is not None:
        return size.num_bytes
    existing = nearest_existing(directory)
    kept = 0
    with suppress(OSError):  # an unreadable directory makes the limit smaller, and breaks no chat
        kept = sum(tree_bytes(path) for path in list_model_dirs(directory))
    with suppress(OSError):
        kept += sum(file.lstat().st_size for file in (directory / WEIGHTS).glob("*.safetensors"))
    available = shutil.disk_usage(existing).free + kept
    if size is not None:
        return size.resolve(available)
    return min(_DEFAULT_SHARE.resolve(available), _MAX_DEFAULT_BYTES)


def nearest_existing(directory: Path) -> Path:
    """Return a directory, or the nearest above it that exists."""
    around = (directory, *directory.absolute().parents)
    return next((path for path in around if os.path.exists(path)), Path("/"))


def why_nothing_fits(size: Size | None, directory: Path) -> str:
    """Return a sentence on why `directory` has no room for KV; "" if the user allows none."""
    if size is not None and not (size.num_bytes or size.share):
        return ""
    existing = nearest_existing(directory)
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"No KV can be kept in {directory}: {existing} cannot be written to."
    return f"There is no free space for KV in {directory}."


def leaves_free(directory: Path, num_bytes: int, min_free_bytes: int | None) -> bool:
    """Return whether `min_free_bytes` of the disk (None: the default) stay free after a write."""
    disk = shutil.disk_usage(directory)
    floor = min_free_bytes
    if floor is None:
        floor = min(_MIN_FREE_BYTES, int(disk.total * _MIN_FREE_SHARE))
    return disk.free - num_bytes >= floor


_MODEL_DIR_TIME_TO_LIVE_S = 14 * 86400.0
# A full store frees this share of the limit more than it must, so that not every write searches.
_ROOM_SHARE = 0.01
# The share of the limit that temporary pins hold at most.
_TEMPORARY_SHARE = 0.5
# The most that one change of the table writes besides its rows: the pages of the table's trees.
_CHANGE_BYTES = 24 * (PAGE_BYTES + 24)
_LOG_BYTES = LOG_PAGES * (PAGE_BYTES + 24) + _CHANGE_BYTES
# A large store has long contexts, whose uses are noted in one change: it reserves more.
_SPARE_SHARE, _MOST_SPARE_BYTES = 0.01, 2 << 20
# An empty table, the file that SQLite shares between processes, and our small files.
_EMPTY_BYTES = 160 << 10

Packs = Mapping[bytes, KnownPack]


def least_bytes(block_bytes: int) -> int:
    """Return the limit below which a store can never hold a block of so many bytes."""
    return _EMPTY_BYTES + _LOG_BYTES + _CHANGE_BYTES + block_bytes + FILE_OVERHEAD_BYTES


@dataclass(slots=True)
class DiskQuota:
    """The bounds of the store in `directory`, seen from the identity in `own`.

    The caller of `make_room` and `collect` holds the store's lock. `num_evicted` counts packs.
    """

    directory: Path
    own: Path
    limit_bytes: int
    min_free_bytes: int | None
    miss_log: MissReasonLog
    block_bytes: int
    clock: Callable[[], float]
    num_evicted: int = 0
    _sizes: Sizes = field(default_factory=Sizes)
    _used_s: float = -math.inf  # when any model directory was last used before this one is opened

    def __post_init__(self) -> None:
        with suppress(OSError):  # the opening that follows says why
            self._used_s = max(map(last_used, list_model_dirs(self.directory)), default=-math.inf)

    def used_bytes(self, table: PackTable) -> int:
        """Return the most that the directory takes now, which the limit is compared with."""
        the_store_itself = 2 * FILE_OVERHEAD_BYTES
        return self.stored_bytes(table) + self._growth_bytes(table) + the_store_itself

    def _growth_bytes(self, table: PackTable) -> int:
        """Return the most bytes that the table and its log may grow by before the next check,
        besides what is kept in them.
        """
        log, pages = (file_bytes(self.own / f"{DATABASE}{end}") for end in ("-wal", ""))
        growth = max(0, _LOG_BYTES - log) + max(0, table.num_bytes() - pages) + _CHANGE_BYTES
        return max(growth, min(_MOST_SPARE_BYTES, int(_SPARE_SHARE * self.limit_bytes)))

    def stored_bytes(self, table: PackTable) -> int:
        """Return what is kept in the directory, as `tree_bytes` counts, without what `used_bytes`
        reserves for tables that will grow.

        Searches our own files only if the table may not know all of them. Raises OSError if
        something cannot be looked at, because it would not count.
        """
        others = sum(map(self._sizes.of, self._others()))
        if table.files.has_leftovers:
            return tree_bytes(self.own) + others
        count, num_bytes = table.payload_files()
        packs = num_bytes + count * FILE_OVERHEAD_BYTES
        return packs + beside_packs_bytes(self.own) + others

    def has_room(self, table: PackTable, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit without eviction."""
        return self._excess(table, num_bytes) <= 0

    def make_room(
        self, table: PackTable, packs: Callable[[], Packs], num_bytes: int, parent: bytes
    ) -> str:
        """Evict packs until `num_bytes` more fit; return why they do not fit, "" if they do.

        The packs that lead to `parent` are not evicted, nor are pinned ones.
        """
        if not leaves_free(self.own, num_bytes, self.min_free_bytes):
            return "the disk is nearly full."
        if least_bytes(num_bytes) > self.limit_bytes:
            return f"--disk-cache allows only {format_bytes(self.limit_bytes)}."
        if self._shrink(table, packs, num_bytes, parent):
            return ""
        if any(self._pinned(table)):
            return f"what is pinned fills --disk-cache, {format_bytes(self.limit_bytes)}."
        return f"--disk-cache allows only {format_bytes(self.limit_bytes)}."

    def collect(self, table: PackTable, packs: Callable[[], Packs], now_s: float) -> str:
        """Remove what has expired and what exceeds the limit; return what is wrong, or "".

        If pins alone exceed the limit, pinned packs are evicted too.
        """
        self._sizes.forget()
        table.end_pins(now_s)
        self._follow_clock(table, now_s)
        self._drop_older(now_s - _MODEL_DIR_TIME_TO_LIVE_S)
        gone = expired(packs(), now_s, self._pinned(table))
        table.remove(*gone)
        self.miss_log.note(gone, MissReason.EVICTED)
        self._shrink(table, packs, 0, b"")
        is_any_pinned = any(self._pinned(table)) or any(map(has_pins, self._others()))
        if not is_any_pinned or self._excess(table, 0) <= 0:
            return ""
        self._forget_pinned(table, packs())
        return (
            f"what is pinned was more than --disk-cache, {format_bytes(self.limit_bytes)}; "
            "some of it had to go."
        )

    def _follow_clock(self, table: PackTable, now_s: float) -> None:
        """Move all uses, if the clock seems to have jumped since the last one."""
        if shift := clock_shift(table.newest_use_s(), now_s):
            table.move_uses(shift)
        if shift := clock_shift(self._used_s, now_s):
            for path in self._others():
                set_last_used(path, last_used(path) + shift)
        self._used_s = now_s

    def _shrink(
        self, table: PackTable, packs: Callable[[], Packs], num_bytes: int, parent: bytes
    ) -> bool:
        """Evict the packs of least worth until `num_bytes` more fit; false if they cannot fit.

        Another identity's model directory is deleted as a whole.
        """
        # Free more than is needed, so that the next writes need no search.
        extra = int(_ROOM_SHARE * self.limit_bytes)
        to_free = 0
        while (excess := self._excess(table, num_bytes)) > 0:
            to_free = excess + extra
            known = packs()
            keys, to_free = self._worth_least(table, known, parent, to_free)
            if not keys:
                break
            self._evict(table, keys)
            if table.files.has_leftovers and self._excess(table, num_bytes) >= excess:
                break  # files cannot be deleted: to evict more frees nothing
        if to_free > 0 and (not num_bytes or self._excess(table, num_bytes) <= self._loose_bytes()):
            self._drop_older(math.inf)  # only if that frees enough
        return excess <= 0 or self.has_room(table, num_bytes)

    def _worth_least(
        self, table: PackTable, known: Packs, parent: bytes, to_free: int
    ) -> tuple[list[bytes], int]:
        """Return the packs to evict to free `to_free` bytes, and the bytes still to free then.

        It has already deleted other model directories that were used less recently.
        """
        keys: list[bytes] = []
        loose = deque(sorted((last_used(path), path) for path in self._loose()))
        for key in eviction_order(known, parent, self._pinned(table)):
            while loose and loose[0][0] < known[key].use.last_s:
                to_free -= drop(loose.popleft()[1])
            if to_free <= 0:
                break
            keys.append(key)
            to_free -= known[key].num_bytes
        return keys, to_free

    def _forget_pinned(self, table: PackTable, known: Packs) -> None:
        table.shorten_log()  # before KV is evicted for bytes that the log repeats
        keys: list[bytes] = []
        to_free = self._excess(table, 0)
        for key in eviction_order(known, b""):
            if to_free <= 0:
                break
            keys.append(key)
            to_free -= known[key].num_bytes
        self._evict(table, keys)
        table.shorten_log()
        if self._excess(table, 0) > 0:
            for path in self._others():
                drop(path)

    def _evict(self, table: PackTable, keys: list[bytes]) -> None:
        table.remove(*keys)
        self.miss_log.note(keys, MissReason.EVICTED)
        self.num_evicted += len(keys)

    def _excess(self, table: PackTable, num_bytes: int) -> int:
        return self.used_bytes(table) + num_bytes - self.limit_bytes

    def _pinned(self, table: PackTable) -> set[bytes]:
        """Return the blocks that stay, by their keys.

        Temporary pins hold a share of the limit, those that last for days at most half of it, and
        those that end last first: a client's short ones and an agent's beginnings, each made by
        the dozen, leave each other room.
        """
        pins, now_s = table.pins(), self.clock()
        keys = {key for pin in pins if not pin.is_temporary for key in pin.keys}
        temporary = [pin for pin in pins if pin.is_temporary and pin.until_s > now_s]
        most = int(_TEMPORARY_SHARE * self.limit_bytes) // self.block_bytes
        ends = sorted(temporary, key=lambda pin: pin.until_s, reverse=True)
        num_own = len(keys)
        for is_lasting, room in ((True, most // 2), (False, most)):
            for pin in (pin for pin in ends if pin.is_lasting == is_lasting):
                if len(keys.union(pin.keys)) - num_own > room:
                    break
                keys.update(pin.keys)
        return keys

    def _drop_older(self, used_s: float) -> int:
        """Drop the model directories last used before `used_s`; return how many bytes they had.

        One with pins stays.
        """
        return sum(drop(path) for path in self._loose() if last_used(path) < used_s)

    def _loose_bytes(self) -> int:
        return sum(self._sizes.of(path) for path in self._loose())

    def _loose(self) -> list[Path]:
        """Return the other model directories that have no pins."""
        return [path for path in self._others() if not has_pins(path)]

    def _others(self) -> list[Path]:
        """Return the directories of other models, or of this one with other settings."""
        return [path for path in list_model_dirs(self.directory) if path != self.own]
