"""WriteBehind: writes the blocks that a slower tier lacks, on the transfer thread.

The engine's thread decides and exports images; the transfer thread writes them. After a refused
write, the waiting time before the next offer doubles, and only one pack is offered.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.breaker import rest_s
from kvchat.cache.device_copies import PACK_BYTES, Images
from kvchat.cache.keys import TOKEN_BYTES, KeyMemo, encode_ids
from kvchat.cache.state_manager import num_state_blocks_of
from kvchat.cache.tier import LogitFingerprint, PackHead, Tier
from kvchat.cache.transfer import TransferThread
from kvchat.core.types import TokenIds

_log = logging.getLogger(__name__)

# Contexts in the backlog; a chat has one or two.
_MAX_BACKLOG = 16
# The most blocks remembered as stored: about 16 MiB of keys.
_MOST_STORED = 1 << 17


@dataclass(frozen=True, slots=True)
class _Offer:
    """A context to write; `fingerprint` is that of its last block's last token.

    `is_one_shot`: the context will hardly be continued.
    """

    ids: TokenIds
    fingerprint: LogitFingerprint | None = None
    is_one_shot: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a write: how many blocks of the context the tier has, and whether it refused.

    `lost` is the offer if the tier no longer has the blocks before it.
    """

    keys: list[bytes]
    num_there: int
    is_refused: bool
    at_s: float
    lost: _Offer | None


class WriteBehind:
    """Writes the full blocks of one manager's contexts to one tier. `clock` returns seconds.

    The engine's thread owns it. A failure never affects an answer; later prompts may have to
    compute what was not written.
    """

    def __init__(
        self,
        manager: CacheManager,
        transfer: TransferThread,
        memo: KeyMemo,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._transfer = transfer
        self._clock = clock
        self._image_bytes = manager.kv_pool.geometry.block_bytes
        self._block_bytes = manager.block_size * TOKEN_BYTES
        self._blocks_a_pack = max(1, PACK_BYTES // self._image_bytes)
        self.pack_tokens = self._blocks_a_pack * manager.block_size
        self._memo = memo
        self._stored: set[bytes] = set()
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._num_writing = 0
        self._num_refusals = 0
        self._rests_until_s = 0.0
        # Contexts to offer again, the oldest first.
        self._backlog: deque[_Offer] = deque(maxlen=_MAX_BACKLOG)

    @property
    def has_backlog(self) -> bool:
        """Whether a context is to be offered again: there was no room for it, or the tier no longer
        had its leading blocks.
        """
        self._take_outcomes()
        return bool(self._backlog) and not self._transfer.is_without_tier

    @property
    def awaits_outcome(self) -> bool:
        """Whether the result of a queued write is still unknown."""
        self._take_outcomes()
        return self._num_writing > 0 and not self._transfer.is_without_tier

    def note_stored(self, ids: TokenIds, num_blocks: int) -> None:
        """Note that the tier has the first `num_blocks` blocks of a context."""
        size = self._manager.block_size
        keys = self._memo.local(encode_ids(ids[: num_blocks * size]))
        self._remember(keys, keys)

    def _remember(self, keys: list[bytes], context: list[bytes]) -> None:
        """Remember that the tier has blocks of a context. Above the limit, other contexts are
        dropped: they are offered again, and blocks that the tier has are not written again.
        """
        if len(self._stored) + len(keys) > _MOST_STORED:
            self._stored.intersection_update(context)
        self._stored.update(keys)

    def note_gone(self, ids: TokenIds) -> None:
        """Note that the tier has lost a context."""
        self._stored.difference_update(self._memo.local(encode_ids(ids)))

    def lacks(self, ids: TokenIds) -> bool:
        """Whether the tier may lack full blocks of a context, and may be offered them now.

        If it may not, because of an earlier refusal, the tier is told (`Tier.note_declined`).
        """
        self._take_outcomes()
        if self._transfer.is_without_tier or not self._lacks_some(encode_ids(ids)):
            return False
        if not self._may_offer():
            self._decline(encode_ids(ids))
            return False
        return True

    def _lacks_some(self, encoded: bytes) -> bool:
        return any(key not in self._stored for key in self._memo.local(encoded))

    def save(
        self, ids: TokenIds, fingerprint: LogitFingerprint | None = None, is_one_shot: bool = False
    ) -> None:
        """Write the full blocks of a context that the tier lacks.

        `fingerprint` is that of the last block's last token; `is_one_shot`: the context will hardly
        be continued.
        """
        self._offer(_Offer(ids, fingerprint, is_one_shot), whole_packs=False)

    def go_on(self, timeout_s: float) -> None:
        """Offer the oldest context of the backlog; wait up to `timeout_s` for room."""
        pack_bytes = self._waiting_bytes(self._blocks_a_pack)
        if self.has_backlog and self._transfer.has_room(pack_bytes, timeout_s):
            self._offer(self._backlog.popleft(), whole_packs=False)

    def save_packs(self, ids: TokenIds, is_one_shot: bool = False) -> None:
        """Write only whole packs: for a context that is still growing."""
        self._offer(_Offer(ids, is_one_shot=is_one_shot), whole_packs=True)

    def _offer(self, offer: _Offer, whole_packs: bool) -> None:
        try:
            self._take_outcomes()
            if self._transfer.is_without_tier:
                return
            if self._may_offer():
                self._offer_packs(offer, whole_packs)
            elif not whole_packs and self._lacks_some(encode_ids(offer.ids)):
                self._decline(encode_ids(offer.ids))
        except Exception:
            _log.exception("a context could not be saved")

    def _offer_packs(self, offer: _Offer, whole_packs: bool) -> None:
        keys = self._memo.local(encode_ids(offer.ids))
        start = next((n for n, key in enumerate(keys) if key not in self._stored), len(keys))
        for first, last in self._packs(offer.ids, start, len(keys)):
            is_short = last - first < self._blocks_a_pack
            if is_short and whole_packs:
                return
            own = offer if last == len(keys) else replace(offer, fingerprint=None)
            if not self._transfer.has_room(self._waiting_bytes(last - first), 0.0):
                if not whole_packs:
                    self._backlog.append(offer)
                return
            if not self._offer_pack(own, first, keys[:last]):
                return
            if self._num_refusals:
                return  # one pack, to test whether the tier accepts writes again

    def _packs(self, ids: TokenIds, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where the packs of blocks `start` to `end - 1` of a context begin and end.

        A snapshot of recurrent state is looked up by its first block, so that one begins a pack.
        """
        if start == end:
            return
        snapshot = end - num_state_blocks_of(ids[end * self._manager.block_size - 1])
        for part, part_end in ((start, snapshot), (max(start, snapshot), end)):
            for first in range(part, part_end, self._blocks_a_pack):
                yield first, min(first + self._blocks_a_pack, part_end)

    def _waiting_bytes(self, num_blocks: int) -> int:
        """Return the memory that a pack of so many blocks takes until it is written."""
        return self._manager.kv_pool.export_bytes(num_blocks)

    def _decline(self, encoded: bytes) -> None:
        """Tell the tier about a context that is not offered after a refusal; needs no image."""
        num_blocks = len(encoded) // self._block_bytes
        whole = encoded[: num_blocks * self._block_bytes]
        self._transfer.save(
            lambda tier: tier.note_declined(self._memo.keys_of(tier.root, whole), whole), 0
        )

    def _offer_pack(self, offer: _Offer, first: int, keys: list[bytes]) -> bool:
        images = self._manager.export(offer.ids, first, len(keys))
        if images is None:
            return False
        own = replace(offer, ids=offer.ids[: len(keys) * self._manager.block_size])
        if not self._transfer.save(
            lambda tier: self._write_images(tier, own, first, images, keys),
            self._waiting_bytes(len(keys) - first),
        ):
            images.release()
            return False
        self._remember(keys[first:], keys)
        self._num_writing += 1
        return True

    # Results of writes

    def _may_offer(self) -> bool:
        """Whether a pack may be offered. After a refusal: only after the waiting time, and only if
        no other write is under way.
        """
        if not self._num_refusals:
            return True
        return not self._num_writing and self._clock() >= self._rests_until_s

    def _take_outcomes(self) -> None:
        """Process the results of writes; blocks that the tier lacks can be offered again."""
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except Empty:
                return
            self._num_writing -= 1
            self._stored.difference_update(outcome.keys[outcome.num_there :])
            if outcome.lost is not None:
                self._offer_again(outcome.lost)
            if outcome.is_refused:
                self._num_refusals += 1
                self._rests_until_s = outcome.at_s + rest_s(self._num_refusals)
            elif outcome.num_there == len(outcome.keys):
                self._num_refusals = 0

    def _offer_again(self, offer: _Offer) -> None:
        """Add an offer to the backlog, in place of a shorter one of the same context."""
        if self._backlog and self._backlog[-1].ids == offer.ids[: len(self._backlog[-1].ids)]:
            self._backlog.pop()
        self._backlog.append(offer)

    # On the transfer thread

    def _write_images(
        self, tier: Tier, offer: _Offer, first: int, images: Images, keys: list[bytes]
    ) -> None:
        try:
            self._write(tier, offer, first, images.read(), keys)
        finally:
            images.release()

    def _write(
        self, tier: Tier, offer: _Offer, first: int, image: memoryview, keys: list[bytes]
    ) -> None:
        """Write the blocks that no other process has written meanwhile.

        A pack whose parent blocks are missing could never be found, so it is not written.
        """
        num_there, is_written, encoded = 0, False, encode_ids(offer.ids)
        try:
            tier_keys = self._memo.keys_of(tier.root, encoded)
            found = tier.find(tier_keys, encoded, offer.is_one_shot)
            num_there = sum(run.num_blocks for run in found)
            is_wanted = first <= num_there < len(keys)
            if is_wanted:
                parent = tier_keys[num_there - 1] if num_there else tier.root
                rest = encoded[num_there * self._block_bytes :]
                head = PackHead(parent, rest, fingerprint=offer.fingerprint)
                missing = image[(num_there - first) * self._image_bytes :]
                is_written = tier.write(head, missing, offer.is_one_shot)
        finally:
            is_refused = not is_written and first <= num_there < len(keys)
            lost = offer if num_there < first else None
            num_there = len(keys) if is_written else num_there
            self._outcomes.put(_Outcome(keys, num_there, is_refused, self._clock(), lost))
