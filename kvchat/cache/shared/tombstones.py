"""Tombstones: which records of a shared store were forgotten here, and when.

A store may return a record that was removed from it, from a backup or on purpose.
"""

import time
from collections.abc import Callable, Sequence

from kvchat.core.types import Fact, Memory

_FACT = ("shared", "forgotten")
_MOST = 1 << 16


class Tombstones:
    """Names of records that were forgotten, in a memory; a name tells nothing of its record."""

    def __init__(self, memory: Memory, clock: Callable[[], float] = time.time) -> None:
        self._memory = memory
        self._clock = clock
        self._known = _sound(memory.get(*_FACT))

    def forgot_after(self, name: str, written_s: float) -> bool:
        """Whether a record written then was forgotten since."""
        forgotten_s, _ = self._known.get(name, (0.0, 0.0))
        return written_s <= forgotten_s

    def put(self, names: Sequence[str], now_s: float, ttl_s: float) -> None:
        """Note that records were forgotten, for as long as they could be believed."""
        new = dict.fromkeys(names, (now_s, now_s + 2 * ttl_s))

        def with_new(fact: Fact) -> Fact:
            current = {n: t for n, t in _sound(fact).items() if t[1] > self._clock()}
            newest = list({**current, **new}.items())[-_MOST:]
            return {name: list(times) for name, times in newest}

        if new:
            self._memory.update(*_FACT, with_new)
            self._known |= new


def _sound(fact: Fact) -> dict[str, tuple[float, float]]:
    """Return names with the times of their tombstones; anything else in a fact is left out."""
    found = fact if isinstance(fact, dict) else {}
    return {
        name: (float(times[0]), float(times[1]))
        for name, times in found.items()
        if isinstance(times, list)
        and len(times) == 2
        and all(isinstance(t, int | float) for t in times)
    }
