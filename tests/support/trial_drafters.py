"""Drafters for tests: one that knows the future, one that knows nothing, one that cannot decide.

Each keeps within what the interface allows, or breaks it on purpose where its name says so.
"""

import random
from collections.abc import Sequence

from kvchat.engine.drafters import DraftOrder, Offer
from kvchat.engine.request import Request
from support.remembering_model import VOCAB_SIZE, complete_without_cache


class OracleDrafter:
    """Proposes what will be drawn; each token is spoilt with the probability `error`."""

    name = "draft"

    def __init__(self, error: float = 0.0, seed: int = 0, max_context: int = 120) -> None:
        self._random = random.Random(seed)
        self._error = error
        self._max_context = max_context
        self._futures: dict[Request, list[int]] = {}
        self.updated: list[Sequence[Request]] = []
        self.is_closed = False

    def offer(self, request: Request, most: int) -> Offer | None:
        return Offer("oracle", most, is_free=False) if self._future(request) else None

    def prepare(self) -> None:
        """The future is as good as it gets."""

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        """The future needs no reading."""

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        return [self._spoilt(self._future(w.request)[: w.num_tokens]) for w in wanted]

    def _future(self, request: Request) -> list[int]:
        if request not in self._futures:
            self._futures[request] = complete_without_cache(
                request.spec, request.sample, self._max_context
            )
        return self._futures[request][request.num_generated :]

    def _spoilt(self, ids: list[int]) -> list[int]:
        return [
            (token + 1) % VOCAB_SIZE if self._random.random() < self._error else token
            for token in ids
        ]

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        self.updated.append(list(requests))

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        raise AssertionError("it was taught the future already")

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> None:
        self._futures.clear()

    def close(self) -> None:
        self.is_closed = True


class GarbageDrafter(OracleDrafter):
    """Proposes anything: ids at random, ids that do not exist, more than asked for, nothing."""

    def offer(self, request: Request, most: int) -> Offer | None:
        return Offer("garbage", most, is_free=True)

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        return [
            [self._random.randrange(-2, VOCAB_SIZE + 2) for _ in range(self._random.randrange(9))]
            for _ in wanted
        ]


class FickleDrafter(OracleDrafter):
    """Is right now and wrong then, long now and short then, and sometimes offers nothing."""

    def offer(self, request: Request, most: int) -> Offer | None:
        self._error = self._random.choice((0.0, 0.1, 0.5, 1.0))
        if self._random.random() < 0.2:
            return None
        return Offer("fickle", self._random.randint(1, most), is_free=False)


class FailingDrafter(OracleDrafter):
    """Is right until it has been asked `num_good` times, and then raises in the method named."""

    def __init__(self, method: str, num_good: int) -> None:
        super().__init__()
        self._method = method
        self._num_left = num_good

    def _count(self, method: str) -> None:
        if method == self._method:
            self._num_left -= 1
            if self._num_left < 0:
                raise RuntimeError("the draft fell over")

    def offer(self, request: Request, most: int) -> Offer | None:
        self._count("offer")
        return super().offer(request, most)

    def prepare(self) -> None:
        self._count("prepare")
        super().prepare()

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        self._count("catch_up")
        super().catch_up(wanted)

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        self._count("propose")
        return super().propose(wanted)

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        self._count("update")
        super().update(requests, seconds)

    def close(self) -> None:
        self._count("close")
        super().close()
