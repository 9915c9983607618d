"""How long a store that fails is left alone: a time that doubles with each further failure."""

import time
from collections.abc import Callable

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 300.0
_MOST_DOUBLINGS = 9


def rest_s(num_failures: int) -> float:
    """Return how long to leave a store alone after so many failures in a row, in seconds."""
    doublings = min(max(0, num_failures - 1), _MOST_DOUBLINGS)
    return min(_LONGEST_REST_S, _FIRST_REST_S * 2**doublings)


class Breaker:
    """Says whether a store may be asked. `clock` returns seconds. One thread uses it; any may read.

    `trouble` is the reason of the failure that it rests after; "" if the last call succeeded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0
        self._rests_until_s = 0.0
        self.trouble = ""

    @property
    def is_resting(self) -> bool:
        return self._clock() < self._rests_until_s

    @property
    def has_failed(self) -> bool:
        """Whether the last call failed."""
        return self._num_failures > 0

    def note_success(self) -> None:
        self._num_failures, self._rests_until_s, self.trouble = 0, 0.0, ""

    def note_failure(self, trouble: str) -> None:
        self._num_failures += 1
        self._rests_until_s = self._clock() + rest_s(self._num_failures)
        self.trouble = trouble
