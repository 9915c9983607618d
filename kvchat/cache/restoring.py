"""Restoring: prompts whose KV lies on a slower tier, on its way up.

The transfer thread reads packs, the engine's thread takes them into the device tier. What came up
is to be proven by a forward pass before anybody relies on it. Knows token ids, blocks and images;
knows no request and no model.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event

from kvchat.cache.block_key import chain_keys
from kvchat.cache.codec import DamagedRecord, GoneRecord, HeldRecord
from kvchat.cache.manager import CacheManager
from kvchat.cache.planner import RestorePlanner
from kvchat.cache.radix_node import TOKEN_BYTES, pack
from kvchat.cache.restore import Piece, Proof, Restore
from kvchat.cache.tier import Found, Tier
from kvchat.cache.transfer import TransferThread
from kvchat.core.types import Lack, TokenIds

_log = logging.getLogger(__name__)

Image = bytes | bytearray | memoryview

_NEWS_PATIENCE_S = 0.02
# What is computed at first while something is late; twice as much each time after.
_HURRY_TOKENS = 64


class Restoring:
    """The restores of one manager. `clock` returns seconds; `note_kept` hears what a tier has.

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
        self._unproven: list[Restore] = []

    def begin(self, ids: TokenIds, is_foreseen: bool, is_one_shot: bool = False) -> Restore | None:
        """Ask for the KV of a prompt that the device has not; None where it has all full blocks.

        One that is over already says why nobody was asked.
        """
        num_known = self._manager.measure(ids[:-1])
        size = self._manager.block_size
        num_blocks = (len(ids) - 1 - num_known) // size
        if num_blocks < 1:
            return None
        if self._transfer.is_without_tier:
            return self._refused(ids, num_known, Lack.NO_TIER)
        num_tokens, num_bytes = num_blocks * size, num_blocks * self._image_bytes
        if not self._planner.is_worth(num_tokens, num_bytes):
            self._planner.note_refused()
            return self._refused(ids, num_known, Lack.SLOWER)
        restore = Restore(ids, num_known, self._clock(), is_foreseen, is_one_shot)
        self._transfer.restore(lambda tier: self._read(tier, restore, num_known // size))
        return restore

    def _refused(self, ids: TokenIds, num_known: int, lack: Lack) -> Restore:
        refused = Restore(ids, num_known, self._clock(), is_foreseen=True, lack=lack)
        refused.give_up()
        return refused

    def wait_for_news(self) -> None:
        """Wait for the next delivery, for a moment at most."""
        self._news.wait(_NEWS_PATIENCE_S)
        self._news.clear()

    def settle(self, restore: Restore) -> bool:
        """Take what has come of a restore onto the device; whether more may come.

        Gives up where there is no room for more. What comes up before its front is computed is held
        until then; what is late has its front extended, so that computing goes on meanwhile.
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
            restore.lack = Lack.NO_ROOM
            restore.give_up()
        restore.num_taken += 1
        del piece  # or its memory would not be free for the next one
        restore.has_taken.set()

    def _is_late(self, restore: Restore) -> bool:
        num_tokens = len(restore.ids) - restore.num_known
        is_opening = self._transfer.tier is None
        if restore.is_opening and not is_opening:  # the first is asked for only now
            restore.since_s = self._clock()
        restore.is_opening = is_opening
        patience_s = self._planner.patience_s(num_tokens, restore.piece_bytes, is_opening)
        if restore.is_foreseen:
            patience_s += self._planner.compute_s(num_tokens)
        return self._clock() > restore.since_s + patience_s

    def hand_over(self, restore: Restore) -> None:
        """Somebody has asked for what was only foreseen, and waits for it."""
        restore.is_foreseen = False
        restore.since_s = self._clock()

    def _hurry(self, restore: Restore) -> None:
        """Have the next tokens computed while waiting on; the more, the longer nothing comes."""
        num_there = self._manager.measure(restore.ids[:-1])
        num_more = max(_HURRY_TOKENS << restore.num_hurries, self._manager.block_size)
        restore.num_hurries += 1
        num_front = (num_there + num_more) // self._manager.block_size * self._manager.block_size
        restore.lack = Lack.LATE
        if restore.is_foreseen or num_front >= len(restore.ids) - 1:
            restore.give_up()
        else:
            restore.num_front = num_front

    def _has_front(self, restore: Restore) -> bool:
        """Whether all that is to be computed before what comes up is there."""
        if not restore.num_front:
            return True
        return self._manager.measure(restore.ids[: restore.num_front]) == restore.num_front

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
        if num_adopted:
            self._note_arrival(restore, piece, num_adopted)
        return num_adopted

    def _note_arrival(self, restore: Restore, piece: Piece, num_adopted: int) -> None:
        size = self._manager.block_size
        if restore.num_arrived <= restore.num_trusted:
            restore.num_trusted = piece.start_block * size
            self._unproven.append(restore)
        restore.num_arrived = (piece.start_block + num_adopted) * size
        restore.since_s, restore.num_hurries = self._clock(), 0
        restore.canary = piece.canary if num_adopted == piece.num_blocks else None
        restore.num_tokens += num_adopted * size
        self._note_kept(restore.ids, piece.start_block + num_adopted)

    # Proving

    def proofs(self, of_all: bool) -> list[Proof]:
        """Return what has come up and is to be proven now: by whole restores, unless `of_all`.

        Each is returned once; from then on it is taken to be proven.
        """
        due = [restore for restore in self._unproven if of_all or restore.is_over]
        self._unproven = [restore for restore in self._unproven if restore not in due]
        return [self._proof(restore) for restore in due]

    @property
    def has_proofs(self) -> bool:
        """Whether something that came up whole is to be proven."""
        return any(restore.is_over for restore in self._unproven)

    def _proof(self, restore: Restore) -> Proof:
        ids = list(restore.ids[: restore.num_arrived])
        proof = Proof(ids, restore.num_trusted, restore.canary)
        restore.num_trusted = restore.num_arrived
        return proof

    # On the transfer thread

    def _read(self, tier: Tier, restore: Restore, start_block: int) -> None:
        """Find a prompt's packs, and read them, or those behind a front to be computed."""
        if restore.is_given_up.is_set():
            return
        packed = pack(restore.ids[:-1])
        wanted: deque[Found] = deque()
        try:
            keys = chain_keys(tier.root, packed, self._block_bytes)
            runs = tier.find(keys, packed, restore.is_one_shot)
            num_found = sum(found.num_blocks for found in runs)
            if num_found < len(keys):
                restore.lack = tier.why(keys[num_found], packed, num_found)
            start_block = self._planned_start(restore, runs, start_block)
            wanted.extend(run for run in runs if run.start_block + run.num_blocks > start_block)
        finally:
            self._read_on(tier, restore, wanted, start_block)

    def _read_on(
        self, tier: Tier, restore: Restore, wanted: deque[Found], start_block: int
    ) -> None:
        """Read packs one after another, as long as there are places for them.

        Then all others have a turn first: what they copy may be what keeps the engine from taking
        any.
        """
        has_place = True
        try:
            while wanted and (has_place := restore.has_place()):
                self._read_pack(tier, restore, wanted.popleft(), start_block)
        except DamagedRecord as damage:  # the tier counts it; what lies behind it is computed
            restore.lack = _lack_of(damage)
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
        """Return the block to read from, and let the engine know of a front to be computed."""
        wanted = [found for found in runs if found.start_block + found.num_blocks > start_block]
        if not wanted:
            return start_block
        restore.piece_bytes = max(found.num_blocks for found in wanted) * self._image_bytes
        if restore.is_foreseen:
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
            restore.lack = Lack.SLOWER
        if first == len(wanted):
            return wanted[-1].start_block + wanted[-1].num_blocks
        if first:
            start_block = wanted[first].start_block
            restore.num_planned = start_block * size
        return start_block

    def _piece(self, found: Found, image: Image, start_block: int) -> Piece:
        """Cut off what the device had already when it asked."""
        num_known = max(0, start_block - found.start_block)
        rest = memoryview(image)[num_known * self._image_bytes :]
        writable = bytearray(rest) if rest.readonly else rest
        first = found.start_block + num_known
        return Piece(first, found.num_blocks - num_known, writable, found.canary)


def _lack_of(damage: DamagedRecord) -> Lack:
    """Return what a record that could not be read is told as."""
    told = {GoneRecord: Lack.EVICTED, HeldRecord: Lack.LATE}
    return told.get(type(damage), Lack.CORRUPT)
