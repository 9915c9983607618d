"""StepThreads: on how many threads a CPU computes a step, chosen by measuring.

A small step is short, so counts are compared from step to step. A large one takes up to seconds, so
the count changes within it.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

MOST_ROWS = 16  # of a small step
# A race compares this many steps of each count. They alternate, so that a growing context or a
# change in the machine's speed affects both counts alike.
TRIED = 5
# Steps between races, at first and at most. Two races in a row without a change double them.
SOON, SELDOM = 16, 512
# A rival wins only if its time is below this share of the present one.
_WORTH = 0.95
# A step this many times slower than usual suggests a busy machine. If half of the latest steps are
# that slow, a race begins at once.
_SLOWER, _MANY_SLOWER = 1.5, 6
# A large step looks at its threads once in so many seconds.
_WINDOW_S = 0.05
# If the threads ran for less than this share of that time, half of them go on. With all cores free
# the share was 0.96 and above. Two threads of a 0.4 B model in 16 bits, 64 rows, took 3.4 s beside
# one busy program and 14 s beside two; one thread took 2.2 and 4.5 s.
_BUSY = 0.55
# After so many seconds twice as many are tried again: at a cost of one window, if that is too many.
_RETRY_S = 1.0


class StepThreads:
    """Runs each step on the number of threads that is fastest, at most `most`.

    A decode step is about a hundred matrix products of about ten microseconds each, and the threads
    wait for each other after each product. For a small model one thread is faster. For a large one
    several threads are faster, until other programs use their cores: then each product waits for a
    thread that is not running. So from time to time a few steps run on half or twice as many
    threads, alternating with the present count, and the faster count stays.

    Large steps have long products and begin on all threads. While one runs, the function that
    `watching` returns looks whether the threads can run.

    `set_threads` applies to the calling thread; after each step the number is `most` again. Owned
    by the thread that runs the steps. `clock` and `cpu_clock` return seconds, and those for which
    all threads of the process have run.
    """

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.most = most
        self._large = _LargeSteps(most, set_threads, clock, cpu_clock)
        self._set_threads = set_threads
        self._clock = clock
        self._counts = sorted({most, *(1 << n for n in range(most.bit_length()))})
        self._races: dict[int, _Race] = {}

    def run(self, num_rows: int, step: Callable[[], T]) -> T:
        """Run `step`, which computes `num_rows` tokens, and return its result."""
        if self.most == 1:
            return step()
        if num_rows > MOST_ROWS:
            return self._large.run(step)
        race = self._races.get(num_rows)
        if race is None:
            race = self._races[num_rows] = _Race(self._counts, self._likely(num_rows))
        count = race.next_count()
        if count < self.most:
            self._set_threads(count)
        start_s = self._clock()
        try:
            result = step()
            race.note(count, self._clock() - start_s)
            return result
        finally:
            if count < self.most:
                self._set_threads(self.most)

    def watching(self, is_unwanted: Callable[[], bool]) -> Callable[[], bool]:
        """Return `is_unwanted` for a step that asks it often; it also looks at the threads."""
        if self.most == 1:
            return is_unwanted

        def ask() -> bool:
            self._large.look()
            return is_unwanted()

        return ask

    def num_threads(self, num_rows: int = 1) -> int:
        """Return the number of threads such steps use now, outside races."""
        race = self._races.get(num_rows)
        return race.best if race is not None else self.most

    def _likely(self, num_rows: int) -> int:
        """Return the best count for the nearest number of rows; `most` if there is none."""
        nearest = min(self._races, key=lambda rows: abs(rows - num_rows), default=None)
        return self._races[nearest].best if nearest is not None else self.most


class _LargeSteps:
    """Runs large steps, on fewer threads while other programs use the cores.

    A thread that has no core keeps all others waiting at the end of each product, and a waiting
    thread soon sleeps. So the processor time that the threads use tells whether they can run.
    """

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], None],
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
    ) -> None:
        self._most = most
        self._set_threads = set_threads
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._count = most
        self._lowered_s = 0.0
        self._is_running = False
        self._began = (0.0, 0.0)  # of the window, by both clocks

    def run(self, step: Callable[[], T]) -> T:
        self._is_running = True
        self._use(self._count)
        try:
            return step()
        finally:
            self._is_running = False
            self._set_threads(self._most)

    def look(self) -> None:
        """Use fewer threads if these could not run; more, if these were lowered a while ago."""
        if not self._is_running:
            return
        now_s = self._clock()
        seconds = now_s - self._began[0]
        if seconds < _WINDOW_S:
            return
        share = (self._cpu_clock() - self._began[1]) / (seconds * self._count)
        if share < _BUSY and self._count > 1:
            self._lowered_s = now_s
            self._use(self._count // 2)
        elif self._count < self._most and now_s - self._lowered_s >= _RETRY_S:
            self._lowered_s = now_s
            self._use(min(2 * self._count, self._most))
        else:
            self._began = (now_s, self._cpu_clock())

    def _use(self, count: int) -> None:
        self._count = count
        self._set_threads(count)
        self._began = (self._clock(), self._cpu_clock())


class _Race:
    """Races between neighbours in `counts`, for one number of rows.

    `counts` has at least two items. `best` is the winner of the last race.
    """

    def __init__(self, counts: Sequence[int], best: int) -> None:
        self.best = best
        self._counts = counts
        self._is_for_fewer = True
        self._rival: int | None = None
        self._steps_left = TRIED  # the first steps load code and touch memory for the first time
        self._pause = SOON
        self._num_unchanged = 0
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
        """Record the seconds of a step with that count."""
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
        """Return the neighbour in the direction to try; at an end of `counts`, the other one."""
        place = self._counts.index(self.best)
        step = -1 if self._is_for_fewer else 1
        neighbour = place + step if 0 <= place + step < len(self._counts) else place - step
        return self._counts[neighbour]

    def _decide(self, rival: int) -> None:
        """Keep the faster count; next, go on in its direction, or try the other direction."""
        own, self._rival = self.best, None
        own_s, rival_s = (statistics.median(self._seconds[n]) for n in (own, rival))
        self._usual_s = min(own_s, rival_s)
        self._recent.clear()
        self._is_for_fewer = rival < own
        if rival_s < _WORTH * own_s:
            self.best, self._pause, self._num_unchanged = rival, SOON, 0
            self._steps_left = 1 if self._next_rival() != own else SOON
            return
        self._is_for_fewer = not self._is_for_fewer
        self._num_unchanged += 1
        # Both directions are tried before the pause grows.
        if self._num_unchanged % 2 == 0:
            self._pause = min(2 * self._pause, SELDOM)
        self._steps_left = self._pause
