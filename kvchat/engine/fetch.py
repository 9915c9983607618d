"""Fetcher: loads prompts' KV from slower tiers to the device before the requests run.
Locator: tells where the KV of contexts is, as a request for them would find it.

A prefetch does the same as a request for a context that none has asked for yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.cache.thinned_kv import has_thinned, num_thinned_tokens
from kvchat.core.stats import KvPlaces
from kvchat.core.types import CachedTokens
from kvchat.engine.kv_thinner import KvThinner
from kvchat.engine.request import Request, State

if TYPE_CHECKING:
    from kvchat.cache.arrivals import Arrival
    from kvchat.cache.chain import KvChain


class Fetcher:
    """Begins and settles the arrivals of one engine's requests, from `chain`.

    There is one prefetch at a time: the newest context is the most likely one.
    """

    def __init__(self, chain: "KvChain") -> None:
        self._arrivals = chain.arrivals
        self._demoter = chain.demoter
        self._computing = [link for link in chain.links if link.computes]
        self._prefetch: Arrival | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a prefetch, or a copy from a quick tier, is under way."""
        return self._is_prefetching or self.is_copying

    @property
    def _is_prefetching(self) -> bool:
        return self._prefetch is not None and not self._prefetch.is_over

    @property
    def is_copying(self) -> bool:
        """Whether arrivals hold blocks, even if given up: the next `settle` releases those."""
        return any(arrival.table is not None for arrival in self._arrivals.live)

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Load a context's KV for a request that will probably follow."""
        self.give_up_prefetch()
        self._prefetch = self._arrivals.begin((*token_ids, 0), is_prefetch=True)

    def prefetched(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Return how many tokens of a context the prefetch has loaded, by the tier they came from,
        in order of speed.

        A request for the context takes the prefetch over, and reports these tokens in the same way.
        """
        prefetch = self._prefetch
        if prefetch is None or not _begins_with(token_ids, prefetch):
            return {}
        return prefetch.tokens

    def begin(self, request: Request) -> None:
        """Begin to load a prompt's KV, or take over the prefetch of its beginning."""
        num_sendable, is_one_shot = self._num_sendable(request), request.spec.is_one_shot
        prefetch = self._prefetch
        if prefetch is None or not _begins_with(request.ids, prefetch):
            self.give_up_prefetch()
            request.arrival = self._arrivals.begin(
                request.ids, is_one_shot=is_one_shot, num_sendable=num_sendable
            )
            return
        self._prefetch, request.arrival = None, prefetch
        self._arrivals.hand_over(prefetch, num_sendable)
        if num_sendable and prefetch.is_over:  # another machine was not asked for it
            arrival = self._arrivals.begin(request.ids, False, is_one_shot, num_sendable)
            if arrival is not None:
                arrival.num_known, arrival.tokens = prefetch.num_known, dict(prefetch.tokens)
                request.arrival = arrival

    def _num_sendable(self, request: Request) -> int:
        """Return how many leading tokens another machine may be sent, to compute their KV."""
        if not request.spec.is_kept or not self._computing:
            return 0
        is_told_all = any(link.is_told_all for link in self._computing)
        return len(request.ids) - 1 if is_told_all else request.spec.num_shared

    def promote(self, request: Request) -> bool:
        """Ask quick tiers for a request about to start, once before each start; return whether
        they have more for it. One that moved KV serves needs none.

        Blocks may have been demoted since `begin`: the request waited, or it was preempted.
        """
        is_over = request.has_asked_quick or request.is_fetching or bool(request.moved_under)
        if is_over or self._demoter is None:
            return False
        request.has_asked_quick = True
        arrival = self._arrivals.begin_quick(request.ids, request.arrival)
        if arrival is not None:
            request.arrival = arrival
        return arrival is not None

    def give_up_prefetch(self) -> None:
        if self._prefetch is not None:
            self._prefetch.give_up()
        self._prefetch = None

    def give_up(self, requests: Sequence[Request]) -> None:
        """End all arrivals; otherwise a reader would wait for room to put a piece."""
        self.give_up_prefetch()
        for request in requests:
            if request.arrival is not None:
                request.arrival.give_up()

    def settle(self, requests: Sequence[Request]) -> bool:
        """Take in KV from slower tiers; return whether a request or a prefetch waits for more.

        If no request can run until then, it blocks until the next delivery, for a short time.
        """
        if self._demoter is None and not self._arrivals.live:
            return False
        num_waiting = sum(request.awaits_kv for request in requests)
        is_awaited = bool(num_waiting) or self._is_prefetching
        is_idle = not any(request.state is State.RUNNING for request in requests)
        can_run = num_waiting < len(requests)
        if (is_awaited and not can_run) or (is_idle and self.is_copying):
            self._arrivals.wait_for_news()
        self._arrivals.settle()
        if self._demoter is not None and not (is_awaited or self._arrivals.live):
            self._demoter.demote_cold()
        return any(request.awaits_kv for request in requests) or self._is_prefetching


def _begins_with(token_ids: Sequence[int], prefetch: "Arrival") -> bool:
    """Whether a context begins with that of a prefetch, which ends with a token of any id."""
    num_tokens = len(prefetch.ids) - 1
    return list(token_ids[:num_tokens]) == list(prefetch.ids[:-1])


class Locator:
    """Looks up contexts; it moves nothing. The engine's thread owns it."""

    def __init__(
        self, cache: CacheManager, chain: KvChain, fetcher: Fetcher, thinner: KvThinner
    ) -> None:
        self._cache = cache
        self._chain = chain
        self._fetcher = fetcher
        self._thinner = thinner

    def cached_tokens(self, token_ids: Sequence[int]) -> CachedTokens:
        """Return how many tokens of a context each memory tier has cached."""
        return self._chain.num_cached(token_ids, self._cache.num_reusable_tokens(token_ids))

    def locate(
        self, contexts: Sequence[Sequence[int]], done: Callable[[list[KvPlaces]], None]
    ) -> None:
        """Call `done` with where the KV of each context is.

        It runs on this thread or on the one that reads the slowest tier; never if the engine is
        closed before.
        """
        in_memory = [self._cached_by_origin(token_ids) for token_ids in contexts]
        rates = self._chain.read_rates()

        def finish(found: Sequence[dict[str, int]]) -> None:
            done(
                [
                    KvPlaces(len(ids), cached.with_found(places), rates, self._cache.block_size)
                    for ids, cached, places in zip(contexts, in_memory, found, strict=True)
                ]
            )

        self._chain.look_up(contexts, finish)

    def _cached_by_origin(self, token_ids: Sequence[int]) -> CachedTokens:
        """Return as `cached_tokens`, but what a prefetch has loaded counts for the tier it came
        from, as in the usage of the request that follows.
        """
        cached, left = self.cached_tokens(token_ids), {}
        if (num_moved := self._cache.num_moved_tokens(token_ids)) > cached.total:
            return CachedTokens(device=num_moved)
        beginning = self._thinner.beginning_of(token_ids)
        if beginning is not None and has_thinned(self._cache, beginning, token_ids):
            return CachedTokens(device=num_thinned_tokens(self._cache, beginning, token_ids))
        num_left = cached.device
        for name, loaded in reversed(self._fetcher.prefetched(token_ids).items()):
            left[name] = min(loaded, num_left)
            num_left -= left[name]
        return replace(cached, device=num_left).plus(left)
