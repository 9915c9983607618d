"""KvChain: the tiers of KV behind the device, in order of speed, as the engine uses them.

Each block of a prompt comes from the first tier that has it (`arrivals.py`). Evicted blocks of
the device move to the quick tier (`demotion.py`); new KV is written to every other one
(`write_behind.py`). A tier that fails counts as a miss, and the others still work.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvchat.cache.arrivals import Arrivals, RestoredContext
from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.demotion import Demoter
from kvchat.cache.host_tier import HostTier
from kvchat.cache.keys import TOKEN_BYTES, KeyMemo, encode_ids
from kvchat.cache.link import Link
from kvchat.cache.planner import Planner
from kvchat.cache.tier import Layout, LogitFingerprint, Tier, TierOpener
from kvchat.cache.transfer import Job
from kvchat.core.stats import ASSUMED_BYTES_PER_S, ReadRates, TierStatus
from kvchat.core.types import CachedTokens, TokenIds

_CLOSE_PATIENCE_S = 5.0
# Where several contexts are is not looked up in a tier that takes so long to tell, in seconds.
_MOST_LOOKING_S = 0.25

Done = Callable[[], None]


class KvChain:
    """The tiers that `openers` open, the fastest first, behind one manager; there may be none.

    `layout` is computed at most once. `clock` returns seconds. The engine's thread owns the chain;
    finding, reading and writing happen on the tiers' threads.
    """

    def __init__(
        self,
        manager: CacheManager,
        openers: Sequence[TierOpener] = (),
        layout: Callable[[], Layout] | None = None,
        planner: Planner | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.planner = planner or Planner()
        self._manager = manager
        self._memo = KeyMemo(manager.block_size * TOKEN_BYTES)
        known_layout = _once(layout)
        self.links = [Link(each, known_layout, manager, self._memo, clock) for each in openers]
        self.slow = [link for link in self.links if not link.is_quick]
        self.shared = [link for link in self.slow if link.is_shared]
        self._written = [link for link in self.slow if link.takes_all]
        # Whether contexts can be kept beyond this process, or were meant to be.
        self.has_slow = bool(self._written)
        self.pack_tokens = self._written[0].writer.pack_tokens if self._written else 0
        self.arrivals = Arrivals(manager, self.links, self.planner, self._memo, clock)
        self.demoter = self._new_demoter(clock)

    def _new_demoter(self, clock: Callable[[], float]) -> Demoter | None:
        for link in self.links:
            if isinstance(host := link.tier, HostTier):
                return Demoter(
                    link.name, self._manager, host, link.thread, self.planner, self._memo, clock
                )
        return None

    def status(self) -> tuple[TierStatus, ...]:
        """Return the status of each tier that is open or could not be opened."""
        found = (link.status() for link in self.links)
        return tuple(status for status in found if status is not None)

    # Finding

    def num_cached(self, ids: TokenIds, num_known: int) -> CachedTokens:
        """Return where a context's tokens are at once: `num_known` on the device, and those after
        them in quick tiers, in full blocks.
        """
        size, cached = self._manager.block_size, CachedTokens(device=num_known)
        encoded = encode_ids(ids)
        for link in self.links:
            if link.is_quick and link.tier is not None:
                first = cached.total // size
                keys = self._memo.local(encoded)[first:]
                count = link.tier.peek(keys, encoded[first * size * TOKEN_BYTES :])
                cached = cached.plus({link.name: count * size})
        return cached

    def look_up(
        self, contexts: Sequence[TokenIds], done: Callable[[list[dict[str, int]]], None]
    ) -> None:
        """Call `done` with the leading tokens that each slow tier has of each context, in full
        blocks, by its name.

        Only keys are read. `done` runs on the thread of the last tier, or at once without a tier;
        never after `close`.
        """
        encoded = [encode_ids(ids) for ids in contexts]
        found: list[dict[str, int]] = [{} for _ in contexts]
        size = self._manager.block_size

        def look_up(link: Link, tier: Tier | None) -> None:
            if tier is not None and tier.latency_s * len(contexts) <= _MOST_LOOKING_S:
                for places, ids in zip(found, encoded, strict=True):
                    keys = self._memo.keys_of(tier.root, ids)
                    places[link.name] = size * tier.peek(keys, ids)

        links = [link for link in self.slow if not link.thread.is_without_tier]
        _in_turn(links, lambda link: link.thread.restore, look_up, lambda: done(found))

    def read_rates(self) -> ReadRates:
        """Return the tokens a second that tiers are read at; of a slow disk, or of memory that
        takes no time, before the first measurement.
        """
        tokens_per_byte = self._manager.block_size / self._manager.kv_pool.geometry.block_bytes
        known = self.planner.rates
        quick = [known.get(x.read_rate, math.inf) for x in self.links if x.is_quick]
        slow = [known.get(x.read_rate, ASSUMED_BYTES_PER_S) for x in self._written]
        return ReadRates(
            self.planner.prefill.tokens_per_s,
            min(slow, default=math.inf) * tokens_per_byte,
            min(quick, default=math.inf) * tokens_per_byte,
            self.planner.prefill.half_context,
        )

    # Saving

    def lacks(self, ids: TokenIds) -> bool:
        """Whether a tier lacks full blocks of a context, and may be offered them now."""
        lacking = [link for link in self._written if link.writer.lacks(ids)]  # each tells its tier
        return bool(lacking)

    def save(
        self, ids: TokenIds, fingerprint: LogitFingerprint | None = None, is_one_shot: bool = False
    ) -> None:
        """Write the full blocks of a context to each tier that lacks them.

        `fingerprint` is that of the last block's last token; `is_one_shot`: the context will hardly
        be continued.
        """
        for link in self._written:
            link.writer.save(ids, fingerprint, is_one_shot)

    def save_packs(self, ids: TokenIds, is_one_shot: bool = False) -> None:
        """Write only whole packs: for a context that is still growing."""
        for link in self._written:
            link.writer.save_packs(ids, is_one_shot)

    def share(self, ids: TokenIds, done: Callable[[int], None] | None = None) -> None:
        """Write the full blocks of a context to the shared tiers that lack them.

        `done` is called with how many tokens of it a shared tier then has, on a tier's thread, or
        at once where there is none.
        """
        for link in self.shared:
            link.writer.save(ids)
        if done is None:
            return
        encoded, numbers = encode_ids(ids), [0]

        def count(link: Link, tier: Tier | None) -> None:
            if tier is not None:
                numbers.append(tier.peek(self._memo.keys_of(tier.root, encoded), encoded))

        _in_turn(
            self.shared,
            lambda link: link.thread.afterwards,
            count,
            lambda: done(max(numbers) * self._manager.block_size),
        )

    @property
    def has_backlog(self) -> bool:
        """Whether a context is to be offered again to a tier."""
        return any(link.writer.has_backlog for link in self.slow)

    def go_on(self, timeout_s: float) -> None:
        """Offer some of the backlog; wait up to `timeout_s` for room."""
        for link in self.slow:
            link.writer.go_on(timeout_s)

    # Pinning and forgetting

    def pin(
        self, ids: TokenIds, label: str, done: Callable[[int], None], ttl_s: float = math.inf
    ) -> None:
        """Pin what the tiers have of a context for `ttl_s` seconds, after all queued writes.

        `done` is called with the largest number of tokens that a tier pinned, on a tier's thread,
        or at once if none is left.
        """
        # KV of a recurrent model is of no use without a snapshot; the last context has the longest.
        encoded = encode_ids(self._manager.contexts_to_keep(ids)[-1])
        numbers = [0]

        def pin(tier: Tier | None) -> None:
            if tier is not None:
                keys = self._memo.keys_of(tier.root, encoded)
                numbers.append(tier.pin(keys, encoded, label, ttl_s))

        def tell() -> None:
            done(min(max(numbers) * self._manager.block_size, len(ids)))

        self.go_on(0.0)
        self._after_writes(pin, tell)

    def forget(self, contexts: Sequence[tuple[TokenIds, int]]) -> Callable[[Done], None]:
        """Drop the KV of contexts; each keeps the KV of its given number of leading tokens.

        Call the result, on any thread, with a function: it is called, perhaps on a tier's thread,
        once no write of these contexts is queued and all tiers without an administrator have
        forgotten them. The caller then forgets them in the others.
        """
        self._manager.forget_moved()
        size, gone = self._manager.block_size, []
        for ids, num_kept in contexts:
            self._manager.forget(ids, num_kept)
            gone.append((encode_ids(ids), num_kept // size))
            for link in self.slow:
                link.writer.note_gone(ids)

        def forget(tier: Tier | None) -> None:
            if tier is not None and not tier.has_admin:
                for encoded, num_kept in gone:
                    keys = self._memo.keys_of(tier.root, encoded)
                    tier.forget(keys[num_kept:], keys[:num_kept])

        return partial(self._after_writes, forget)

    def quarantine(self, restored: RestoredContext) -> None:
        """Remove restored KV that verification found wrong, and all that continues it."""
        self._manager.forget_moved()
        self._manager.forget(restored.ids, restored.num_trusted)
        encoded = encode_ids(restored.ids)
        for link in self.slow:
            link.writer.note_gone(restored.ids)
            link.thread.quarantine(
                lambda tier: tier.quarantine(self._memo.keys_of(tier.root, encoded))
            )

    def _after_writes(self, job: Callable[[Tier | None], object], done: Done) -> None:
        """Call `job` with each slow tier after all its queued writes, then `done`."""
        _in_turn(self.slow, lambda link: link.thread.afterwards, lambda link, tier: job(tier), done)

    # Closing

    def flush(self, timeout_s: float) -> bool:
        """Wait until all tiers are open and have nothing to do; false if that took too long."""
        return all(link.thread.flush(timeout_s) for link in self.links)

    def begin_closing(self) -> None:
        """Let the tiers close once queued writes are done, without waiting. Nothing is saved
        after it. With writes that are not queued yet it does nothing: `close` queues them.
        """
        if not any(link.writer.has_backlog or link.writer.awaits_outcome for link in self.slow):
            for link in self.links:
                link.thread.begin_closing()

    def close(self) -> None:
        """Wait for queued writes, for a limited time, and end the threads. Idempotent."""
        self.planner.prefill.keep()
        deadline_s = time.monotonic() + _CLOSE_PATIENCE_S
        for link in self.links:
            if link.tier is not None:
                link.tier.interrupt()
        self._offer_backlog(deadline_s)
        for link in self.slow:
            # Only a write finds out what other processes have deleted.
            if link.writer.awaits_outcome:
                link.thread.flush(max(0.0, deadline_s - time.monotonic()))
        self._offer_backlog(deadline_s)
        for link in self.links:
            link.thread.close(max(0.0, deadline_s - time.monotonic()))
        self.planner.keep()

    def _offer_backlog(self, deadline_s: float) -> None:
        for link in self.slow:
            while link.writer.has_backlog and time.monotonic() < deadline_s:
                link.writer.go_on(deadline_s - time.monotonic())

    # Checking

    def tables(self) -> list[BlockTable]:
        """Return the tables of all arrivals, for checks of reference counts."""
        return [each.table for each in self.arrivals.live if each.table is not None]

    def check(self) -> None:
        """Check every invariant of host memory and of the copies under way."""
        if self.demoter is not None:
            self.demoter.check()


def _in_turn(
    links: Sequence[Link],
    queue_of: Callable[[Link], Callable[[Job], None]],
    job: Callable[[Link, Tier | None], object],
    done: Done,
    number: int = 0,
) -> None:
    """Queue `job` on the threads of links, each after the one before; then call `done`, on the last
    of these threads, or at once without a link.

    `queue_of` says in which queue of a thread. A job that fails ends only itself.
    """
    if number == len(links):
        done()
        return

    def run(tier: Tier | None) -> None:
        try:
            job(links[number], tier)
        finally:
            _in_turn(links, queue_of, job, done, number + 1)

    queue_of(links[number])(run)


def _once(function: Callable[[], Layout] | None) -> Callable[[], Layout]:
    """Return a function that calls `function` until it has a result, and keeps that; for any
    thread.
    """
    lock, results = threading.Lock(), list[Layout]()

    def call() -> Layout:
        assert function is not None, "these tiers need no layout"
        with lock:
            if not results:
                results.append(function())
            return results[0]

    return call
