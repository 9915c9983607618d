"""Restore: one prompt's KV on its way up from a slower tier, piece by piece between two threads.

Holds and counts what was read; what is done with it is `restoring.py`'s. Knows no tier, no device
and no request.
"""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Event

from kvchat.cache.codec import Canary
from kvchat.core.types import Lack, TokenIds

# What is read before the front is computed waits in memory: 256 MiB of packs at most.
_MAX_PIECES_IN_FLIGHT = 64
_PLACE_PATIENCE_S = 0.05
# Memory that was read into before takes a quarter of the time of fresh memory: so the reader stays
# this little ahead of an engine that keeps up. One that does not is not waited for; the patience is
# twice what the slowest pack took to be taken (9 ms, its pages in the KV pool all fresh), and about
# what reading one into fresh memory would cost beside that.
_PIECES_AHEAD = 1
_TAKING_PATIENCE_S = 0.02


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_blocks` block images that belong at `start_block` of the prompt being restored.

    `canary` is that of its last token, where there is one.
    """

    start_block: int
    num_blocks: int
    image: bytearray | memoryview
    canary: Canary | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """A context that came up, from its token `num_trusted` on, and is to be proven.

    Its last token is to be computed once more, and held against its KV and the canary, if any.
    """

    ids: list[int]
    num_trusted: int
    canary: Canary | None


@dataclass(slots=True, eq=False)
class Restore:
    """One prompt on its way back. Made and read by the engine's thread, fed by the transfer thread.

    `num_known` counts the leading tokens that the device had, `num_tokens` those restored so far.
    `give_up` ends it; what is on the device stays. `lack` says why no more is.

    # [0, num_known)                the device had it
    # [num_known, num_front)        to be computed while the rest is read, as far as it is not
    #                               there; `num_front` is 0 where it is quicker to wait
    # [num_trusted, num_arrived)    tokens that came up and are still to be proven; `canary` is that
    #                               of the last

    `num_planned` is the front that the reader leaves to be computed, for the engine to take over.

    `num_put` counts the pieces delivered, `num_taken` those of them that are on the device or will
    never be; as many as `num_awaited` were when the engine was last waited for in vain.

    `since_s` is when the last piece of use came, or the first was asked for; `piece_bytes` are
    those of a large piece, as far as they are known. A prefetch `is_foreseen`: nobody waits for it,
    and nobody would compute a front of it. `is_one_shot` where whoever asks will hardly go on.
    """

    ids: TokenIds
    num_known: int
    since_s: float
    is_foreseen: bool
    is_one_shot: bool = False
    num_front: int = 0
    num_planned: int = 0
    num_hurries: int = 0
    piece_bytes: int = 0
    is_opening: bool = False
    held: "deque[Piece]" = field(default_factory=deque)
    pieces: "SimpleQueue[Piece]" = field(default_factory=SimpleQueue)
    places: BoundedSemaphore = field(
        default_factory=lambda: BoundedSemaphore(_MAX_PIECES_IN_FLIGHT)
    )
    num_put: int = 0
    num_taken: int = 0
    num_awaited: int = -1
    has_taken: Event = field(default_factory=Event)
    has_all: Event = field(default_factory=Event)
    is_given_up: Event = field(default_factory=Event)
    lack: Lack | None = None
    num_tokens: int = 0
    num_trusted: int = 0
    num_arrived: int = 0
    canary: Canary | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        if self.is_given_up.is_set():
            return True
        return self.has_all.is_set() and self.pieces.empty() and not self.held

    def give_up(self) -> None:
        """End it, and let go of what was read: whoever asked may live as long as its answer."""
        self.is_given_up.set()
        self.held.clear()
        self.let_go()

    def let_go(self) -> None:
        """Drop what was delivered and nobody will take."""
        with suppress(Empty):
            while True:
                self.pieces.get_nowait()

    # For the engine's thread

    def collect(self) -> None:
        """Take over what was delivered since."""
        if self.is_given_up.is_set():
            return
        with suppress(Empty):
            while True:
                self.held.append(self.pieces.get_nowait())

    # For the transfer thread

    def has_place(self) -> bool:
        """Take a place, waiting a moment for it; false where none is free, or nobody wants it."""
        return self.places.acquire(timeout=_PLACE_PATIENCE_S) and not self.is_given_up.is_set()

    def deliver(self, piece: Piece) -> None:
        """Hand over what was read in the place taken last."""
        self.num_put += 1
        self.pieces.put(piece)
        if self.is_given_up.is_set():
            self.let_go()

    def let_engine_take(self) -> None:
        """Let the engine take a piece where some wait for it, if it does so at once.

        One that is waited for in vain, as while a front is computed, is not again until it has
        taken something.
        """
        self.has_taken.clear()
        num_taken = self.num_taken
        if self.num_put - num_taken < _PIECES_AHEAD or num_taken == self.num_awaited:
            return
        if not self.has_taken.wait(_TAKING_PATIENCE_S):
            self.num_awaited = num_taken
