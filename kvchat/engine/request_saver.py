"""RequestSaver: what of requests that still run goes to slower tiers, after each step."""

from collections.abc import Sequence

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.engine.kv_verifier import KvVerifier
from kvchat.engine.request import Request, State
from kvchat.engine.scheduler import ScheduledRequest

# Copying snapshots takes time, which must not delay the first token.
_TOKENS_BEFORE_SNAPSHOT = 2


class RequestSaver:
    """Saves the KV of requests before they end. The engine's thread owns it.

    So the KV of a long document survives if the process is killed during its first answer.
    """

    def __init__(self, cache: CacheManager, chain: KvChain, verifier: KvVerifier) -> None:
        self._cache = cache
        self._chain = chain
        self._verifier = verifier

    def save(self, plan: Sequence[ScheduledRequest]) -> None:
        """Save what the requests of a step have filled with it."""
        requests = [scheduled.request for scheduled in plan]
        if self._chain.has_slow and self._cache.has_state:
            self._save_prompts(requests)
        elif self._chain.has_slow:
            self._save_whole_packs(requests)
        if self._chain.shared:
            self._share_beginnings(requests)

    def _save_whole_packs(self, requests: Sequence[Request]) -> None:
        pack_tokens = self._chain.pack_tokens
        for request in requests:
            request.num_offered = min(request.num_offered, request.num_computed)
            is_due = request.num_computed - request.num_offered >= pack_tokens
            if is_due and request.is_kept and request.state is State.RUNNING:
                request.num_offered = request.num_computed
                computed = request.ids[: request.num_computed]
                self._chain.save_packs(computed, request.spec.is_one_shot)

    def _save_prompts(self, requests: Sequence[Request]) -> None:
        """Save prompts with their snapshots of recurrent state, once the answer has begun.

        Not before: a state that is not finite shows only in the logits.
        """
        for request in requests:
            is_due = request.num_generated >= _TOKENS_BEFORE_SNAPSHOT and not request.num_offered
            if is_due and request.spec.is_kept and request.state is State.RUNNING:
                request.num_offered = request.num_computed
                computed = request.ids[: request.num_computed]
                self._verifier.save(computed, request.spec.is_one_shot)

    def _share_beginnings(self, requests: Sequence[Request]) -> None:
        """Save what other machines may have of prompts that have been computed now."""
        for request in requests:
            if request.spec.num_shared and request.num_generated == 1 and not request.moved_under:
                self._chain.share(request.ids[: request.spec.num_shared])
