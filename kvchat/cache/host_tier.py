"""HostTier: blocks of KV in host memory, by chain key: demoted from the device, promoted later.

HostMemory allocates slots for block images; HostTier maps blocks to slots. A block is evicted
before the block it continues, and never while it is being copied. Found blocks are compared with
the requested token ids. `demotion.py` fills the slots.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvchat.cache.device_copies import PACK_BYTES, HostCopies
from kvchat.cache.keys import LOCAL_ROOT, TOKEN_BYTES
from kvchat.cache.tier import BlockRun, GoneRecord, Image, Tier
from kvchat.core.stats import TierStatus
from kvchat.core.types import MissReason

# Pinned memory is allocated in powers of two; a segment of another size would take more memory.
_SEGMENT_BYTES = 64 << 20
_MIN_SEGMENTS = 8


class HostMemory:
    """Up to `limit_bytes` of images of `block_bytes` each. One thread takes and gives back slots.

    `num_bytes` counts allocated bytes; it never exceeds `limit_bytes`.
    """

    def __init__(self, block_bytes: int, limit_bytes: int, is_pinned: bool) -> None:
        self.block_bytes = block_bytes
        self._is_pinned = is_pinned
        self._segment_bytes = _segment_bytes(block_bytes, limit_bytes)
        self._max_segments = limit_bytes // self._segment_bytes
        self._segments: list[torch.Tensor] = []
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        """The largest number of slots."""
        return self._max_segments * self._segment_slots

    @property
    def num_free(self) -> int:
        """Slots that could be taken now."""
        return len(self._free) + (self._max_segments - len(self._segments)) * self._segment_slots

    @property
    def num_bytes(self) -> int:
        return len(self._segments) * self._segment_bytes

    @property
    def _segment_slots(self) -> int:
        return self._segment_bytes // self.block_bytes

    def take(self) -> int | None:
        """Take a slot; None where none is free."""
        if not self._free:
            self._grow()
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Free a slot; its memory may be reused at once."""
        self._free.append(slot)

    def row(self, slot: int) -> torch.Tensor:
        """Return a slot's memory: [block_bytes] bytes, owned by the HostMemory."""
        segment, place = divmod(slot, self._segment_slots)
        start = place * self.block_bytes
        return self._segments[segment][start : start + self.block_bytes]

    def _grow(self) -> None:
        """Allocate one more segment; if that fails, the present number becomes the maximum."""
        if len(self._segments) >= self._max_segments:
            return
        try:
            segment = torch.empty(
                self._segment_bytes, dtype=torch.uint8, pin_memory=self._is_pinned
            )
        except (RuntimeError, MemoryError):
            self._max_segments = len(self._segments)
            return
        first = len(self._segments) * self._segment_slots
        self._segments.append(segment)
        self._free.extend(reversed(range(first, first + self._segment_slots)))


def _segment_bytes(block_bytes: int, limit_bytes: int) -> int:
    """Return a power of two that holds a block and, if possible, fits the limit several times."""
    largest = 1 << max(0, (limit_bytes // _MIN_SEGMENTS).bit_length() - 1)
    smallest = 1 << (block_bytes - 1).bit_length()
    return max(smallest, min(_SEGMENT_BYTES, largest))


@dataclass(slots=True)
class _Entry:
    """One block. `num_users` counts its leases; it can be found once it `is_filled`.

    An entry that `is_condemned` cannot be found, and is removed with its last lease.
    """

    parent: bytes
    ids: bytes
    slot: int
    num_users: int = 0
    is_filled: bool = False
    is_condemned: bool = False

    @property
    def is_findable(self) -> bool:
        return self.is_filled and not self.is_condemned


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Rows of host memory, one per block of `keys`; they are not reused until the lease ends.

    `first` is the index of the first key in the requested keys.
    """

    keys: tuple[bytes, ...]
    first: int
    rows: tuple[torch.Tensor, ...]

    def part(self, start: int, end: int) -> "Lease":
        """Return a part of the lease, which is released or completed separately."""
        return Lease(self.keys[start:end], self.first + start, self.rows[start:end])


@dataclass(frozen=True, slots=True)
class _Rows(BlockRun):
    """A run of blocks with all their keys."""

    keys: tuple[bytes, ...] = ()


class HostTier(Tier):
    """At most `limit_bytes` of images of `block_bytes`, for blocks of `block_size` token ids, which
    are copied to and from `device`.

    The limit holds at every instant. Any thread may call it.
    """

    is_quick = True

    def __init__(
        self, block_size: int, block_bytes: int, limit_bytes: int, device: torch.device
    ) -> None:
        self.piece_blocks = max(1, PACK_BYTES // block_bytes)
        self.copies = HostCopies(device, block_bytes, self.piece_blocks)
        self._ids_bytes = block_size * TOKEN_BYTES
        self._limit_bytes = limit_bytes
        self._memory = HostMemory(block_bytes, limit_bytes, device.type == "cuda")
        self._lock = threading.RLock()
        # The least recently used first; every block stands after all blocks that continue it.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._num_children: Counter[bytes] = Counter()
        self._reading: list[Lease] = []
        self._num_evicted = 0
        self._bytes_read = 0
        self._bytes_written = 0

    @property
    def root(self) -> bytes:
        """The key of the empty context: keys of this process."""
        return LOCAL_ROOT

    @property
    def num_slots(self) -> int:
        """Blocks the tier can hold."""
        return self._memory.num_slots

    # Finding and reading

    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        """Return the leading blocks that are here or being copied here, in pieces.

        They count as used last. `is_one_shot` has no effect.
        """
        with self._lock:
            count = self.peek(keys, encoded)
            if count:
                self._touch(self._entries[keys[0]].parent, keys[:count])
        size = self.piece_blocks
        pieces = (tuple(keys[start : min(start + size, count)]) for start in range(0, count, size))
        return [
            _Rows(piece[0], number * size, len(piece), keys=piece)
            for number, piece in enumerate(pieces)
        ]

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        """Return how many of a prompt's leading blocks are here or being copied here.

        `keys` and `encoded` may begin in the middle of a prompt; earlier blocks are not checked.
        """
        size = self._ids_bytes
        with self._lock:
            for number, key in enumerate(keys):
                entry = self._entries.get(key)
                own = encoded[number * size : (number + 1) * size]
                if entry is None or entry.is_condemned or entry.ids != own:
                    return number
        return len(keys)

    def read(self, run: BlockRun) -> torch.Tensor:
        """Return images on the device, in memory to be given to `take_back`; GoneRecord if a block
        is missing.
        """
        assert isinstance(run, _Rows)
        with self._lock:
            entries = [self._entries.get(key) for key in run.keys]
            if not all(entry is not None and entry.is_findable for entry in entries):
                raise GoneRecord("gone")
            lease = self._lease(run.keys, 0)
            self._reading.append(lease)
        try:
            images = self.copies.up(lease.rows)
        finally:
            with self._lock:
                self._reading.remove(lease)
                self._release(lease)
        self._bytes_read += len(run.keys) * self._memory.block_bytes
        return images

    def take_back(self, image: Image) -> None:
        """Use the memory of an image for another."""
        if isinstance(image, torch.Tensor):
            self.copies.give_back(image)

    # Leases

    def acquire_write(self, parent: bytes, keys: Sequence[bytes], encoded: bytes) -> Lease:
        """Lease rows to fill for the first missing blocks among `keys`, which follow `parent`.

        It evicts other blocks for room. Blocks already here are marked as used. If there is not
        room for all, the last are left out.
        """
        assert len(encoded) == len(keys) * self._ids_bytes
        with self._lock:
            first = next((n for n, key in enumerate(keys) if key not in self._entries), len(keys))
            last = next((n for n in range(first, len(keys)) if keys[n] in self._entries), len(keys))
            self._touch(parent, keys)
            needed = {*self._line(parent), *keys}
            parents = [parent, *keys]
            for number in range(first, last):
                slot = self._take_slot(needed)
                if slot is None:
                    last = number
                    break
                ids = encoded[number * self._ids_bytes : (number + 1) * self._ids_bytes]
                self._entries[keys[number]] = _Entry(parents[number], ids, slot)
                self._num_children[parents[number]] += 1
            self._touch(parent, keys)
            return self._lease(tuple(keys[first:last]), first)

    def _lease(self, keys: tuple[bytes, ...], first: int) -> Lease:
        for key in keys:
            self._entries[key].num_users += 1
        rows = tuple(self._memory.row(self._entries[key].slot) for key in keys)
        return Lease(keys, first, rows)

    def complete(self, lease: Lease, is_filled: bool) -> None:
        """End a write lease: its blocks can be read from now on if `is_filled`, else they are
        removed.
        """
        with self._lock:
            for key in lease.keys:
                self._entries[key].is_filled = is_filled
                self._entries[key].is_condemned |= not is_filled
            if is_filled:
                self._bytes_written += len(lease.keys) * self._memory.block_bytes
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        for key in reversed(lease.keys):
            entry = self._entries[key]
            entry.num_users -= 1
            if entry.is_condemned and not entry.num_users:
                self._remove(key)

    # Forgetting

    def _take_slot(self, needed: set[bytes]) -> int | None:
        """Take a slot; if none is free, evict the least recently used block without children."""
        slot = self._memory.take()
        if slot is None and (oldest := self._oldest(needed)) is not None:
            self._remove(oldest)
            self._num_evicted += 1
            slot = self._memory.take()
        return slot

    def _oldest(self, needed: set[bytes]) -> bytes | None:
        for key, entry in self._entries.items():
            if not (entry.num_users or self._num_children[key] or key in needed):
                return key
        return None

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._memory.give_back(entry.slot)
        self._num_children[entry.parent] -= 1
        if not self._num_children[entry.parent]:
            del self._num_children[entry.parent]

    def clear(self) -> None:
        """Remove every block that is not being copied."""
        with self._lock:
            for key in [key for key, entry in self._entries.items() if not entry.num_users]:
                self._remove(key)

    def forget(self, keys: Sequence[bytes], before: Sequence[bytes] = ()) -> None:
        """Never return these blocks again, nor blocks that continue them."""
        gone = set(keys)
        with self._lock:
            # Newest first: in that order a block comes before all blocks that continue it.
            for key, entry in reversed(self._entries.items()):
                if entry.parent in gone:
                    gone.add(key)
            for key in [key for key in self._entries if key in gone]:
                self._entries[key].is_condemned = True
                if not self._entries[key].num_users:
                    self._remove(key)

    def _touch(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """Mark `keys`, which follow `parent`, and all their ancestors as used last."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)
        for key in self._line(parent):
            self._entries.move_to_end(key)

    def _line(self, key: bytes) -> Iterator[bytes]:
        """Yield a block and its ancestors, the nearest first, until one is missing."""
        while (entry := self._entries.get(key)) is not None:
            yield key
            key = entry.parent

    # The rest of a tier

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        """Return EVICTED if the tier has evicted any block, else NEVER_WRITTEN."""
        return MissReason.EVICTED if self._num_evicted else MissReason.NEVER_WRITTEN

    def status(self) -> TierStatus:
        """Return what the tier holds and its totals."""
        return TierStatus(
            num_packs=len(self._entries),
            num_bytes=self._memory.num_bytes,
            limit_bytes=self._limit_bytes,
            bytes_read=self._bytes_read,
            bytes_written=self._bytes_written,
            num_evicted=self._num_evicted,
        )

    # Checking

    def check(self, leases: Sequence[Lease] | None = None) -> None:
        """Check every invariant; if `leases` are all leases to write, the counts of users too."""
        with self._lock:
            self._check(leases)

    def _check(self, leases: Sequence[Lease] | None) -> None:
        memory, entries = self._memory, self._entries
        assert memory.num_bytes <= self._limit_bytes
        slots = [entry.slot for entry in entries.values()]
        assert len(set(slots)) == len(slots), "two blocks share a slot"
        assert len(slots) + memory.num_free == memory.num_slots
        assert Counter(entry.parent for entry in entries.values()) == self._num_children
        places = {key: place for place, key in enumerate(entries)}
        for key, entry in entries.items():
            if entry.parent in places:
                assert places[entry.parent] > places[key], "a block is older than what continues it"
            assert entry.is_filled or entry.num_users, "a block is neither filled nor being filled"
        if leases is not None:
            users = Counter(key for each in (*leases, *self._reading) for key in each.keys)
            assert users == Counter({k: e.num_users for k, e in entries.items() if e.num_users})
