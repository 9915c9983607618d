"""Demoter: moves evicted KV from the device to host memory.

The engine's thread decides and gathers images into staging memory on the device; the thread of the
host tier copies them. Blocks are staged before they are reused.
"""

import logging
import threading
import time
from collections.abc import Callable

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.host_tier import HostTier, Lease
from kvchat.cache.keys import KeyMemo
from kvchat.cache.planner import Planner, from_tier, to_tier
from kvchat.cache.transfer import TransferThread

_log = logging.getLogger(__name__)

# Images staged on the device at the same time, on their way down.
_MAX_STAGED_BYTES = 64 << 20
# If less than the first share of all blocks is free, cold blocks are demoted until the second share
# is free, at most so many bytes before each step.
_LOW_MARK, _HIGH_MARK = 1 / 32, 1 / 16
_MAX_DEMOTING_BYTES = 16 << 20
# A step waits so long for staged images to reach host memory; then blocks leave without a copy.
_PATIENCE_S = 0.2
# Seconds between calls of `Planner.doubt`: a copy three times too slow is tried again within a
# minute.
_DOUBTS_EVERY_S = 5.0


class Demoter:
    """Demotes the blocks of one manager to the tier `name`, through its thread.

    The engine's thread owns it. `clock` returns seconds.
    """

    def __init__(
        self,
        name: str,
        manager: CacheManager,
        host: HostTier,
        thread: TransferThread,
        planner: Planner,
        memo: KeyMemo,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.host = host
        self._ways = (to_tier(name), from_tier(name))
        self._manager = manager
        self._pool = manager.kv_pool
        self._thread = thread
        self._planner = planner
        self._memo = memo
        self._clock = clock
        self._image_bytes = manager.kv_pool.geometry.block_bytes
        self._changed = threading.Condition()  # guards the leases and their bytes
        self._leases: list[Lease] = []
        self._num_staged_bytes = 0
        self._is_stuck = False
        self._doubted_s = clock()
        manager.attach(self)

    def demote(self, encoded: bytes, blocks: list[int]) -> None:
        """Copy the last full blocks of a context, which the device is evicting.

        On return the caller may reuse them. Blocks are not copied if there is no room, or if
        computing them again is quicker.
        """
        if not self._is_worth_keeping():
            return
        keys = self._memo.local(encoded)
        first = len(keys) - len(blocks)
        try:
            while first < len(keys):
                lease = self._acquire(encoded, keys, first)
                self._start(lease, blocks[first + lease.first - len(keys) :])
                if not lease.keys:
                    return
                first += lease.first + len(lease.keys)
        except Exception:  # mostly too little memory: the block is computed again
            _log.exception("blocks could not be demoted")

    def _acquire(self, encoded: bytes, keys: list[bytes], first: int) -> Lease:
        """Return room for the next blocks from `first` on that host memory lacks."""
        parent = keys[first - 1] if first else self.host.root
        ids_bytes = len(encoded) // len(keys)
        return self.host.acquire_write(parent, keys[first:], encoded[first * ids_bytes :])

    def _is_worth_keeping(self) -> bool:
        if not self.host.num_slots:
            return False
        size = self._manager.block_size
        if self._planner.is_worth_copying(self._ways, size, self._image_bytes):
            return True
        if self._clock() >= self._doubted_s + _DOUBTS_EVERY_S:
            self._doubted_s = self._clock()
            self._planner.doubt(*self._ways)
        return False

    def _start(self, lease: Lease, blocks: list[int]) -> None:
        """Stage blocks, which begin with the lease's first, piece by piece, and have them
        copied.
        """
        size = self.host.piece_blocks
        pieces = [lease.part(start, start + size) for start in range(0, len(lease.keys), size)]
        for number, piece in enumerate(pieces):
            own = blocks[number * size : number * size + len(piece.keys)]
            if not (self._take_stage(piece) and self._stage(piece, own)):
                # Its children neither: they could not be found without it.
                for piece in pieces[number:]:
                    self._end(piece, is_there=False)
                return

    def _take_stage(self, piece: Lease) -> bool:
        """Wait briefly for staging memory for a piece; false if there is none.

        After a wait that timed out, it does not wait again until a copy has finished.
        """
        num_bytes = len(piece.keys) * self._image_bytes

        def has_room() -> bool:
            staged = self._num_staged_bytes
            return not staged or staged + num_bytes <= _MAX_STAGED_BYTES

        with self._changed:
            patience_s = 0.0 if self._is_stuck else _PATIENCE_S
            if not self._changed.wait_for(has_room, patience_s):
                self._is_stuck = True
                return False
            self._leases.append(piece)
            self._num_staged_bytes += num_bytes
        return True

    def _stage(self, piece: Lease, blocks: list[int]) -> bool:
        copies = self.host.copies
        try:
            staging = self._pool.stage(blocks, copies.staging(len(blocks)))
            mark = copies.mark()
        except Exception:  # mostly too little memory: the block is computed again
            _log.exception("blocks could not be staged")
            return False

        def copy() -> None:
            is_there, start_s = False, self._clock()
            try:
                copies.down(staging, piece.rows, mark)
                copies.give_back(staging)
                is_there = True
                num_bytes = len(piece.keys) * self._image_bytes
                self._planner.note_copy(self._ways[0], num_bytes, self._clock() - start_s)
            finally:
                self._end(piece, is_there)

        self._thread.copy(copy)
        return True

    def _end(self, piece: Lease, is_there: bool) -> None:
        """End the lease of a piece, whether it was copied or not; any thread may call it."""
        with self._changed:
            self.host.complete(piece, is_there)
            if piece in self._leases:
                self._leases.remove(piece)
                self._num_staged_bytes -= len(piece.keys) * self._image_bytes
                self._is_stuck = False
                self._changed.notify_all()
            is_last = not self._leases
        if is_last and is_there:
            self._planner.keep()

    def demote_cold(self) -> None:
        """Evict the least recently used blocks in advance if few blocks are free."""
        status = self._manager.status()
        if status.num_free >= max(1, int(status.num_blocks * _LOW_MARK)):
            return
        if self._is_worth_keeping():
            wanted = max(2, int(status.num_blocks * _HIGH_MARK)) - status.num_free
            self._manager.evict_cold(min(wanted, max(1, _MAX_DEMOTING_BYTES // self._image_bytes)))

    def forget(self, encoded: bytes, num_kept: int) -> None:
        """Never return again the blocks of a context after its first `num_kept`."""
        self.host.forget(self._memo.local(encoded)[num_kept:])

    def clear(self) -> None:
        """Remove every block from host memory that is not being copied."""
        self.host.clear()

    def check(self) -> None:
        """Check every invariant of the host tier and of the copies on their way down."""
        with self._changed:
            self.host.check(self._leases)
            num_blocks = sum(len(lease.rows) for lease in self._leases)
            assert num_blocks * self._image_bytes == self._num_staged_bytes
            assert len(self._leases) <= 1 or self._num_staged_bytes <= _MAX_STAGED_BYTES
