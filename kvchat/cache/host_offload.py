"""HostOffload: demotes evicted KV to host memory, and promotes it when a prompt needs it.

The engine's thread decides and gathers images into staging memory on the device; the transfer
thread copies them. Blocks are staged before they are reused. A promotion locks its prefix on the
device. On a CUDA device the copies have a stream of their own (HostCopies).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from kvchat.cache.block_manager import BlockTable, CacheManager
from kvchat.cache.device_copies import HostCopies
from kvchat.cache.host_tier import HostTier, Lease
from kvchat.cache.keys import NO_TOKEN, TOKEN_BYTES, ChainMemo, chain_keys, encode_ids
from kvchat.cache.rates import CopyRates, RateMemory
from kvchat.cache.transfer import TransferThread
from kvchat.core.stats import TierStatus
from kvchat.core.types import TokenIds


@dataclass(slots=True, eq=False)
class Promotion:
    """One prompt's KV being promoted from host memory. The engine's thread owns it.

    # [0, num_known)                            tokens that the device had
    # [num_known, num_known + num_tokens)       tokens promoted so far; `table` holds both parts

    `num_sent` counts the rows of the lease that were queued on the transfer thread.
    """

    ids: TokenIds
    num_known: int
    lease: Lease
    table: BlockTable
    deadline_s: float
    num_sent: int = 0
    num_in_flight: int = 0
    num_tokens: int = 0
    is_given_up: bool = False
    is_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Whether no more tokens will be promoted."""
        return self.is_given_up or self.is_ended

    def give_up(self) -> None:
        self.is_given_up = True


@dataclass(frozen=True, slots=True)
class Demoted:
    """The result of copying a piece to host memory; `is_there` if it succeeded."""

    lease: Lease
    num_bytes: int
    seconds: float
    is_there: bool


@dataclass(frozen=True, slots=True)
class Promoted:
    """The result of copying a piece to the device; `images` is None if it failed."""

    promotion: Promotion
    images: torch.Tensor | None
    num_blocks: int
    seconds: float


_log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
# Images staged on the device at the same time, on their way down.
_MAX_STAGED_BYTES = 64 << 20
_MAX_PIECES_IN_FLIGHT = 2
# If less than the first share of all blocks is free, cold blocks are demoted until the second share
# is free, at most so many bytes before each step.
_LOW_MARK, _HIGH_MARK = 1 / 32, 1 / 16
_MAX_DEMOTING_BYTES = 16 << 20
# A step waits so long for staged images to reach host memory; then blocks leave without a copy.
_DEMOTE_PATIENCE_S = 0.2
_NEWS_PATIENCE_S = 0.02
# Seconds between calls of `CopyRates.doubt`: a copy three times too slow is tried again within a
# minute.
_DOUBTS_EVERY_S = 5.0
_CLOSE_PATIENCE_S = 5.0


class HostOffload:
    """Connects one manager with a host tier. `clock` returns seconds; `memory` keeps the measured
    rates across runs. The engine's thread owns it.
    """

    def __init__(
        self,
        manager: CacheManager,
        host: HostTier,
        transfer: TransferThread,
        clock: Callable[[], float] = time.perf_counter,
        memory: RateMemory | None = None,
    ) -> None:
        self.rates = CopyRates()
        self._memory = memory
        if memory is not None:
            self.rates.begin_with(memory.read())
        self.host = host
        self._manager = manager
        self._pool = manager.kv_pool
        self._transfer = transfer
        self._clock = clock
        self._image_bytes = manager.kv_pool.geometry.block_bytes
        self._block_bytes = manager.block_size * TOKEN_BYTES
        self._memo = ChainMemo(host.root, self._block_bytes)
        self._piece_blocks = max(1, _PIECE_BYTES // self._image_bytes)
        device = manager.kv_pool.device
        self._copies = HostCopies(device, self._image_bytes, self._piece_blocks)
        self._done: SimpleQueue[Demoted | Promoted] = SimpleQueue()
        self._demoting: list[Lease] = []
        self._num_staged_bytes = 0
        self._is_stuck = False
        self._doubted_s = clock()
        self._arrived: deque[Promoted] = deque()
        self._promotions: list[Promotion] = []
        manager.attach(self)

    def status(self) -> TierStatus:
        """Return what host memory holds and has done."""
        return self.host.status()

    @property
    def is_promoting(self) -> bool:
        return bool(self._promotions)

    # Demoting

    def demote(self, encoded: bytes, blocks: list[int]) -> None:
        """Copy the last full blocks of a context, which the device is evicting.

        On return the caller may reuse them. Blocks are not copied if there is no room, or if
        computing them again is quicker.
        """
        if not self._is_worth_keeping():
            return
        keys = self._memo.keys_of(encoded)
        first = len(keys) - len(blocks)
        try:
            while first < len(keys):
                lease = self._acquired(encoded, keys, first)
                self._start_demotion(lease, blocks[first + lease.first - len(keys) :])
                if not lease.keys:
                    return
                first += lease.first + len(lease.keys)
        except Exception:  # mostly too little memory: the block is computed again
            _log.exception("blocks could not be demoted")

    def _acquired(self, encoded: bytes, keys: list[bytes], first: int) -> Lease:
        """Return room for the next blocks from `first` on that host memory lacks."""
        parent = keys[first - 1] if first else self.host.root
        return self.host.acquire_write(parent, keys[first:], encoded[first * self._block_bytes :])

    def _is_worth_keeping(self) -> bool:
        if not self.host.num_slots:
            return False
        if self.rates.is_worth_keeping(self._manager.block_size, self._image_bytes):
            return True
        if self._clock() >= self._doubted_s + _DOUBTS_EVERY_S:
            self._doubted_s = self._clock()
            self.rates.doubt()
        return False

    def _start_demotion(self, lease: Lease, blocks: list[int]) -> None:
        """Stage blocks, which begin with the lease's first, piece by piece, and have them
        copied.
        """
        size = self._piece_blocks
        pieces = [lease.part(start, start + size) for start in range(0, len(lease.keys), size)]
        self._demoting.extend(pieces)
        for number, piece in enumerate(pieces):
            num_bytes = len(piece.keys) * self._image_bytes
            is_staged = self._has_stage_for(num_bytes) and self._stage(
                piece, blocks[number * size : number * size + len(piece.keys)], num_bytes
            )
            if not is_staged:  # its children neither: they could not be found without it
                for lost in pieces[number:]:
                    self._demoting.remove(lost)
                    self.host.complete(lost, is_filled=False)
                return

    def _stage(self, piece: Lease, blocks: list[int], num_bytes: int) -> bool:
        try:
            staging = self._pool.stage(blocks, self._copies.staging(len(blocks)))
            mark = self._copies.mark()
        except Exception:  # mostly too little memory: the block is computed again
            _log.exception("blocks could not be staged")
            return False
        self._num_staged_bytes += num_bytes

        def copy() -> None:
            is_there, start_s = False, self._clock()
            try:
                self._copies.down(staging, piece.rows, mark)
                self._copies.give_back(staging)
                is_there = True
            finally:
                self._done.put(Demoted(piece, num_bytes, self._clock() - start_s, is_there))

        self._transfer.copy(copy)
        return True

    def _has_stage_for(self, num_bytes: int) -> bool:
        """Wait briefly for staging memory of `num_bytes`; false if there is none.

        After a wait that timed out, it does not wait again until a copy has finished.
        """
        self._take_done(0.0)
        deadline_s = time.monotonic() + _DEMOTE_PATIENCE_S
        while self._num_staged_bytes and self._num_staged_bytes + num_bytes > _MAX_STAGED_BYTES:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._is_stuck:
                self._is_stuck = True
                return False
            self._take_done(left_s)
        return True

    def forget(self, encoded: bytes, num_kept: int) -> None:
        """Never return again the blocks of a context after its first `num_kept`."""
        self._take_done(0.0)
        self.host.quarantine(self._memo.keys_of(encoded)[num_kept:])

    def clear(self) -> None:
        """Remove every block from host memory that is not being copied."""
        self._take_done(0.0)
        self.host.clear()

    # Promoting

    def begin(self, ids: TokenIds) -> Promotion | None:
        """Start to promote the blocks of a prompt that the device lacks; None if host memory has
        none, there is no room, or computing is quicker.
        """
        self._take_done(0.0)
        if self._manager.has_state:
            with_snapshot = self._with_snapshot(ids)
            if with_snapshot is None:
                return None
            ids = with_snapshot
        size = self._manager.block_size
        encoded = encode_ids(ids[:-1])
        first = self._manager.num_cached_tokens(ids[:-1]) // size
        keys = self._memo.keys_of(encoded)[first:]
        rest = encoded[first * self._block_bytes :]
        count = min(self._count(keys, rest), self._manager.num_available)
        if self._manager.has_state and count < len(keys):
            return None  # a part of a snapshot is of no use
        if not count or not self.rates.is_worth_fetching(count * size, count * self._image_bytes):
            return None
        promotion = Promotion(
            ids=ids,
            num_known=first * size,
            lease=self.host.acquire_read(keys[:count], rest),
            table=self._manager.match([*ids[: first * size], -1]),
            deadline_s=self._clock() + self._patience_s(count * size),
        )
        self._promotions.append(promotion)
        self._start_copies(promotion)
        return promotion

    def _with_snapshot(self, ids: TokenIds) -> TokenIds | None:
        """Return the longest context of a prompt whose snapshot of recurrent state begins in host
        memory, and one token after it; None if there is none that saves computing.
        """
        size = self._manager.block_size
        keys = self._memo.keys_of(encode_ids(ids[:-1]))
        known = self._manager.num_reusable_tokens(ids[:-1]) // size
        state = encode_ids(self._manager.with_state((), 0))
        for num_blocks in range(len(keys), known, -1):
            first = state[: self._block_bytes]
            [key] = chain_keys(keys[num_blocks - 1], first, self._block_bytes)
            if self.host.count([key], first):
                return [*self._manager.with_state(ids, num_blocks * size), NO_TOKEN]
        return None

    def num_cached_tokens(self, ids: TokenIds, num_known: int) -> int:
        """Return how many tokens host memory has after the first `num_known`, in full blocks."""
        first = num_known // self._manager.block_size
        encoded = encode_ids(ids)
        keys = self._memo.keys_of(encoded)[first:]
        count = self.host.count(keys, encoded[first * self._block_bytes :])
        return count * self._manager.block_size

    def tokens_per_s(self) -> float:
        """Return the tokens a second that promotions copy; infinite before the first."""
        rate = self.rates.up_bytes_per_s or math.inf
        return rate * self._manager.block_size / self._image_bytes

    def _count(self, keys: list[bytes], encoded: bytes) -> int:
        """Return how many leading blocks are in host memory; waits briefly for blocks that are
        being demoted.
        """
        deadline_s = time.monotonic() + _NEWS_PATIENCE_S
        while True:
            count = self.host.count(keys, encoded)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self.host.is_filling(keys[count : count + 1]):
                return count
            self._take_done(left_s)

    def _patience_s(self, num_tokens: int) -> float:
        rate = self.rates.prefill_tokens_per_s
        return max(_DEMOTE_PATIENCE_S, num_tokens / rate) if rate else 1.0

    def _start_copies(self, promotion: Promotion) -> None:
        rows = promotion.lease.rows
        while promotion.num_in_flight < _MAX_PIECES_IN_FLIGHT and promotion.num_sent < len(rows):
            end = min(promotion.num_sent + self._piece_blocks, len(rows))
            self._transfer.copy(self._promote_job(promotion, rows[promotion.num_sent : end]))
            promotion.num_sent = end
            promotion.num_in_flight += 1

    def _promote_job(
        self, promotion: Promotion, rows: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        def copy() -> None:
            images, start_s = None, self._clock()
            try:
                images = self._copies.up(rows)
            finally:
                seconds = self._clock() - start_s
                self._done.put(Promoted(promotion, images, len(rows), seconds))

        return copy

    def _take_promoted(self, promoted: Promoted) -> None:
        promotion = promoted.promotion
        promotion.num_in_flight -= 1
        if promoted.images is not None:
            self.rates.note_up(promoted.num_blocks * self._image_bytes, promoted.seconds)
        is_wanted = not promotion.is_given_up
        if is_wanted and (promoted.images is None or not self._enter(promotion, promoted.images)):
            promotion.give_up()
        if promoted.images is not None:
            self._copies.give_back(promoted.images)

    def _enter(self, promotion: Promotion, images: torch.Tensor) -> bool:
        """Enter images after those promoted so far; false if the device has no room."""
        size, table = self._manager.block_size, promotion.table
        start = promotion.num_known + promotion.num_tokens
        end = start + len(images) * size
        try:
            if not self._manager.reserve(table, start, end):
                return False
            self._pool.unstage(table.blocks[start // size : end // size], images)
        except Exception:  # mostly out of memory: the tokens are computed instead
            _log.exception("promoted blocks could not be entered on the device")
            return False
        promotion.num_tokens += len(images) * size
        self._manager.commit(table, promotion.ids, end)
        return True

    # Between steps

    def settle(self, may_demote: bool) -> None:
        """Process finished copies, continue promotions, and demote cold blocks in advance.

        Without `may_demote` blocks are demoted only when they are evicted.
        """
        self._take_done(0.0)
        while self._arrived:
            self._take_promoted(self._arrived.popleft())
        for promotion in list(self._promotions):
            self._advance(promotion)
        if may_demote and not self._promotions:
            self._demote_cold()

    def wait_for_news(self) -> None:
        """Wait briefly for the next copy to finish."""
        if not self._arrived:
            self._take_done(_NEWS_PATIENCE_S)

    def _take_done(self, timeout_s: float) -> None:
        """Process all finished copies; if there are none, wait for one up to `timeout_s`.

        Promoted pieces wait for the next `settle`: entering them may demote, which calls this.
        """
        with suppress(Empty):
            done = self._done.get(timeout=timeout_s) if timeout_s else self._done.get_nowait()
            while True:
                if isinstance(done, Demoted):
                    self._note_demoted(done)
                else:
                    self._arrived.append(done)
                done = self._done.get_nowait()

    def _note_demoted(self, demoted: Demoted) -> None:
        self._is_stuck = False
        self._num_staged_bytes -= demoted.num_bytes
        self._demoting.remove(demoted.lease)
        self.host.complete(demoted.lease, demoted.is_there)
        if demoted.is_there:
            self.rates.note_down(demoted.num_bytes, demoted.seconds)
        if not self._demoting:
            self._keep_rates()

    def _advance(self, promotion: Promotion) -> None:
        if self._clock() > promotion.deadline_s:
            promotion.give_up()
        if not promotion.is_given_up:
            self._start_copies(promotion)
        if promotion.num_in_flight == 0:
            end = promotion.num_known + promotion.num_tokens
            self._manager.release(promotion.table, promotion.ids[:end])
            self.host.release(promotion.lease)
            self._promotions.remove(promotion)
            promotion.is_ended = True
            self._keep_rates()

    def _keep_rates(self) -> None:
        memory = self._memory
        if memory is not None:
            known = self.rates.rates()
            self._transfer.copy(lambda: memory.write(known))

    def _demote_cold(self) -> None:
        """Evict the least recently used blocks in advance if few blocks are free."""
        status = self._manager.status()
        if status.num_free >= max(1, int(status.num_blocks * _LOW_MARK)):
            return
        if self._is_worth_keeping():
            wanted = max(2, int(status.num_blocks * _HIGH_MARK)) - status.num_free
            self._manager.evict_cold(min(wanted, max(1, _MAX_DEMOTING_BYTES // self._image_bytes)))

    def flush(self, timeout_s: float) -> bool:
        """Wait until every copy under way is done; false if that took too long."""
        return self._transfer.flush(timeout_s)

    def close(self) -> None:
        """End the thread once what is under way is done, within bounds. Idempotent."""
        memory, self._memory = self._memory, None
        self._transfer.close(_CLOSE_PATIENCE_S)
        self._take_done(0.0)
        if memory is not None:  # the transfer thread has ended, so write here
            memory.write(self.rates.rates())

    # Checking

    def tables(self) -> list[BlockTable]:
        """Return the tables of all promotions, for checks of reference counts."""
        return [promotion.table for promotion in self._promotions]

    def check(self) -> None:
        """Check every invariant of the host tier and of the copies under way."""
        self.host.check([*self._demoting, *(promotion.lease for promotion in self._promotions)])
        num_blocks = sum(len(lease.rows) for lease in self._demoting)
        assert num_blocks * self._image_bytes == self._num_staged_bytes
        assert len(self._demoting) <= 1 or self._num_staged_bytes <= _MAX_STAGED_BYTES
