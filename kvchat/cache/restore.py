"""Restorer: restores the KV of prompts from a slower tier, one piece at a time.

The transfer thread reads packs; the engine's thread copies them to the device tier. Restored KV is
returned by `take_unverified`, to be verified by a forward pass.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Event

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.keys import NO_TOKEN, TOKEN_BYTES, chain_keys, encode_ids
from kvchat.cache.rates import RestorePlanner
from kvchat.cache.tier import DamagedRecord, Found, GoneRecord, HeldRecord, LogitFingerprint, Tier
from kvchat.cache.transfer import TransferThread
from kvchat.core.types import MissReason, TokenIds

# Pieces read before the front is computed wait in memory: at most 256 MiB of packs.
_MAX_PIECES_IN_FLIGHT = 64
_PLACE_PATIENCE_S = 0.05
# Reading into used memory takes a quarter of the time of fresh memory. So the reader stays only
# this far ahead of the engine, and waits for it up to a limit. The limit is twice the slowest
# measured copy of a pack to the device (9 ms, into fresh pages of the KV pool), and about the extra
# cost of reading one pack into fresh memory.
_PIECES_AHEAD = 1
_TAKING_PATIENCE_S = 0.02


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_blocks` block images that belong at `start_block` of the prompt being restored.

    `fingerprint` is that of its last token, if there is one.
    """

    start_block: int
    num_blocks: int
    image: bytearray | memoryview
    fingerprint: LogitFingerprint | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RestoredContext:
    """A context restored from its token `num_trusted` on, to be verified.

    To verify it, compute its last token again and compare the KV, and the logits with the
    fingerprint if there is one.
    """

    ids: list[int]
    num_trusted: int
    fingerprint: LogitFingerprint | None


@dataclass(slots=True, eq=False)
class Restore:
    """One prompt being restored. The engine's thread makes and reads it; the transfer thread
    delivers pieces to it. Before the first piece, the transfer thread may set `ids` to the context
    of a snapshot of recurrent state in the prompt.

    `num_known` counts the leading tokens that the device had, `num_tokens` those restored so far.
    `give_up` ends it; blocks already on the device stay. `miss_reason` says why no more was
    restored.

    # [0, num_known)                on the device at the start
    # [num_known, num_front)        to be computed, if missing, while the rest is read; `num_front`
    #                               is 0 if it is quicker to wait
    # [num_trusted, num_arrived)    tokens restored and not verified yet; `fingerprint` is that of
    #                               the last

    `num_planned` is the front that the reader does not read; the engine copies it to `num_front`.

    `num_put` counts the delivered pieces, `num_taken` those that the engine has handled.
    `num_awaited` is `num_taken` when the reader's last wait for the engine timed out.

    `since_s` is when the last useful piece arrived, or when the first was requested; `piece_bytes`
    is the size of the largest piece, 0 if unknown. For a prefetch (`is_prefetch`) no front is
    computed, because no request waits for it. `is_one_shot`: the context will hardly be continued.
    """

    ids: TokenIds
    num_known: int
    since_s: float
    is_prefetch: bool
    is_one_shot: bool = False
    num_front: int = 0
    num_planned: int = 0
    num_hurries: int = 0
    piece_bytes: int = 0
    is_opening: bool = False
    held: "deque[Piece]" = field(default_factory=deque)
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
    miss_reason: MissReason | None = None
    num_tokens: int = 0
    num_trusted: int = 0
    num_arrived: int = 0
    fingerprint: LogitFingerprint | None = None

    @property
    def is_over(self) -> bool:
        """Whether no further piece will be taken."""
        if self.is_given_up.is_set():
            return True
        return self.has_all.is_set() and self.pieces.empty() and not self.held

    def give_up(self) -> None:
        """End it and free the pieces already read: the request may keep this object for long."""
        self.is_given_up.set()
        self.held.clear()
        self.let_go()

    def let_go(self) -> None:
        """Drop delivered pieces that will not be taken."""
        with suppress(Empty):
            while True:
                self.pieces.get_nowait()

    # For the engine's thread

    def collect(self) -> None:
        """Move the pieces delivered since the last call to `held`."""
        if self.is_given_up.is_set():
            return
        with suppress(Empty):
            while True:
                self.held.append(self.pieces.get_nowait())

    # For the transfer thread

    def has_place(self) -> bool:
        """Acquire a place, with a short wait; false if none is free or the restore is given up."""
        return self.places.acquire(timeout=_PLACE_PATIENCE_S) and not self.is_given_up.is_set()

    def deliver(self, piece: Piece) -> None:
        """Deliver a piece that was read, in the place acquired last."""
        self.num_put += 1
        self.pieces.put(piece)
        if self.is_given_up.is_set():
            self.let_go()

    def let_engine_take(self) -> None:
        """Wait briefly for the engine to take a piece, if enough pieces are delivered.

        If that wait times out, as while a front is computed, there is no further wait until the
        engine has taken a piece.
        """
        self.has_taken.clear()
        num_taken = self.num_taken
        if self.num_put - num_taken < _PIECES_AHEAD or num_taken == self.num_awaited:
            return
        if not self.has_taken.wait(_TAKING_PATIENCE_S):
            self.num_awaited = num_taken


_log = logging.getLogger(__name__)

Image = bytes | bytearray | memoryview

_NEWS_PATIENCE_S = 0.02
# Tokens to compute when a piece is late; doubled each further time.
_HURRY_TOKENS = 64


class Restorer:
    """The restores of one manager. `clock` returns seconds; `note_kept` is called with a context
    and how many of its leading blocks the tier has.

    The engine's thread owns it.
    """

    def __init__(
        self,
        manager: CacheManager,
        transfer: TransferThread,
        planner: RestorePlanner,
        note_kept: Callable[[TokenIds, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._transfer = transfer
        self._planner = planner
        self._note_kept = note_kept
        self._clock = clock
        self._block_bytes = manager.block_size * TOKEN_BYTES
        self._image_bytes = manager.kv_pool.geometry.block_bytes
        self._news = Event()
        self.unverified: list[Restore] = []

    def begin(self, ids: TokenIds, is_prefetch: bool, is_one_shot: bool = False) -> Restore | None:
        """Start to restore the KV of a prompt that the device lacks; None if it lacks no full
        block.

        If no tier is asked, the result is already over and its `miss_reason` says why.
        """
        num_known = self._manager.num_reusable_tokens(ids[:-1])
        size = self._manager.block_size
        num_blocks = (len(ids) - 1 - num_known) // size
        if num_blocks < 1:
            return None
        start_block = self._manager.num_cached_tokens(ids[:-1]) // size
        if self._transfer.is_without_tier:
            return self._refused(ids, num_known, MissReason.NO_TIER)
        num_tokens = num_blocks * size
        num_bytes = (num_blocks + self._manager.num_state_blocks) * self._image_bytes
        if not self._planner.is_worth(num_tokens, num_bytes):
            self._planner.note_refused()
            return self._refused(ids, num_known, MissReason.SLOWER)
        restore = Restore(ids, num_known, self._clock(), is_prefetch, is_one_shot)
        self._transfer.restore(lambda tier: self._read(tier, restore, start_block))
        return restore

    def _refused(self, ids: TokenIds, num_known: int, miss_reason: MissReason) -> Restore:
        refused = Restore(ids, num_known, self._clock(), is_prefetch=True, miss_reason=miss_reason)
        refused.give_up()
        return refused

    def wait_for_news(self) -> None:
        """Wait briefly for the next delivery."""
        self._news.wait(_NEWS_PATIENCE_S)
        self._news.clear()

    def settle(self, restore: Restore) -> bool:
        """Copy delivered pieces to the device; return whether more may come.

        Gives up if there is no room. Pieces that arrive before the front is computed are held until
        then. If a piece is late, the front is extended, so that the engine computes meanwhile.
        """
        restore.collect()
        restore.num_front = max(restore.num_front, restore.num_planned)
        is_ready = self._has_front(restore)
        while is_ready and restore.held and not restore.is_given_up.is_set():
            self._take_next(restore)
            restore.collect()
        if self._transfer.is_without_tier:
            restore.give_up()
        elif is_ready and not restore.is_over and self._is_late(restore):
            self._hurry(restore)
        return not restore.is_over

    def _take_next(self, restore: Restore) -> None:
        piece = restore.held.popleft()
        restore.places.release()
        if self._take(restore, piece) < piece.num_blocks:
            restore.miss_reason = MissReason.NO_ROOM
            restore.give_up()
        restore.num_taken += 1
        del piece  # or the next read could not reuse its memory
        restore.has_taken.set()

    def _is_late(self, restore: Restore) -> bool:
        num_tokens = len(restore.ids) - restore.num_known
        is_opening = self._transfer.tier is None
        if restore.is_opening and not is_opening:  # reading starts only now
            restore.since_s = self._clock()
        restore.is_opening = is_opening
        patience_s = self._planner.patience_s(num_tokens, restore.piece_bytes, is_opening)
        if restore.is_prefetch:
            patience_s += self._planner.compute_s(num_tokens)
        return self._clock() > restore.since_s + patience_s

    def hand_over(self, restore: Restore) -> None:
        """A request claimed this prefetch: restart its deadline."""
        restore.is_prefetch = False
        restore.since_s = self._clock()

    def _hurry(self, restore: Restore) -> None:
        """Extend the front, by twice as much each time in a row.

        A prefetch gives up instead, and so does a context with recurrent state: its snapshot is of
        use only as a whole.
        """
        num_there = self._manager.num_cached_tokens(restore.ids[:-1])
        num_more = max(_HURRY_TOKENS << restore.num_hurries, self._manager.block_size)
        restore.num_hurries += 1
        num_front = (num_there + num_more) // self._manager.block_size * self._manager.block_size
        restore.miss_reason = MissReason.LATE
        is_whole = restore.is_prefetch or self._manager.has_state
        if is_whole or num_front >= len(restore.ids) - 1:
            restore.give_up()
        else:
            restore.num_front = num_front

    def _has_front(self, restore: Restore) -> bool:
        """Whether the front has been computed."""
        if not restore.num_front:
            return True
        return (
            self._manager.num_cached_tokens(restore.ids[: restore.num_front]) == restore.num_front
        )

    def _take(self, restore: Restore, piece: Piece) -> int:
        """Enter a piece in the device tier; return how many of its blocks are there now."""
        size = self._manager.block_size
        end = (piece.start_block + piece.num_blocks) * size
        if self._manager.num_cached_tokens(restore.ids[:end]) == end:
            return piece.num_blocks  # another request has computed it meanwhile
        try:
            num_adopted = self._manager.adopt(restore.ids, piece.start_block, piece.image)
        except Exception:  # mostly out of memory: the tokens are computed instead
            _log.exception("restored blocks could not be copied to the device")
            return 0
        if num_adopted:
            self._note_arrival(restore, piece, num_adopted)
        return num_adopted

    def _note_arrival(self, restore: Restore, piece: Piece, num_adopted: int) -> None:
        size = self._manager.block_size
        if restore.num_arrived <= restore.num_trusted:
            restore.num_trusted = piece.start_block * size
            self.unverified.append(restore)
        restore.num_arrived = (piece.start_block + num_adopted) * size
        restore.since_s, restore.num_hurries = self._clock(), 0
        restore.fingerprint = piece.fingerprint if num_adopted == piece.num_blocks else None
        restore.num_tokens += num_adopted * size
        self._note_kept(restore.ids, piece.start_block + num_adopted)

    # Verifying

    def take_unverified(self, of_all: bool) -> list[RestoredContext]:
        """Return restored contexts to verify: those of finished restores, or of all if `of_all`.

        Each is returned once; after that its tokens count as verified.
        """
        due = [restore for restore in self.unverified if of_all or restore.is_over]
        self.unverified = [restore for restore in self.unverified if restore not in due]
        return [self._restored_context(restore) for restore in due]

    @property
    def has_unverified(self) -> bool:
        """Whether a finished restore is not verified yet."""
        return any(restore.is_over for restore in self.unverified)

    def _restored_context(self, restore: Restore) -> RestoredContext:
        ids = list(restore.ids[: restore.num_arrived])
        restored = RestoredContext(ids, restore.num_trusted, restore.fingerprint)
        restore.num_trusted = restore.num_arrived
        return restored

    # On the transfer thread

    def _read(self, tier: Tier, restore: Restore, start_block: int) -> None:
        """Find a prompt's packs, and read them, or those after a front to be computed."""
        if restore.is_given_up.is_set():
            return
        encoded = encode_ids(restore.ids[:-1])
        wanted: deque[Found] = deque()
        try:
            keys = chain_keys(tier.root, encoded, self._block_bytes)
            runs = tier.find(keys, encoded, restore.is_one_shot)
            num_found = sum(found.num_blocks for found in runs)
            if num_found < len(keys):
                restore.miss_reason = tier.why(keys[num_found], encoded, num_found)
            if self._manager.has_state:
                runs = self._with_snapshot(tier, restore, keys[:num_found])
                num_restored = len(restore.ids) // self._manager.block_size
                start_block = min(start_block, num_restored - self._manager.num_state_blocks)
            start_block = self._planned_start(restore, runs, start_block)
            wanted.extend(run for run in runs if run.start_block + run.num_blocks > start_block)
        finally:
            self._read_on(tier, restore, wanted, start_block)

    def _with_snapshot(self, tier: Tier, restore: Restore, keys: list[bytes]) -> list[Found]:
        """Change the context to restore to the longest one with a snapshot of recurrent state.

        `keys` are those of the prompt's blocks that the tier has. Returns its packs; none if there
        is no whole snapshot after what the device can use.
        """
        size = self._manager.block_size
        num_known = restore.num_known
        for num_blocks in range(len(keys), num_known // size, -1):
            ids = self._manager.with_state(restore.ids, num_blocks * size)
            encoded = encode_ids(ids[num_blocks * size :])
            state_keys = chain_keys(keys[num_blocks - 1], encoded, self._block_bytes)
            if not tier.find(state_keys[:1], encoded[: self._block_bytes], restore.is_one_shot):
                continue
            all_keys = [*keys[:num_blocks], *state_keys]
            runs = tier.find(all_keys, encode_ids(ids), restore.is_one_shot)
            if sum(run.num_blocks for run in runs) == len(all_keys):
                restore.ids = [*ids, NO_TOKEN]
                return runs
        return []

    def _read_on(
        self, tier: Tier, restore: Restore, wanted: deque[Found], start_block: int
    ) -> None:
        """Read packs one after another, while there are places for them.

        Without a place the job is queued again behind the others: the engine may need one of their
        copies before it can take a piece.
        """
        has_place = True
        try:
            while wanted and (has_place := restore.has_place()):
                self._read_pack(tier, restore, wanted.popleft(), start_block)
        except DamagedRecord as damage:  # the tier counts it; the blocks after it are computed
            restore.miss_reason = _miss_reason_of(damage)
        finally:
            if has_place or restore.is_given_up.is_set():
                restore.has_all.set()
                self._news.set()
            else:
                self._transfer.restore(
                    lambda tier: self._read_on(tier, restore, wanted, start_block)
                )

    def _read_pack(self, tier: Tier, restore: Restore, found: Found, start_block: int) -> None:
        end_block = found.start_block + found.num_blocks
        if end_block * self._manager.block_size <= restore.num_front:
            restore.places.release()  # it is being computed
            return
        restore.let_engine_take()
        start_s = self._clock()
        image = tier.read(found)
        self._planner.note_read(len(image), self._clock() - start_s)
        restore.deliver(self._piece(found, image, start_block))
        self._news.set()

    def _planned_start(self, restore: Restore, runs: Sequence[Found], start_block: int) -> int:
        """Return the first block to read, and set `num_planned` if a front is to be computed."""
        wanted = [found for found in runs if found.start_block + found.num_blocks > start_block]
        if not wanted:
            return start_block
        restore.piece_bytes = max(found.num_blocks for found in wanted) * self._image_bytes
        if restore.is_prefetch or self._manager.has_state:
            return start_block
        size = self._manager.block_size
        first = self._planner.first_worth(
            [
                (
                    (found.start_block + found.num_blocks - max(found.start_block, start_block))
                    * size,
                    found.num_blocks * self._image_bytes,
                )
                for found in wanted
            ]
        )
        if first:
            restore.miss_reason = MissReason.SLOWER
        if first == len(wanted):
            return wanted[-1].start_block + wanted[-1].num_blocks
        if first:
            start_block = wanted[first].start_block
            restore.num_planned = start_block * size
        return start_block

    def _piece(self, found: Found, image: Image, start_block: int) -> Piece:
        """Make a piece of an image, without the blocks before `start_block`."""
        num_known = max(0, start_block - found.start_block)
        rest = memoryview(image)[num_known * self._image_bytes :]
        writable = bytearray(rest) if rest.readonly else rest
        first = found.start_block + num_known
        return Piece(first, found.num_blocks - num_known, writable, found.fingerprint)


def _miss_reason_of(damage: DamagedRecord) -> MissReason:
    """Return the miss reason for a record that could not be read."""
    told = {GoneRecord: MissReason.EVICTED, HeldRecord: MissReason.LATE}
    return told.get(type(damage), MissReason.CORRUPT)
