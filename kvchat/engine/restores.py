"""Restores: what slower tiers have of the prompts, on its way up before they run.

Joins requests with the persistence, where there is one. Knows prompts and deliveries; computes
nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvchat.engine.request import Request

if TYPE_CHECKING:
    from kvchat.cache.persistence import Persistence
    from kvchat.cache.restoring import Restore


class Restores:
    """Begins, foresees and settles restores for one engine; without `persistence` there are none.

    A prefetch is a restore that no request has asked for yet. One at a time: the newest is the
    likeliest.
    """

    def __init__(self, persistence: "Persistence | None") -> None:
        self._persistence = persistence
        self._prefetch: Restore | None = None

    @property
    def is_prefetching(self) -> bool:
        return self._prefetch is not None and not self._prefetch.is_over

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Bring a context's KV up for a request that will probably follow."""
        self.give_up_prefetch()
        if self._persistence is not None:
            self._prefetch = self._persistence.begin((*token_ids, 0))

    def begin(self, ids: Sequence[int]) -> "Restore | None":
        """Begin to restore a prompt, or go on with the prefetch that foresaw it."""
        foreseen = self._prefetch
        if foreseen is not None and not foreseen.is_given_up.is_set():
            context = foreseen.ids[:-1]
            if list(context) == list(ids[: len(context)]):
                self._prefetch = None
                return foreseen
        self.give_up_prefetch()
        return self._persistence.begin(ids) if self._persistence is not None else None

    def give_up_prefetch(self) -> None:
        if self._prefetch is not None:
            self._prefetch.give_up()
        self._prefetch = None

    def give_up(self, requests: Sequence[Request]) -> None:
        """End every restore, or its reader would wait for a place to put a piece."""
        self.give_up_prefetch()
        for request in requests:
            if request.restore is not None:
                request.restore.give_up()

    def settle(self, requests: Sequence[Request]) -> bool:
        """Take in what slower tiers have delivered; whether a request still waits for more.

        Where all requests wait it waits with them, for the next delivery or a moment.
        """
        if self._persistence is None:
            return False
        restores = [r.restore for r in requests if r.restore is not None and not r.restore.is_over]
        if self._prefetch is not None and self.is_prefetching:
            restores.append(self._prefetch)
        if restores and len(restores) >= len(requests):
            self._persistence.wait_for_news()
        outcomes = [self._persistence.settle(restore) for restore in restores]
        return any(outcomes)
