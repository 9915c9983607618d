"""Arrivals: KV of prompts that comes from slower tiers, from one tier of the chain after another.

An Arrival is one prompt's. The first tier that has more of the prompt than the device delivers it
piece by piece through a Feed (`feed.py`); then the next tier is asked for the rest. KV that was out
of this process is returned by `take_unverified`, to be verified by a forward pass.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.feed import QUICK_PIECES_AHEAD, Feed, FeedReader, Piece
from kvchat.cache.keys import NO_TOKEN, KeyMemo
from kvchat.cache.link import Link
from kvchat.cache.planner import Planner
from kvchat.cache.tier import LogitFingerprint
from kvchat.core.types import CachedTokens, MissReason, TokenIds


@dataclass(slots=True, eq=False)
class Arrival:
    """One prompt's KV on its way to the device. The engine's thread owns it.

    # [0, num_known)                on the device at the start
    # [num_known, num_front)        to be computed, if missing, while the rest is read; `num_front`
    #                               is 0 if it is quicker to wait
    # [num_trusted, num_arrived)    tokens of `arrived_ids` that arrived and are not verified yet;
    #                               `fingerprint` is that of the last

    `tokens` counts what has arrived, by the name of the tier. The tier asked now is number `stage`
    of the chain and delivers through `feed`; `waiting` are pieces delivered before the front was
    computed. `table` locks what a quick tier has delivered. `since_s` is when the last useful piece
    arrived, or when the tier was asked at `asked_s`.

    `give_up` ends it; blocks already on the device stay. `miss_reason` says why no more arrived.
    Another machine that computes may be sent the first `num_sendable` tokens.
    For a prefetch (`is_prefetch`) no front is computed, because no request waits for it.
    `is_one_shot`: the context will hardly be continued. Only quick tiers are asked if
    `is_quick_only`.
    """

    ids: TokenIds
    num_known: int
    is_prefetch: bool = False
    is_one_shot: bool = False
    is_quick_only: bool = False
    num_sendable: int = 0
    stage: int = -1
    feed: Feed | None = None
    waiting: "deque[Piece]" = field(default_factory=deque)
    table: BlockTable | None = None
    since_s: float = 0.0
    asked_s: float = 0.0
    is_opening: bool = False
    num_front: int = 0
    num_hurries: int = 0
    miss_reason: MissReason | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    arrived_ids: TokenIds = ()
    num_trusted: int = 0
    num_arrived: int = 0
    fingerprint: LogitFingerprint | None = None
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that have arrived."""
        return sum(self.tokens.values())

    @property
    def last_tier(self) -> str:
        """The name of the tier that has delivered last; `device` where none has."""
        return next(reversed(self.tokens), "device")

    def give_up(self) -> None:
        """End it and free the pieces already read: the request may keep this object for long."""
        self.is_over = True
        self.waiting.clear()
        if self.feed is not None:
            self.feed.give_up()

    def cached(self, cached_len: int) -> CachedTokens:
        """Split the cached tokens that a request starts with by the tiers they came from.

        Their order in the prompt is that of the chain. The last may have been evicted since.
        """
        left, parts = max(0, cached_len - self.num_known), {}
        for name, count in self.tokens.items():
            parts[name] = min(count, left)
            left -= parts[name]
        return CachedTokens(device=cached_len - sum(parts.values())).plus(parts)


@dataclass(frozen=True, slots=True, eq=False)
class RestoredContext:
    """A context restored from its token `num_trusted` on, to be verified.

    To verify it, compute its last token again and compare the KV, and the logits with the
    fingerprint if there is one.
    """

    ids: list[int]
    num_trusted: int
    fingerprint: LogitFingerprint | None


_log = logging.getLogger(__name__)

_NEWS_PATIENCE_S = 0.02
# Tokens to compute when a piece is late; doubled each further time.
_HURRY_TOKENS = 64


class Arrivals:
    """The arrivals of one manager, from the tiers of `links`. `clock` returns seconds.

    The engine's thread owns it.
    """

    def __init__(
        self,
        manager: CacheManager,
        links: Sequence[Link],
        planner: Planner,
        memo: KeyMemo,
        clock: Callable[[], float],
    ) -> None:
        self.live: list[Arrival] = []
        self.unverified: list[Arrival] = []
        self._manager = manager
        self._links = links
        self._planner = planner
        self._clock = clock
        self._image_bytes = manager.kv_pool.geometry.block_bytes
        self._reader = FeedReader(manager, planner, memo, clock)

    # Beginning

    def begin(
        self,
        ids: TokenIds,
        is_prefetch: bool = False,
        is_one_shot: bool = False,
        num_sendable: int = 0,
    ) -> Arrival | None:
        """Start to fetch the KV of a prompt that the device lacks; None if it lacks no full block.

        If no tier is worth asking, the result is already over and its `miss_reason` says why.
        """
        num_known = self._manager.num_reusable_tokens(ids[:-1])
        if len(ids) - 1 - num_known < self._manager.block_size:
            return None
        arrival = Arrival(ids, num_known, is_prefetch, is_one_shot, num_sendable=num_sendable)
        return self._begin(arrival)

    def begin_quick(self, ids: TokenIds, earlier: Arrival | None) -> Arrival | None:
        """Start to fetch what quick tiers have of a prompt; None if they have nothing.

        Tokens that an `earlier` arrival has brought for the same prompt still count.
        """
        arrival = Arrival(ids, self._manager.num_reusable_tokens(ids[:-1]), is_quick_only=True)
        if earlier is not None:
            arrival.num_known, arrival.tokens = earlier.num_known, dict(earlier.tokens)
            arrival.miss_reason = earlier.miss_reason
        return None if self._begin(arrival).is_over else arrival

    def _begin(self, arrival: Arrival) -> Arrival:
        self._ask_next(arrival)
        if not arrival.is_over:
            self.live.append(arrival)
        return arrival

    def hand_over(self, arrival: Arrival, num_sendable: int = 0) -> None:
        """A request claimed this prefetch: restart its deadline."""
        arrival.is_prefetch, arrival.num_sendable = False, num_sendable
        arrival.since_s = arrival.asked_s = self._clock()

    def _ask_next(self, arrival: Arrival) -> None:
        """Ask the next tier of the chain that may have more; end the arrival if there is none."""
        arrival.feed, arrival.waiting = None, deque()
        for stage in range(arrival.stage + 1, len(self._links)):
            link = self._links[stage]
            if arrival.is_quick_only and not link.is_quick:
                continue
            num_known = self._manager.num_reusable_tokens(arrival.ids[:-1])
            if len(arrival.ids) - 1 - num_known < self._manager.block_size:
                arrival.is_over = True
                return
            ids = arrival.ids[: arrival.num_sendable + 1] if link.computes else arrival.ids
            if len(ids) - 1 - num_known < self._manager.block_size:
                continue
            feed = Feed(ids, num_known, arrival.is_prefetch, arrival.is_one_shot)
            ask = self._ask_quick if link.is_quick else self._ask
            if ask(arrival, link, feed):
                arrival.stage, arrival.feed, arrival.num_hurries = stage, feed, 0
                arrival.since_s = arrival.asked_s = self._clock()
                return
        arrival.is_over = True
        if all(link.is_quick for link in self._links):
            arrival.miss_reason = arrival.miss_reason or MissReason.NO_TIER

    def _ask(self, arrival: Arrival, link: Link, feed: Feed) -> bool:
        """Have a tier's thread find and read; false if that is not worth it."""
        size = self._manager.block_size
        if link.thread.is_without_tier:
            arrival.miss_reason = arrival.miss_reason or MissReason.NO_TIER
            return False
        num_blocks = (len(feed.ids) - 1 - feed.num_known) // size
        num_bytes = (num_blocks + self._manager.num_state_blocks) * self._image_bytes
        num_tokens, latency_s = num_blocks * size, link.latency_s
        if link.computes:
            return self._send(link, feed, num_tokens, num_bytes)
        if latency_s and not self._planner.is_worth_asking(latency_s, num_tokens, feed.num_known):
            return False
        if not self._planner.is_worth_reading(
            link.read_rate, num_tokens, num_bytes, feed.num_known, latency_s
        ):
            arrival.miss_reason = arrival.miss_reason or MissReason.SLOWER
            return False
        if link.is_shared and link.tier is None:  # nothing says yet how far away it is
            feed.expected_s = self._clock() + latency_s
        start_block = self._manager.num_cached_tokens(feed.ids[:-1]) // size
        link.thread.restore(lambda tier: self._reader.read(link, tier, feed, start_block))
        return True

    def _send(self, link: Link, feed: Feed, num_tokens: int, num_bytes: int) -> bool:
        """Have another machine compute a prompt; false if that is not worth it."""
        wait_s = link.wait_s(num_tokens)
        if not self._planner.is_worth_sending(
            link.read_rate, num_tokens, num_bytes, feed.num_known, wait_s
        ):
            return False
        feed.expected_s = self._clock() + wait_s
        start_block = feed.num_known // self._manager.block_size
        link.thread.restore(lambda tier: self._reader.read(link, tier, feed, start_block))
        return True

    def _ask_quick(self, arrival: Arrival, link: Link, feed: Feed) -> bool:
        """Find at once, and have the tier's thread copy; false if there is nothing worth it."""
        tier, size = link.tier, self._manager.block_size
        assert tier is not None
        start_block = self._manager.num_cached_tokens(feed.ids[:-1]) // size
        runs = self._reader.find(tier, feed, start_block)
        num_blocks = sum(run.num_blocks for run in runs)
        if not num_blocks or not self._planner.is_worth_copying(
            [link.read_rate], num_blocks * size, num_blocks * self._image_bytes
        ):
            return False
        start_block, feed.num_ahead = runs[0].start_block, QUICK_PIECES_AHEAD
        self._lock(arrival, feed.ids, start_block * size)
        wanted = deque(runs)
        link.thread.restore(
            lambda tier: self._reader.read_on(link, tier, feed, wanted, start_block)
        )
        return True

    def _lock(self, arrival: Arrival, ids: TokenIds, num_tokens: int) -> None:
        """Lock the first tokens of a context until the arrival ends."""
        table = self._manager.match([*ids[:num_tokens], NO_TOKEN])
        self._unlock(arrival)
        arrival.table = table

    def _unlock(self, arrival: Arrival) -> None:
        if (table := arrival.table) is not None:
            arrival.table = None
            self._manager.release(table, [])

    # Settling

    def wait_for_news(self) -> None:
        """Wait briefly for the next delivery."""
        self._reader.news.wait(_NEWS_PATIENCE_S)
        self._reader.news.clear()

    def settle(self) -> None:
        """Copy all that was delivered to the device, and ask the next tiers for the rest."""
        for arrival in list(self.live):
            self.settle_one(arrival)

    def settle_one(self, arrival: Arrival) -> bool:
        """Settle one arrival; return whether more may come.

        It gives up if there is no room. Pieces that are delivered before the front is computed wait
        for that. If a piece is late, the front is extended, so that the engine computes meanwhile.
        """
        while not arrival.is_over and self._has_ended(arrival):
            self._note_reason(arrival)
            self._unlock(arrival)
            self._ask_next(arrival)
        if arrival.is_over:
            self._unlock(arrival)
            if arrival in self.live:
                self.live.remove(arrival)
                self._interrupt(arrival)
                if self._planner.has_memory:
                    self._links[arrival.stage].thread.copy(self._planner.keep)
        return not arrival.is_over

    def _interrupt(self, arrival: Arrival) -> None:
        """Tell a machine that still computes for an arrival that this is of no use any more."""
        link, feed = self._links[arrival.stage], arrival.feed
        if link.computes and link.tier is not None and feed and not feed.has_all.is_set():
            link.tier.interrupt()

    def _has_ended(self, arrival: Arrival) -> bool:
        """Take what the present feed has delivered; return whether it delivers no more."""
        feed, link = arrival.feed, self._links[arrival.stage]
        assert feed is not None
        self._collect(arrival, feed)
        arrival.num_front = feed.num_front = max(arrival.num_front, feed.num_planned)
        is_ready = self._has_front(arrival)
        while is_ready and arrival.waiting and not arrival.is_over:
            self._take_next(arrival, feed, link)
            self._collect(arrival, feed)
        if arrival.is_over:
            return False
        has_all = feed.has_all.is_set() and feed.pieces.empty() and not arrival.waiting
        if has_all or link.thread.is_without_tier:
            return True
        if link.is_quick:
            num_tokens = len(feed.ids) - feed.num_known
            is_late = self._clock() > arrival.asked_s + self._planner.quick_patience_s(num_tokens)
            if is_late:
                feed.give_up()
            return is_late
        if is_ready and feed.expected_s and not (feed.is_found or arrival.is_prefetch):
            self._compute_meanwhile(arrival, feed)
        elif is_ready and self._is_late(arrival, feed, link):
            self._hurry(arrival, feed)
        return False

    def _collect(self, arrival: Arrival, feed: Feed) -> None:
        with suppress(Empty):
            while True:
                arrival.waiting.append(feed.pieces.get_nowait())

    def _note_reason(self, arrival: Arrival) -> None:
        """Keep the reason of the tier that had most; the first of those that had nothing more."""
        feed, link = arrival.feed, self._links[arrival.stage]
        assert feed is not None
        if link.is_quick:
            return
        if link.thread.is_without_tier:
            feed.miss_reason = MissReason.NO_TIER
        if feed.num_taken or feed.miss_reason is None or arrival.miss_reason is None:
            arrival.miss_reason = feed.miss_reason

    def _take_next(self, arrival: Arrival, feed: Feed, link: Link) -> None:
        piece = arrival.waiting.popleft()
        feed.places.release()
        if self._take(arrival, feed, link, piece) < piece.num_blocks:
            arrival.miss_reason = MissReason.NO_ROOM
            arrival.give_up()
        if link.tier is not None:
            link.tier.take_back(piece.image)
        feed.num_taken += 1
        del piece  # or the next read could not reuse its memory
        feed.has_taken.set()

    def _is_late(self, arrival: Arrival, feed: Feed, link: Link) -> bool:
        num_tokens = len(arrival.ids) - arrival.num_known
        is_opening = link.tier is None
        if arrival.is_opening and not is_opening:  # reading starts only now
            arrival.since_s = self._clock()
        arrival.is_opening = is_opening
        patience_s = self._planner.patience_s(
            link.read_rate, num_tokens, feed.piece_bytes, is_opening
        )
        if arrival.is_prefetch:
            patience_s += self._planner.assumed_seconds(num_tokens)
        return self._clock() > arrival.since_s + patience_s

    def _hurry(self, arrival: Arrival, feed: Feed) -> None:
        """Extend the front, by twice as much each time in a row.

        A prefetch gives up instead, and so does a context with recurrent state: its snapshot is of
        use only as a whole.
        """
        arrival.num_hurries += 1
        arrival.miss_reason = feed.miss_reason = MissReason.LATE
        if arrival.is_prefetch or self._manager.has_state:
            arrival.give_up()
        else:
            self._extend_front(arrival, feed, _HURRY_TOKENS << (arrival.num_hurries - 1))

    def _compute_meanwhile(self, arrival: Arrival, feed: Feed) -> None:
        """Extend the front a little, while another machine computes all of it or is reached."""
        arrival.since_s = self._clock()
        num_there = self._manager.num_cached_tokens(arrival.ids[:-1])
        left_s = feed.expected_s - self._clock()
        num_more = self._planner.tokens_meanwhile(left_s, num_there)
        if num_more is None or num_more >= self._manager.block_size or left_s <= 0:
            self._extend_front(arrival, feed, _HURRY_TOKENS if num_more is None else num_more)

    def _extend_front(self, arrival: Arrival, feed: Feed, num_more: int) -> None:
        """Compute so many more tokens meanwhile; give up where nothing would be left to deliver."""
        size = self._manager.block_size
        num_there = self._manager.num_cached_tokens(arrival.ids[:-1])
        num_front = (num_there + max(num_more, size)) // size * size
        if num_front >= min(len(feed.ids), len(arrival.ids)) - 1:
            arrival.give_up()
        else:
            arrival.num_front = feed.num_front = num_front

    def _has_front(self, arrival: Arrival) -> bool:
        """Whether the front has been computed."""
        front = arrival.ids[: arrival.num_front]
        return not front or self._manager.num_cached_tokens(front) == arrival.num_front

    def _take(self, arrival: Arrival, feed: Feed, link: Link, piece: Piece) -> int:
        """Enter a piece in the device tier; return how many of its blocks are there now."""
        size = self._manager.block_size
        end = (piece.start_block + piece.num_blocks) * size
        if self._manager.num_cached_tokens(feed.ids[:end]) == end:
            return piece.num_blocks  # another request has computed it meanwhile
        try:
            num_adopted = self._manager.adopt(feed.ids, piece.start_block, piece.image)
        except Exception:  # mostly out of memory: the tokens are computed instead
            _log.exception("blocks could not be copied to the device")
            return 0
        if num_adopted:
            end_block = piece.start_block + num_adopted
            firsts = feed.ids[piece.start_block * size : end_block * size : size]
            num_tokens = sum(first >= 0 for first in firsts) * size  # a snapshot stands for none
            arrival.tokens[link.name] = arrival.tokens.get(link.name, 0) + num_tokens
            arrival.since_s, arrival.num_hurries = self._clock(), 0
            if link.is_quick:
                self._lock(arrival, feed.ids, end_block * size)
            else:
                self._note_unverified(arrival, feed, piece, end_block)
                link.writer.note_stored(feed.ids, end_block)
        return num_adopted

    def _note_unverified(self, arrival: Arrival, feed: Feed, piece: Piece, end_block: int) -> None:
        size = self._manager.block_size
        if arrival.num_arrived <= arrival.num_trusted:
            arrival.num_trusted = piece.start_block * size
            self.unverified.append(arrival)
        arrival.arrived_ids, arrival.num_arrived = feed.ids, end_block * size
        is_whole = end_block == piece.start_block + piece.num_blocks
        arrival.fingerprint = piece.fingerprint if is_whole else None

    # Verifying

    def take_unverified(self, of_all: bool) -> list[RestoredContext]:
        """Return restored contexts to verify: those of arrivals that are over, or of all.

        Each is returned once; after that its tokens count as verified.
        """
        due = [arrival for arrival in self.unverified if of_all or arrival.is_over]
        self.unverified = [arrival for arrival in self.unverified if arrival not in due]
        return [self._restored_context(arrival) for arrival in due]

    @property
    def has_unverified(self) -> bool:
        """Whether an arrival that is over is not verified yet."""
        return any(arrival.is_over for arrival in self.unverified)

    def _restored_context(self, arrival: Arrival) -> RestoredContext:
        ids = list(arrival.arrived_ids[: arrival.num_arrived])
        restored = RestoredContext(ids, arrival.num_trusted, arrival.fingerprint)
        arrival.num_trusted = arrival.num_arrived
        return restored
