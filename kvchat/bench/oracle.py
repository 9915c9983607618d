"""OracleDrafter: knows the text that is coming, and is right as often as it is told to be.

Lets speculation be measured on weights that mean nothing, at any acceptance. Costs nothing itself.
"""

import random
from collections.abc import Sequence

from kvchat.engine.drafters import Offer, Wanted
from kvchat.engine.request import Request


class OracleDrafter:
    """Drafts `future`, the completion of every request, each token right with probability `rate`.

    Whether a token is right depends on its place alone, so that every run is like the others.
    """

    name = "draft"

    def __init__(self, future: Sequence[int], rate: float, vocab_size: int) -> None:
        chances = random.Random(0)
        self._ids = [
            token if chances.random() < rate else (token + 1) % vocab_size for token in future
        ]
        self._source = f"oracle {rate:g}"

    def offer(self, request: Request, most: int) -> Offer | None:
        left = min(most, len(self._ids) - request.num_generated)
        return Offer(self._source, left, is_free=True) if left > 0 else None

    def prepare(self) -> None:
        """It knows everything already."""

    def catch_up(self, wanted: Sequence[Wanted]) -> None:
        """It knows everything already."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Sequence[int]]:
        starts = [want.request.num_generated for want in wanted]
        return [self._ids[s : s + w.num_tokens] for s, w in zip(starts, wanted, strict=True)]

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        """It knows everything already."""

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """It knows everything already."""

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> None:
        """What it knows is no context."""

    def close(self) -> None:
        """It holds nothing."""
