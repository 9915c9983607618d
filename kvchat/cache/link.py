"""Link: one tier of the chain, with its thread, its name and what writes to it."""

from collections.abc import Callable

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.keys import KeyMemo
from kvchat.cache.planner import from_tier
from kvchat.cache.tier import Layout, Tier, TierOpener, trouble_of
from kvchat.cache.transfer import TransferThread
from kvchat.cache.write_behind import WriteBehind
from kvchat.core.stats import TierStatus

_MAX_PENDING_BYTES = 256 << 20
# Until a shared tier has been reached, its answers are not expected sooner.
_UNKNOWN_LATENCY_S = 0.05


class Link:
    """Opens a tier on a thread of its own, or at once if it is quick. The engine's thread owns it.

    A quick tier gets what the device evicts (`demotion.py`); nothing is written behind to it, nor
    to one that is only read, and to a shared one only what is to be shared.
    One that `computes` may be sent the token ids of any context if `is_told_all`.
    `read_s` counts the seconds that reading took.
    """

    def __init__(
        self,
        opener: TierOpener,
        layout: Callable[[], Layout],
        manager: CacheManager,
        memo: KeyMemo,
        clock: Callable[[], float],
    ) -> None:
        self.name = opener.name
        self.is_quick = opener.is_quick
        self.is_shared = opener.is_shared
        self.takes_all = opener.takes_all and not opener.is_only_read
        self.computes = opener.computes
        self.is_told_all = opener.computes and opener.takes_all
        self.read_rate = from_tier(opener.name)
        self.read_s = 0.0
        tier = opener.open(layout) if opener.is_quick else None
        most = manager.kv_pool.max_waiting_bytes or _MAX_PENDING_BYTES
        self.thread = TransferThread(lambda: opener.open(layout), most, tier)
        self.writer = WriteBehind(manager, self.thread, memo, clock)

    @property
    def tier(self) -> Tier | None:
        """The tier; None while it is being opened, and if it could not be."""
        return self.thread.tier

    @property
    def latency_s(self) -> float:
        """Seconds until the tier answers anything, where that counts."""
        if (tier := self.tier) is not None:
            return tier.latency_s
        return _UNKNOWN_LATENCY_S if self.is_shared else 0.0

    def wait_s(self, num_tokens: int) -> float:
        """Return the seconds until the tier begins to deliver so many tokens, where that counts."""
        return self.tier.wait_s(num_tokens) if self.tier is not None else self.latency_s

    def status(self) -> TierStatus | None:
        """Return the tier's status under its name, or why it could not be opened; None while it is
        being opened.
        """
        if (failure := self.thread.failure) is not None:
            return TierStatus(self.name, trouble=trouble_of(failure, self.name))
        tier = self.tier
        return tier.status().of(self.name, self.read_s) if tier is not None else None
