"""Locator: where the KV of contexts is, as a request for them would find it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.cache.thinned_kv import has_thinned, num_thinned_tokens
from kvchat.core.stats import KvPlaces
from kvchat.core.types import CachedTokens
from kvchat.engine.fetch import Fetcher
from kvchat.engine.kv_thinner import KvThinner


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
