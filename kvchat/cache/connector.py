"""KvConnector: the engine's interface to a slower tier, to restore prompts and save contexts.

It combines Restorer and WriteBehind with the transfer thread, which does the blocking work.
"""

import math
import time
from collections.abc import Callable, Sequence

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.keys import TOKEN_BYTES, chain_keys, encode_ids
from kvchat.cache.rates import RateMemory, RestorePlanner
from kvchat.cache.restore import Restore, RestoredContext, Restorer
from kvchat.cache.tier import LogitFingerprint, Pinning, Tier, trouble_of
from kvchat.cache.transfer import OpenTier, TransferThread
from kvchat.cache.write_behind import WriteBehind
from kvchat.core.cost import ASSUMED_BYTES_PER_S
from kvchat.core.stats import TierStatus
from kvchat.core.types import TokenIds

_MAX_PENDING_BYTES = 256 << 20
_CLOSE_PATIENCE_S = 5.0


class KvConnector:
    """Restores into and saves from one manager. `clock` returns seconds; `rates` keeps the measured
    rates of this machine across runs.

    The engine's thread owns it; reading, writing and checking happen on the transfer thread.
    """

    def __init__(
        self,
        manager: CacheManager,
        open_tier: OpenTier,
        clock: Callable[[], float] = time.perf_counter,
        rates: RateMemory | None = None,
    ) -> None:
        self.planner = RestorePlanner()
        self._rates = rates
        if rates is not None:
            self.planner.begin_with(rates.read())
        most = manager.kv_pool.max_waiting_bytes or _MAX_PENDING_BYTES
        self.transfer = TransferThread(open_tier, most)
        self.write_behind = WriteBehind(manager, self.transfer, clock)
        self.restorer = Restorer(
            manager, self.transfer, self.planner, self.write_behind.note_kept, clock
        )
        self._manager = manager

    # Restoring

    def begin(
        self, ids: TokenIds, is_prefetch: bool = False, is_one_shot: bool = False
    ) -> Restore | None:
        """Start to restore the KV of a prompt that the device lacks; None if it lacks no full
        block.

        `is_prefetch`: no request waits for it yet. `is_one_shot`: the context will hardly be
        continued.
        """
        return self.restorer.begin(ids, is_prefetch, is_one_shot)

    def wait_for_news(self) -> None:
        """Wait briefly for the next piece that was read."""
        self.restorer.wait_for_news()

    def settle(self, restore: Restore) -> bool:
        """Copy the pieces read so far to the device; return whether more may come."""
        return self.restorer.settle(restore)

    def quarantine(self, restored: RestoredContext) -> None:
        """Remove restored KV that verification found wrong, and all that continues it."""
        self._manager.forget(restored.ids, restored.num_trusted)
        self.write_behind.note_gone(restored.ids)
        encoded = encode_ids(restored.ids)
        block_bytes = self._manager.block_size * TOKEN_BYTES
        self.transfer.quarantine(
            lambda tier: tier.quarantine(chain_keys(tier.root, encoded, block_bytes))
        )

    def look_up(self, contexts: Sequence[TokenIds], done: Callable[[list[int]], None]) -> None:
        """Call `done` with the leading tokens that the tier has of each context, in full blocks.

        Only keys are read. It runs on the transfer thread, or at once without a tier; never after
        `close`.
        """
        if self.transfer.is_without_tier:
            done([0] * len(contexts))
            return
        encoded = [encode_ids(ids) for ids in contexts]
        size = self._manager.block_size

        def look_up(tier: Tier) -> None:
            keys = [chain_keys(tier.root, each, size * TOKEN_BYTES) for each in encoded]
            done([size * tier.peek(*pair) for pair in zip(keys, encoded, strict=True)])

        self.transfer.restore(look_up)

    def disk_tokens_per_s(self) -> float:
        """Return the tokens a second that the tier is read at; of a slow disk before the first
        measurement.
        """
        size = self._manager.block_size
        num_bytes = self.planner.read_bytes_per_s or ASSUMED_BYTES_PER_S
        return num_bytes * size / self._manager.kv_pool.geometry.block_bytes

    # Saving and status

    def status(self) -> TierStatus | None:
        """Return the tier's status, or why it could not be opened; None if there is no tier, or
        not yet.
        """
        tier, failure = self.transfer.tier, self.transfer.failure
        if failure is not None:
            return TierStatus(trouble=trouble_of(failure))
        return tier.status() if tier is not None else None

    def save(
        self, ids: TokenIds, fingerprint: LogitFingerprint | None = None, is_one_shot: bool = False
    ) -> None:
        """Write the full blocks of a context that the tier lacks, on the transfer thread.

        `fingerprint` is that of the last block's last token; `is_one_shot` as in `begin`.
        """
        self.write_behind.save(ids, fingerprint, is_one_shot)
        self._keep_rates()

    def pin(
        self, ids: TokenIds, label: str, done: Callable[[int], None], ttl_s: float = math.inf
    ) -> None:
        """Pin what the tier has of a context for `ttl_s` seconds, after all queued writes.

        `done` is called with the number of pinned tokens, on the transfer thread, or at once if
        that thread has ended.
        """
        # KV of a recurrent model is of no use without a snapshot; the last context has the longest.
        encoded = encode_ids(self._manager.contexts_to_keep(ids)[-1])
        size = self._manager.block_size

        def pin(tier: Tier | None) -> None:
            num_blocks = 0
            try:
                if tier is not None and isinstance(tier, Pinning):
                    keys = chain_keys(tier.root, encoded, size * TOKEN_BYTES)
                    num_blocks = tier.pin(keys, encoded, label, ttl_s)
            finally:
                done(min(num_blocks * size, len(ids)))

        self.write_behind.go_on(0.0)
        self.transfer.afterwards(pin)

    def forget(self, ids: TokenIds) -> None:
        """Note that the caller is about to remove a context from the tier."""
        self.write_behind.note_gone(ids)

    def when_written(self, done: Callable[[], None]) -> None:
        """Call `done` after all queued writes have been done or have failed.

        It runs on the transfer thread, or at once if that thread has ended.
        """
        self.transfer.afterwards(lambda _: done())

    def _keep_rates(self) -> None:
        rates = self._rates
        if rates is not None:
            known = self.planner.rates()
            self.transfer.copy(lambda: rates.write(known))

    def begin_closing(self) -> None:
        """Let the store close once queued writes are done, without waiting. Nothing is saved
        after it. With writes that are not queued yet it does nothing: `close` queues them.
        """
        self._keep_rates()
        if not self.write_behind.has_backlog and not self.write_behind.is_unheard:
            self.transfer.begin_closing()

    def close(self) -> None:
        """Wait for queued writes, for a limited time, and end the thread."""
        self._keep_rates()
        deadline_s = time.monotonic() + _CLOSE_PATIENCE_S
        self._offer_backlog(deadline_s)
        if self.write_behind.is_unheard:  # only a write finds out what other processes have deleted
            self.transfer.flush(max(0.0, deadline_s - time.monotonic()))
            self._offer_backlog(deadline_s)
        self.transfer.close(max(0.0, deadline_s - time.monotonic()))

    def _offer_backlog(self, deadline_s: float) -> None:
        while self.write_behind.has_backlog and time.monotonic() < deadline_s:
            self.write_behind.go_on(deadline_s - time.monotonic())
