"""AnswerTime: how long one answer of a script may take, with all its calls of tools."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class AnswerTime:
    """The time of one answer: so many seconds from `begin` on, None for any."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._end_s: float | None = None

    def begin(self) -> None:
        """Begin to count; later calls change nothing."""
        if self._limit_s is not None and self._end_s is None:
            self._end_s = time.monotonic() + self._limit_s

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, None for any."""
        if self._end_s is None:
            return self._limit_s
        return max(0.0, self._end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` on another thread when the time is over within the block."""
        left_s = self.left_s
        if left_s is None:
            yield
            return
        timer = threading.Timer(left_s, stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
