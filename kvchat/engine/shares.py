"""Shares: how many places and how much KV each client has in the scheduler, and each request.

A place is a running sample. Clients share first: a program that opens many requests has no more
than one that opens a few, if both want more. The requests of one client share what it has.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from kvchat.engine.request import Request


class Shares:
    """What the samples that run now have; made anew for each decision."""

    def __init__(self, running: Sequence[Request]) -> None:
        self._running = running
        self._places = Counter(owner for request in running for owner in _owners(request))

    def places(self, request: Request) -> tuple[int, int]:
        """Return the places of a request's client, and its own: the fewer, the sooner it runs."""
        client, own = _owners(request)
        return self._places[client], self._places[own]

    def largest(self, running: Sequence[Request]) -> Request:
        """Return the youngest sample of the request with most places of the client with most.

        `running` are one or more samples, the oldest first.
        """
        return max(reversed(running), key=self.places)

    def is_due(self, waiting: Request, running: Request, needed: int = 0) -> bool:
        """Return whether a waiting sample should have the place of a running one.

        So it is if its client, or of one client its request, has two places fewer: then both do not
        take turns. With `needed` blocks it must also have fewer than the other has now.
        """
        owners = zip(_owners(waiting), _owners(running), strict=True)
        ours, theirs = next((each for each in owners if each[0] != each[1]), (None, None))
        if ours == theirs or self._places[theirs] <= self._places[ours] + 1:
            return False
        return not needed or self._num_blocks(ours) + needed < self._num_blocks(theirs)

    def _num_blocks(self, owner: Hashable) -> int:
        """Return how many blocks a client or a request has; samples share some."""
        tables = [each.table for each in self._running if owner in _owners(each)]
        return len({block for table in tables if table is not None for block in table.blocks})


def _owners(request: Request) -> tuple[Hashable, Hashable]:
    """Return what stands for a request's client, and for the request."""
    return request.spec.client, request.request_id
