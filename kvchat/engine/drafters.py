"""Drafter: the interface of everything that guesses the next tokens, and its data types.

A drafter cannot change a text, only its speed: every draft is verified by the target model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kvchat.engine.request import Request

# Calls its argument once, when pending writes are done, perhaps on another thread.
WhenWritten = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Offer:
    """A drafter's offer for a request: at least one token and at most `most`.

    `source` names the kind of guess; acceptance is recorded for each source. `is_free` says that
    the cost of drafting is too small to count, for any number of tokens.
    """

    source: str
    most: int
    is_free: bool


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """An order for `num_tokens` tokens after a request's newest one."""

    request: Request
    num_tokens: int


class Drafter(Protocol):
    """Belongs to one engine and its thread. If it raises, the engine stops using it.

    `name` is what users select it by: `ngram`, `draft` or `mtp`. A subclass need not have what it
    would do nothing in: `prepare`, `catch_up`, `learn`.
    """

    name: str

    def offer(self, request: Request, most: int) -> Offer | None:
        """Return an offer for a decoding request; None if nothing can be drafted.

        Costs little. The engine may ask again without having accepted the offer.
        """

    def prepare(self) -> None:
        """Do one-time work that makes later steps faster; it may take the time of a few steps."""
        return

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        """Compute what is missing for these requests, so that `propose` takes its usual time.

        The engine calls it before every `propose`, with the same requests.
        """
        return

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        """Draft for several requests at once, for each at most as many tokens as it was offered."""

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        """After a step: drop the state of all but the unfinished `requests`; catch up with those.

        `seconds` is about how long this may take.
        """

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """Learn contexts that no request has asked for, such as other branches of a chat."""
        return

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> WhenWritten | None:
        """Forget contexts except the given number of leading tokens of each; may forget more.

        Does not wait. Returns a function that reports when no write of them is pending, or None if
        none is pending now.
        """

    def close(self) -> None:
        """Store what is worth keeping, and release everything. Idempotent."""


@runtime_checkable
class HiddenReader(Drafter, Protocol):
    """A drafter that goes on from the model's last hidden states."""

    def read_hidden(self, request: Request, rows: torch.Tensor) -> None:
        """Take those of a request's tokens from `num_computed` on, [tokens, hidden]; keeps them."""
