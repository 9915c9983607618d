"""Fetcher: loads prompts' KV from slower tiers to the device before the requests run.

First a promotion loads what host memory has. Then a restore loads what only the disk has after
that. A prefetch does the same for a context that no request has asked for yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvchat.core.types import CachedTokens
from kvchat.engine.request import Request, State

if TYPE_CHECKING:
    from kvchat.cache.connector import KvConnector
    from kvchat.cache.host_offload import HostOffload, Promotion
    from kvchat.cache.restore import Restore


@dataclass(slots=True, eq=False)
class _Prefetch:
    """A context that no request has asked for yet; `restore` begins after the promotion."""

    ids: tuple[int, ...]
    promotion: "Promotion | None"
    restore: "Restore | None"

    @property
    def is_promoting(self) -> bool:
        return self.promotion is not None and not self.promotion.is_over

    @property
    def is_over(self) -> bool:
        return not self.is_promoting and (self.restore is None or self.restore.is_over)

    def give_up(self) -> None:
        if self.promotion is not None:
            self.promotion.give_up()
        if self.restore is not None:
            self.restore.give_up()


class Fetcher:
    """Begins and settles the promotions and restores of one engine, from `offload` and `connector`.

    There is one prefetch at a time: the newest context is the most likely one.
    """

    def __init__(
        self, connector: "KvConnector | None", offload: "HostOffload | None" = None
    ) -> None:
        self._connector = connector
        self._offload = offload
        self._prefetch: _Prefetch | None = None
        # Promotions not yet over; a restore follows each.
        self._promoting: list[Request | _Prefetch] = []

    @property
    def is_busy(self) -> bool:
        """Whether a prefetch, or a copy from host memory, is under way."""
        return self._is_prefetching or self.is_copying

    @property
    def _is_prefetching(self) -> bool:
        return self._prefetch is not None and not self._prefetch.is_over

    @property
    def is_copying(self) -> bool:
        """Whether copies from host memory are under way, even if given up: they hold blocks."""
        return self._offload is not None and self._offload.is_promoting

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Load a context's KV for a request that will probably follow."""
        self.give_up_prefetch()
        self._prefetch = _Prefetch((*token_ids, 0), None, None)
        self._begin(self._prefetch)

    def prefetched(self, token_ids: Sequence[int]) -> CachedTokens:
        """Return how many tokens of a context the prefetch has loaded, by the tier they came from.

        A request for the context takes the prefetch over, and reports these tokens in the same way.
        """
        prefetch = self._prefetch
        if prefetch is None or list(prefetch.ids[:-1]) != list(token_ids[: len(prefetch.ids) - 1]):
            return CachedTokens()
        promotion, restore = prefetch.promotion, prefetch.restore
        return CachedTokens(
            host=promotion.num_tokens if promotion is not None else 0,
            disk=restore.num_tokens if restore is not None else 0,
        )

    def begin(self, request: Request) -> None:
        """Begin to load a prompt's KV, or take over the prefetch of its beginning."""
        prefetch = self._prefetch
        if prefetch is not None:
            context = prefetch.ids[:-1]
            if list(context) == list(request.ids[: len(context)]):
                self._prefetch = None
                request.promotion, request.restore = prefetch.promotion, prefetch.restore
                if prefetch.restore is not None and self._connector is not None:
                    self._connector.restorer.hand_over(prefetch.restore)
                if prefetch in self._promoting:
                    self._promoting.remove(prefetch)
                    self._promoting.append(request)
                if request.promotion is not None or request.restore is not None:
                    return
        self.give_up_prefetch()
        self._begin(request)

    def _begin(self, waiter: "Request | _Prefetch") -> None:
        if self._offload is not None:
            waiter.promotion = self._offload.begin(waiter.ids)
        if waiter.promotion is not None:
            self._promoting.append(waiter)
        else:
            self._restore(waiter)

    def _restore(self, waiter: "Request | _Prefetch") -> None:
        """Begin a restore. A prefetch gets no front to compute, because no request runs for it."""
        if self._connector is None:
            return
        if isinstance(waiter, _Prefetch):
            waiter.restore = self._connector.begin(waiter.ids, is_prefetch=True)
        else:
            is_one_shot = waiter.spec.is_one_shot
            waiter.restore = self._connector.begin(waiter.ids, is_one_shot=is_one_shot)

    def promote(self, request: Request) -> bool:
        """Begin a promotion for a request about to start, unless it has one; whether one began.

        Blocks may have been demoted since `begin`: the request waited, or it was preempted.
        """
        if self._offload is None or request.promotion is not None:
            return False
        request.promotion = self._offload.begin(request.ids)
        return request.promotion is not None

    def give_up_prefetch(self) -> None:
        if self._prefetch is not None:
            self._prefetch.give_up()
        self._prefetch = None

    def give_up(self, requests: Sequence[Request]) -> None:
        """End all transfers; otherwise the disk reader would wait for room to put a piece."""
        self.give_up_prefetch()
        self._promoting.clear()
        for request in requests:
            if request.promotion is not None:
                request.promotion.give_up()
            if request.restore is not None:
                request.restore.give_up()

    def settle(self, requests: Sequence[Request]) -> bool:
        """Take in KV from slower tiers; return whether a request or a prefetch waits for more.

        If no request can run until then, it blocks until the next delivery, for a short time.
        """
        if self._is_idle(requests):
            return False
        num_waiting = sum(request.awaits_kv for request in requests)
        is_awaited = bool(num_waiting) or self._is_prefetching
        is_idle = not any(request.state is State.RUNNING for request in requests)
        can_run = num_waiting < len(requests)
        if (is_awaited and not can_run) or (is_idle and self.is_copying):
            self._wait_for_news()
        if self._offload is not None:
            self._offload.settle(may_demote=not (is_awaited or self._live_restores(requests)))
        self._follow_promotions()
        for restore in self._live_restores(requests):
            assert self._connector is not None
            self._connector.settle(restore)
        return any(request.awaits_kv for request in requests) or self._is_prefetching

    def _is_idle(self, requests: Sequence[Request]) -> bool:
        """Whether no KV can arrive and there is no host tier, which needs regular calls."""
        if self._offload is not None or self._prefetch is not None:
            return False
        return all(r.restore is None and r.promotion is None for r in requests)

    def _wait_for_news(self) -> None:
        if self._offload is not None and self.is_copying:
            self._offload.wait_for_news()
        elif self._connector is not None:
            self._connector.wait_for_news()

    def _follow_promotions(self) -> None:
        """After each finished promotion, begin a restore of what the disk has after it."""
        for waiter in list(self._promoting):
            if waiter.promotion is not None and not waiter.promotion.is_over:
                continue
            self._promoting.remove(waiter)
            is_wanted = isinstance(waiter, _Prefetch) or waiter.state is State.WAITING
            if is_wanted:
                self._restore(waiter)

    def _live_restores(self, requests: Sequence[Request]) -> "list[Restore]":
        restores = [request.restore for request in requests]
        if self._prefetch is not None:
            restores.append(self._prefetch.restore)
        return [restore for restore in restores if restore is not None and not restore.is_over]
