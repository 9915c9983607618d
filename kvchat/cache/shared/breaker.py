"""Breaker: stops asking a store that fails, for a time that doubles with each further failure."""

import time
from collections.abc import Callable

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 300.0
_MOST_DOUBLINGS = 9


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
        doublings = min(self._num_failures, _MOST_DOUBLINGS)
        self._rests_until_s = self._clock() + min(_LONGEST_REST_S, _FIRST_REST_S * 2**doublings)
        self._num_failures += 1
        self.trouble = trouble
