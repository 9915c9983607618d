"""StepThreads: how many threads a small step runs on, found out by trying.

A decode step is a hundred products of some ten microseconds, and behind each of them the threads
wait for each other. For a small model one thread is the quicker; for a large one several are, until
something else wants their cores: then each product waits for the one thread that is not running. So
now and then a few steps run on half or twice as many threads, in turn with others that do not, and
the quicker count stays. Large steps have long products, and always take all threads.

Knows clocks and counts; knows no model.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

MOST_ROWS = 16
# So many steps of each count are compared, taken in turn: a context that grows, and a machine that
# changes its speed, do so for both.
TRIED = 5
# Steps between races, at first and at most: each that changes nothing doubles them.
SOON, SELDOM = 16, 512
# What is quicker by less is not worth the change.
_WORTH = 0.95
# A machine that has become busy shows in steps that take longer by half: where half of the latest
# ones do, the race is now.
_SLOWER, _MANY_SLOWER = 1.5, 6


class StepThreads:
    """Runs steps, each on as many threads as pay, `most` at most.

    `set_threads` takes effect for the calling thread, and between steps it is `most`. Whoever runs
    the steps owns it.
    """

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most = most
        self._set_threads = set_threads
        self._clock = clock
        self._counts = sorted({most, *(1 << n for n in range(most.bit_length()))})
        self._races: dict[int, _Race] = {}

    def run(self, num_rows: int, step: Callable[[], T]) -> T:
        """Return what `step`, which computes `num_rows` tokens, returns."""
        if num_rows > MOST_ROWS or self.most == 1:
            return step()
        race = self._races.get(num_rows)
        if race is None:
            race = self._races[num_rows] = _Race(self._counts, self._likely(num_rows))
        count = race.next_count()
        self._set_threads(count)
        start_s = self._clock()
        try:
            result = step()
            race.note(count, self._clock() - start_s)
            return result
        finally:
            self._set_threads(self.most)

    def num_threads(self, num_rows: int = 1) -> int:
        """Return on how many threads such steps run at present, races apart."""
        race = self._races.get(num_rows)
        return race.best if race is not None else self.most

    def _likely(self, num_rows: int) -> int:
        """Return what has been found for the nearest number of rows, or else all."""
        nearest = min(self._races, key=lambda rows: abs(rows - num_rows), default=None)
        return self._races[nearest].best if nearest is not None else self.most


class _Race:
    """The races for one number of rows, between neighbours in `counts`, of which there are two at
    least. `best` is the count that won the last one.
    """

    def __init__(self, counts: Sequence[int], best: int) -> None:
        self.best = best
        self._counts = counts
        self._is_for_fewer = True
        self._rival: int | None = None
        self._steps_left = TRIED  # the first steps load code and touch memory for the first time
        self._pause = SOON
        self._num_in_vain = 0
        self._seconds: dict[int, list[float]] = {}
        self._usual_s = 0.0
        self._recent: deque[bool] = deque(maxlen=2 * _MANY_SLOWER)

    def next_count(self) -> int:
        """Return the count for the next step."""
        if self._rival is None:
            return self.best
        mine, other = len(self._seconds[self.best]), len(self._seconds[self._rival])
        return self._rival if other <= mine else self.best

    def note(self, count: int, seconds: float) -> None:
        """Take in what a step with that count took."""
        if self._rival is not None:
            self._seconds[count].append(seconds)
            if all(len(times) == TRIED for times in self._seconds.values()):
                self._decide(self._rival)
            return
        self._steps_left -= 1
        self._recent.append(seconds > _SLOWER * self._usual_s > 0.0)
        if sum(self._recent) >= _MANY_SLOWER:
            self._steps_left, self._pause, self._is_for_fewer = 0, SOON, True
        if self._steps_left <= 0:
            self._begin()

    def _begin(self) -> None:
        self._rival = self._next_rival()
        self._seconds = {self.best: [], self._rival: []}

    def _next_rival(self) -> int:
        """Return the neighbour in the direction to be tried, or the other where there is none."""
        place = self._counts.index(self.best)
        step = -1 if self._is_for_fewer else 1
        neighbour = place + step if 0 <= place + step < len(self._counts) else place - step
        return self._counts[neighbour]

    def _decide(self, rival: int) -> None:
        """Keep the quicker count; go on in its direction, or try the other one next."""
        own, self._rival = self.best, None
        own_s, rival_s = (statistics.median(self._seconds[n]) for n in (own, rival))
        self._usual_s = min(own_s, rival_s)
        self._recent.clear()
        self._is_for_fewer = rival < own
        if rival_s < _WORTH * own_s:
            self.best, self._pause, self._num_in_vain = rival, SOON, 0
            self._steps_left = 1 if self._next_rival() != own else SOON
            return
        self._is_for_fewer = not self._is_for_fewer
        self._num_in_vain += 1
        # Both directions have their turn before the pause grows.
        if self._num_in_vain % 2 == 0:
            self._pause = min(2 * self._pause, SELDOM)
        self._steps_left = self._pause
