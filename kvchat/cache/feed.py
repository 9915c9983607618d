"""Feed: what one tier delivers of a prompt, and FeedReader, which finds and reads it.

The thread of the tier finds and reads, the engine's thread takes the pieces.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Event
from typing import TYPE_CHECKING

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.keys import NO_TOKEN, TOKEN_BYTES, KeyMemo, chain_keys, encode_ids
from kvchat.cache.link import Link
from kvchat.cache.planner import Planner
from kvchat.cache.tier import (
    BlockRun,
    BusyRecord,
    DamagedRecord,
    GoneRecord,
    Image,
    LogitFingerprint,
    Tier,
)
from kvchat.core.types import MissReason, TokenIds

if TYPE_CHECKING:
    import torch

# Pieces read before the front is computed wait in memory: at most 256 MiB of packs.
_MAX_PIECES_IN_FLIGHT = 64
_PLACE_PATIENCE_S = 0.05
# Reading into used memory takes a quarter of the time of fresh memory. So the reader stays only
# this far ahead of the engine, and waits for it up to a limit. The limit is twice the slowest
# measured copy of a pack to the device (9 ms, into fresh pages of the KV pool), and about the extra
# cost of reading one pack into fresh memory. A quick tier copies a piece while another is entered.
_PIECES_AHEAD, QUICK_PIECES_AHEAD = 1, 2
_TAKING_PATIENCE_S = 0.02


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_blocks` block images that belong at `start_block` of the prompt that they are read for.

    `fingerprint` is that of its last token, if there is one.
    """

    start_block: int
    num_blocks: int
    image: "bytearray | memoryview | torch.Tensor"
    fingerprint: LogitFingerprint | None = None


@dataclass(slots=True, eq=False)
class Feed:
    """What one tier delivers of a prompt: the tier's thread puts pieces, the engine's takes them.

    Before the first piece the tier's thread may set `ids` to the context of a snapshot of recurrent
    state in the prompt, `num_planned` to the end of a front that is quicker to compute,
    `piece_bytes` to the size of the largest piece, and `miss_reason` to why there is no more.
    `num_front` is the engine's: packs before it are not read any more. So is `expected_s`, when
    another machine is expected to answer: until it does, the front is computed. 0 for any other
    tier. The tier's thread sets `is_found` once the tier has answered.

    `num_known` counts the tokens that need no computing. `num_put` counts the delivered pieces,
    `num_taken` those that the engine has handled. `num_awaited` is `num_taken` when the reader's
    last wait for the engine timed out.
    """

    ids: TokenIds
    num_known: int = 0
    is_prefetch: bool = False
    is_one_shot: bool = False
    num_ahead: int = _PIECES_AHEAD
    num_front: int = 0
    num_planned: int = 0
    expected_s: float = 0.0
    is_found: bool = False
    piece_bytes: int = 0
    miss_reason: MissReason | None = None
    pieces: "SimpleQueue[Piece]" = field(default_factory=SimpleQueue)
    places: BoundedSemaphore = field(
        default_factory=lambda: BoundedSemaphore(_MAX_PIECES_IN_FLIGHT)
    )
    num_put: int = 0
    num_taken: int = 0
    num_awaited: int = -1
    has_taken: Event = field(default_factory=Event)
    has_all: Event = field(default_factory=Event)
    is_given_up: Event = field(default_factory=Event)

    def give_up(self) -> None:
        """End it, and free the pieces that were read."""
        self.is_given_up.set()
        self._drop_pieces()

    def _drop_pieces(self) -> None:
        with suppress(Empty):
            while True:
                self.pieces.get_nowait()

    # For the tier's thread

    def has_place(self) -> bool:
        """Acquire a place, with a short wait; false if none is free or the feed is given up."""
        return self.places.acquire(timeout=_PLACE_PATIENCE_S) and not self.is_given_up.is_set()

    def deliver(self, piece: Piece) -> None:
        """Deliver a piece that was read, in the place acquired last."""
        self.num_put += 1
        self.pieces.put(piece)
        if self.is_given_up.is_set():
            self._drop_pieces()

    def let_engine_take(self) -> None:
        """Wait briefly for the engine to take a piece, if enough pieces are delivered.

        If that wait times out, as while a front is computed, there is no further wait until the
        engine has taken a piece.
        """
        self.has_taken.clear()
        num_taken = self.num_taken
        if self.num_put - num_taken < self.num_ahead or num_taken == self.num_awaited:
            return
        if not self.has_taken.wait(_TAKING_PATIENCE_S):
            self.num_awaited = num_taken


class FeedReader:
    """Finds and reads prompts in any tier. `news` is set at each delivery. Each tier's thread calls
    it, and for quick tiers the engine's thread calls `find`.
    """

    def __init__(
        self,
        manager: CacheManager,
        planner: Planner,
        memo: KeyMemo,
        clock: Callable[[], float],
    ) -> None:
        self.news = Event()
        self._manager = manager
        self._planner = planner
        self._memo = memo
        self._clock = clock
        self._block_bytes = manager.block_size * TOKEN_BYTES
        self._image_bytes = manager.kv_pool.geometry.block_bytes

    def read(self, link: Link, tier: Tier | None, feed: Feed, start_block: int) -> None:
        """Find a prompt's packs, and read them, or those after a front to be computed."""
        wanted: deque[BlockRun] = deque()
        try:
            if tier is not None and not feed.is_given_up.is_set():
                runs = self.find(tier, feed, start_block)
                feed.is_found = True
                if feed.expected_s:  # what was computed here meanwhile is not read
                    start_block = max(start_block, feed.num_front // self._manager.block_size)
                if self._manager.has_state:
                    num_restored = len(feed.ids) // self._manager.block_size
                    # The state, and the window before it: the device may have another end's.
                    num_read = self._manager.num_state_blocks + self._manager.window_blocks
                    start_block = max(0, min(start_block, num_restored - num_read))
                start_block = self._planned_start(link, feed, runs, start_block)
                wanted.extend(run for run in runs if run.end_block > start_block)
        finally:
            self.read_on(link, tier, feed, wanted, start_block)

    def find(self, tier: Tier, feed: Feed, start_block: int) -> list[BlockRun]:
        """Return the packs of a prompt; of a quick tier only those from `start_block` on, because
        it need not have what the device has.

        With recurrent state `feed.ids` becomes the longest context of the prompt with a snapshot of
        which the tier has all; none are returned if there is none after what the device can use.
        """
        encoded = encode_ids(feed.ids[:-1])
        keys = self._memo.keys_of(tier.root, encoded)
        first = start_block if tier.is_quick else 0
        runs = self._runs(tier, keys, encoded, first, feed.is_one_shot)
        num_found = first + sum(run.num_blocks for run in runs)
        if num_found < len(keys):
            feed.miss_reason = tier.why(keys[num_found], encoded, num_found)
        if not self._manager.has_state:
            return runs
        return self._with_snapshot(tier, feed, keys[:num_found])

    def _runs(
        self, tier: Tier, keys: Sequence[bytes], encoded: bytes, first: int, is_one_shot: bool
    ) -> list[BlockRun]:
        runs = tier.find(keys[first:], encoded[first * self._block_bytes :], is_one_shot)
        return (
            [replace(run, start_block=run.start_block + first) for run in runs] if first else runs
        )

    def _with_snapshot(self, tier: Tier, feed: Feed, keys: Sequence[bytes]) -> list[BlockRun]:
        size, manager = self._manager.block_size, self._manager
        state = encode_ids(manager.with_state((), 0))
        beginning = state[: self._block_bytes]
        for num_blocks in range(len(keys), feed.num_known // size, -1):
            parent = keys[num_blocks - 1]
            if not tier.peek(chain_keys(parent, beginning, self._block_bytes), beginning):
                continue  # as at most ends of blocks; a snapshot may have hundreds of keys
            ids = manager.with_state(feed.ids, num_blocks * size)
            all_keys = [*keys[:num_blocks], *chain_keys(parent, state, self._block_bytes)]
            first = manager.num_cached_tokens(ids) // size if tier.is_quick else 0
            runs = self._runs(tier, all_keys, encode_ids(ids), first, feed.is_one_shot)
            if first + sum(run.num_blocks for run in runs) == len(all_keys):
                feed.ids = [*ids, NO_TOKEN]
                return runs
        return []

    def read_on(
        self, link: Link, tier: Tier | None, feed: Feed, wanted: deque[BlockRun], start_block: int
    ) -> None:
        """Read packs one after another, while there are places for them.

        Without a place the job is queued again behind the others: the engine may need one of their
        copies before it can take a piece.
        """
        has_place = True
        try:
            while tier is not None and wanted and (has_place := feed.has_place()):
                self._read_pack(link, tier, feed, wanted.popleft(), start_block)
        except DamagedRecord as damage:  # the tier counts it; the blocks after it are computed
            feed.miss_reason = _miss_reason_of(damage)
        finally:
            if has_place or feed.is_given_up.is_set():
                feed.has_all.set()
                self.news.set()
            else:
                link.thread.restore(
                    lambda tier: self.read_on(link, tier, feed, wanted, start_block)
                )

    def _read_pack(
        self, link: Link, tier: Tier, feed: Feed, run: BlockRun, start_block: int
    ) -> None:
        if run.end_block * self._manager.block_size <= feed.num_front:
            feed.places.release()  # it is being computed
            return
        feed.let_engine_take()
        start_s = self._clock()
        image = tier.read(run)
        seconds = self._clock() - start_s
        link.read_s += seconds
        self._planner.note_copy(link.read_rate, run.num_blocks * self._image_bytes, seconds)
        feed.deliver(self._piece(run, image, start_block))
        self.news.set()

    def _planned_start(
        self, link: Link, feed: Feed, runs: Sequence[BlockRun], start_block: int
    ) -> int:
        """Return the first block to read, and set `num_planned` if a front is to be computed."""
        wanted = [run for run in runs if run.end_block > start_block]
        if not wanted:
            return start_block
        feed.piece_bytes = max(run.num_blocks for run in wanted) * self._image_bytes
        if feed.is_prefetch or self._manager.has_state:
            return start_block
        size = self._manager.block_size
        first = self._planner.first_worth(
            link.read_rate,
            [
                (
                    (run.end_block - max(run.start_block, start_block)) * size,
                    run.num_blocks * self._image_bytes,
                )
                for run in wanted
            ],
            start_block * size,
            link.latency_s,
        )
        if first:
            feed.miss_reason = MissReason.SLOWER
        if first == len(wanted):
            return wanted[-1].start_block + wanted[-1].num_blocks
        if first:
            start_block = wanted[first].start_block
            feed.num_planned = start_block * size
        return start_block

    def _piece(self, run: BlockRun, image: Image, start_block: int) -> Piece:
        """Make a piece of an image, without the blocks before `start_block`; raises DamagedRecord
        if it is not as long as its blocks are.
        """
        num_known = max(0, start_block - run.start_block)
        num_blocks = run.num_blocks - num_known
        if isinstance(image, bytes | bytearray | memoryview):
            rest = memoryview(image)[num_known * self._image_bytes :]
            image = bytearray(rest) if rest.readonly else rest
            if len(image) != num_blocks * self._image_bytes:
                raise DamagedRecord("size")
        return Piece(run.start_block + num_known, num_blocks, image, run.fingerprint)


def _miss_reason_of(damage: DamagedRecord) -> MissReason:
    """Return the miss reason for a record that could not be read."""
    reasons = {GoneRecord: MissReason.EVICTED, BusyRecord: MissReason.LATE}
    return reasons.get(type(damage), MissReason.CORRUPT)
