"""Restores: what slower tiers have of the prompts, on its way up before they run.

Joins requests with host memory and the persistence, where there are such. What lies in host memory
comes first, and what only the disk has behind it. Knows prompts and deliveries; computes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvchat.engine.request import Request, State

if TYPE_CHECKING:
    from kvchat.cache.connector import Persistence
    from kvchat.cache.host_offload import HostSwap, Promotion
    from kvchat.cache.restore import Restore


@dataclass(slots=True, eq=False)
class _Foreseen:
    """A context that no request has asked for yet; `restore` follows the promotion."""

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


class Restores:
    """Begins, foresees and settles what comes up for one engine, from `swap` and `persistence`.

    A prefetch is a context that no request has asked for yet. One at a time: the newest is the
    likeliest.
    """

    def __init__(self, persistence: "Persistence | None", swap: "HostSwap | None" = None) -> None:
        self._persistence = persistence
        self._swap = swap
        self._foreseen: _Foreseen | None = None
        # Whose promotion the disk's part is to follow.
        self._climbing: list[Request | _Foreseen] = []

    @property
    def is_prefetching(self) -> bool:
        return self._foreseen is not None and not self._foreseen.is_over

    @property
    def is_under_way(self) -> bool:
        """Whether copies from host memory are, even such as nobody wants any more.

        They hold blocks until they are done.
        """
        return self._swap is not None and self._swap.is_promoting

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Bring a context's KV up for a request that will probably follow."""
        self.give_up_prefetch()
        self._foreseen = _Foreseen((*token_ids, 0), None, None)
        self._begin(self._foreseen)

    def begin(self, request: Request) -> None:
        """Begin to bring a prompt's KV up, or go on with the prefetch that foresaw it."""
        foreseen = self._foreseen
        if foreseen is not None:
            context = foreseen.ids[:-1]
            if list(context) == list(request.ids[: len(context)]):
                self._foreseen = None
                request.promotion, request.restore = foreseen.promotion, foreseen.restore
                if foreseen.restore is not None and self._persistence is not None:
                    self._persistence.restoring.hand_over(foreseen.restore)
                if foreseen in self._climbing:
                    self._climbing.remove(foreseen)
                    self._climbing.append(request)
                if request.promotion is not None or request.restore is not None:
                    return
        self.give_up_prefetch()
        self._begin(request)

    def _begin(self, climber: "Request | _Foreseen") -> None:
        if self._swap is not None:
            climber.promotion = self._swap.begin(climber.ids)
        if climber.promotion is not None:
            self._climbing.append(climber)
        else:
            self._restore(climber)

    def _restore(self, climber: "Request | _Foreseen") -> None:
        """Ask the disk; for what no request has asked for yet nobody would compute a front."""
        if self._persistence is None:
            return
        if isinstance(climber, _Foreseen):
            climber.restore = self._persistence.begin(climber.ids, is_foreseen=True)
        else:
            is_one_shot = climber.spec.is_one_shot
            climber.restore = self._persistence.begin(climber.ids, is_one_shot=is_one_shot)

    def promote(self, request: Request) -> bool:
        """Whether some of a request that is about to run comes up from host memory first.

        Asked once each time it begins to wait: it may have waited long, or been sent back.
        """
        if self._swap is None or request.promotion is not None:
            return False
        request.promotion = self._swap.begin(request.ids)
        return request.promotion is not None

    def give_up_prefetch(self) -> None:
        if self._foreseen is not None:
            self._foreseen.give_up()
        self._foreseen = None

    def give_up(self, requests: Sequence[Request]) -> None:
        """End everything, or the disk's reader would wait for a place to put a piece."""
        self.give_up_prefetch()
        self._climbing.clear()
        for request in requests:
            if request.promotion is not None:
                request.promotion.give_up()
            if request.restore is not None:
                request.restore.give_up()

    def settle(self, requests: Sequence[Request]) -> bool:
        """Take in what slower tiers have delivered; whether somebody still waits for more.

        Where all requests wait it waits with them, for the next delivery or a moment.
        """
        num_waiting = sum(request.awaits_kv for request in requests) + self.is_prefetching
        is_idle = not any(request.state is State.RUNNING for request in requests)
        if (num_waiting and num_waiting >= len(requests)) or (is_idle and self.is_under_way):
            self._wait_for_news()
        if self._swap is not None:
            self._swap.settle(may_sink=not (num_waiting or self._live_restores(requests)))
        self._climb()
        for restore in self._live_restores(requests):
            assert self._persistence is not None
            self._persistence.settle(restore)
        return any(request.awaits_kv for request in requests) or self.is_prefetching

    def _wait_for_news(self) -> None:
        if self._swap is not None and self.is_under_way:
            self._swap.wait_for_news()
        elif self._persistence is not None:
            self._persistence.wait_for_news()

    def _climb(self) -> None:
        """Where a promotion is over, go on with what the disk has behind it."""
        for climber in list(self._climbing):
            if climber.promotion is not None and not climber.promotion.is_over:
                continue
            self._climbing.remove(climber)
            is_wanted = isinstance(climber, _Foreseen) or climber.state is State.WAITING
            if is_wanted:
                self._restore(climber)

    def _live_restores(self, requests: Sequence[Request]) -> "list[Restore]":
        restores = [request.restore for request in requests]
        if self._foreseen is not None:
            restores.append(self._foreseen.restore)
        return [restore for restore in restores if restore is not None and not restore.is_over]
