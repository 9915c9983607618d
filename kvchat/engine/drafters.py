"""Drafter: what guesses the tokens that come next, whatever it is made of.

The interface alone, and what passes through it. A drafter cannot change a text, only its speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvchat.engine.request import Request

# Calls what it is given, once, perhaps on another thread.
WhenWritten = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a drafter could do for a request now: at least one token and at most `most`.

    `source` names the kind of guess: how often guesses are right is remembered by it. `is_free`
    where drafting costs nothing worth counting, however many tokens are drafted.
    """

    source: str
    most: int
    is_free: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """`num_tokens` tokens wanted after a request's newest one.

    `hidden`, [hidden_size], is the target's last hidden state of the request, for drafters that
    are heads on the target; None where nobody asked for it.
    """

    request: Request
    num_tokens: int
    hidden: torch.Tensor | None = None


class Drafter(Protocol):
    """Belongs to one engine and its thread. It may raise: then it is not asked again."""

    @property
    def name(self) -> str:
        """What users switch it by: `ngram` or `draft`."""

    def offer(self, request: Request, most: int) -> Offer | None:
        """Say what could be drafted for a decoding request; None where nothing can.

        Costs little, whether or not the offer is taken up before the next one is asked for.
        """

    def prepare(self) -> None:
        """Spend the time of a few steps on making others faster: nobody waits for a first token."""

    def catch_up(self, wanted: Sequence[Wanted]) -> None:
        """Make up for what was left undone while nobody asked, so that drafting costs what it will
        cost from now on. Every `propose` of the same requests follows one.
        """

    def propose(self, wanted: Sequence[Wanted]) -> list[Sequence[int]]:
        """Draft for several requests at once, for each at most as many tokens as it has offered."""

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        """After a step: let go of all but the unfinished `requests`, and catch up with those.

        `seconds` is about how long that may take.
        """

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """Take in contexts that no request has asked for, such as other branches of a chat."""

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> WhenWritten | None:
        """Forget contexts behind so many tokens of each, and more where that is easier.

        Returns at once: what tells when nothing of theirs is still to be written, None for now.
        """

    def close(self) -> None:
        """Keep what is worth keeping, and let go of everything. Idempotent."""
