"""Persistence: prompts find their KV on a slower tier, and finished contexts are kept there.

Joins the manager, which has the blocks, with the transfer thread, which has the time. Knows token
ids, blocks and images; knows no request and no model.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Event

from kvchat.cache.block_key import chain_keys
from kvchat.cache.codec import DamagedRecord
from kvchat.cache.manager import CacheManager
from kvchat.cache.planner import RestorePlanner
from kvchat.cache.radix_node import TOKEN_BYTES, pack
from kvchat.cache.saving import Saver
from kvchat.cache.tier import Found, Tier, trouble_of
from kvchat.cache.transfer import OpenTier, TransferThread
from kvchat.core.stats import TierStatus
from kvchat.core.types import TokenIds

_log = logging.getLogger(__name__)

Image = bytes | bytearray | memoryview

_MAX_PENDING_BYTES = 256 << 20
_MAX_PIECES_IN_FLIGHT = 8
_CLOSE_PATIENCE_S = 5.0
_NEWS_PATIENCE_S = 0.02


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_blocks` block images that belong at `start_block` of the prompt being restored."""

    start_block: int
    num_blocks: int
    image: bytearray | memoryview


@dataclass(slots=True, eq=False)
class Restore:
    """One prompt on its way back. Made and read by the engine's thread, fed by the transfer thread.

    `num_known` counts the leading tokens that the device had, `num_tokens` those restored behind
    them so far. `give_up` ends it; what came stays.
    """

    ids: TokenIds
    num_known: int
    deadline_s: float
    pieces: "SimpleQueue[Piece]" = field(default_factory=SimpleQueue)
    places: BoundedSemaphore = field(
        default_factory=lambda: BoundedSemaphore(_MAX_PIECES_IN_FLIGHT)
    )
    has_all: Event = field(default_factory=Event)
    is_given_up: Event = field(default_factory=Event)
    num_tokens: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.is_given_up.is_set() or (self.has_all.is_set() and self.pieces.empty())

    def give_up(self) -> None:
        self.is_given_up.set()


class Persistence:
    """Restores into and saves from one manager. `clock` returns seconds.

    The engine's thread owns it; reading, writing and checking happen on the transfer thread.
    """

    def __init__(
        self,
        manager: CacheManager,
        open_tier: OpenTier,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.planner = RestorePlanner()
        self.transfer = TransferThread(open_tier, _MAX_PENDING_BYTES)
        self.saver = Saver(manager, self.transfer, clock)
        self._manager = manager
        self._clock = clock
        self._block_bytes = manager.block_size * TOKEN_BYTES
        self._image_bytes = manager.kv_pool.geometry.block_bytes
        self._news = Event()

    # Restoring

    def begin(self, ids: TokenIds) -> Restore | None:
        """Ask for the KV of a prompt that the device has not; None where it is not worth it."""
        num_known = self._manager.measure(ids[:-1])
        size = self._manager.block_size
        num_blocks = (len(ids) - 1 - num_known) // size
        if num_blocks < 1 or self.transfer.is_without_tier:
            return None
        num_tokens = num_blocks * size
        if not self.planner.is_worth(num_tokens, num_blocks * self._image_bytes):
            self.planner.note_refused()
            return None
        restore = Restore(ids, num_known, self._clock() + self.planner.patience_s(num_tokens))
        self.transfer.restore(lambda tier: self._read(tier, restore, num_known // size))
        return restore

    def wait_for_news(self) -> None:
        """Wait for the next delivery, for a moment at most."""
        self._news.wait(_NEWS_PATIENCE_S)
        self._news.clear()

    def settle(self, restore: Restore) -> bool:
        """Take what has come of a restore onto the device; whether more may come.

        Gives up where there is no room for more, or where computing would have been quicker.
        """
        is_late = self._clock() > restore.deadline_s
        while not restore.is_given_up.is_set():
            try:
                piece = restore.pieces.get_nowait()
            except Empty:
                break
            restore.places.release()
            if self._take(restore, piece) < piece.num_blocks:
                restore.give_up()
        if is_late or self.transfer.is_without_tier:
            restore.give_up()
        return not restore.is_over

    def _take(self, restore: Restore, piece: Piece) -> int:
        """Enter a piece in the device tier; return how many of its blocks are there now."""
        size = self._manager.block_size
        end = (piece.start_block + piece.num_blocks) * size
        if self._manager.measure(restore.ids[:end]) == end:
            return piece.num_blocks  # another request has computed it meanwhile
        try:
            num_adopted = self._manager.adopt(restore.ids, piece.start_block, piece.image)
        except Exception:  # of memory, mostly: then it is computed, which says so if it cannot be
            _log.exception("what was restored could not be taken in")
            return 0
        restore.num_tokens += num_adopted * size
        self.saver.note_kept(restore.ids, piece.start_block + num_adopted)
        return num_adopted

    def _read(self, tier: Tier, restore: Restore, start_block: int) -> None:
        """On the transfer thread: read a prompt's packs one after another."""
        if restore.is_given_up.is_set():
            return
        packed = pack(restore.ids[:-1])
        try:
            for found in tier.find(self._keys(tier, packed), packed):
                if found.start_block + found.num_blocks <= start_block:
                    continue
                if not _has_place(restore):
                    return
                start_s = self._clock()
                image = tier.read(found)
                self.planner.note_read(len(image), self._clock() - start_s)
                restore.pieces.put(self._piece(found, image, start_block))
                self._news.set()
        except DamagedRecord:
            return  # the tier counts it; what lies behind it is computed
        finally:
            restore.has_all.set()
            self._news.set()

    def _piece(self, found: Found, image: Image, start_block: int) -> Piece:
        """Cut off what the device had already when it asked."""
        num_known = max(0, start_block - found.start_block)
        rest = memoryview(image)[num_known * self._image_bytes :]
        writable = bytearray(rest) if rest.readonly else rest
        return Piece(found.start_block + num_known, found.num_blocks - num_known, writable)

    def _keys(self, tier: Tier, packed: bytes) -> list[bytes]:
        return chain_keys(tier.root, packed, self._block_bytes)

    # Saving and telling

    def status(self) -> TierStatus | None:
        """Return what the tier says of itself, or why there is none; None while it is opened."""
        tier, failure = self.transfer.tier, self.transfer.failure
        if failure is not None:
            return TierStatus(trouble=trouble_of(failure))
        return tier.status() if tier is not None else None

    def save(self, ids: TokenIds) -> None:
        """Have the full blocks of a context written behind, as far as they are not kept yet."""
        self.saver.save(ids)

    def close(self) -> None:
        """Wait for what is being written, within bounds, and end the thread."""
        self.transfer.close(_CLOSE_PATIENCE_S)


def _has_place(restore: Restore) -> bool:
    """Wait until the engine has taken enough of what was read; false once it wants no more."""
    while not restore.places.acquire(timeout=0.05):
        if restore.is_given_up.is_set():
            return False
    return not restore.is_given_up.is_set()
