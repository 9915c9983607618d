"""A clock that only the test moves, for threads that take time: sleeping is waiting for it.

Moving it waits until every sleeper it wakes is asleep again, or done: what happens at which time
does not depend on the machine.
"""

import threading

_PATIENCE_S = 60.0


class VirtualClock:
    """Seconds since the test began. `sleep` may be called from any thread but the one that moves
    the clock.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._changed = threading.Condition()
        self._sleepers: list[float] = []
        self._num_awake = 0
        self._is_over = False

    def __call__(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Wait until the clock has moved on by so much, or for good."""
        assert seconds > 0
        with self._changed:
            due_s = self._now_s + seconds
            self._sleepers.append(due_s)
            self._num_awake -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._now_s >= due_s or self._is_over)
            self._sleepers.remove(due_s)

    def begin_work(self) -> None:
        """A worker runs from now on, and the clock waits while it does not sleep."""
        with self._changed:
            self._num_awake += 1

    def end_work(self) -> None:
        with self._changed:
            self._num_awake -= 1
            self._changed.notify_all()

    def advance(self, seconds: float) -> None:
        """Move on, moment by moment where a worker is to wake."""
        target_s = self._now_s + seconds
        if self._is_over:
            return
        with self._changed:
            while True:
                self._settle()
                due_s = min(self._sleepers, default=target_s)
                self._now_s = max(self._now_s, min(due_s, target_s))
                num_woken = sum(due <= self._now_s for due in self._sleepers)
                self._num_awake += num_woken
                self._changed.notify_all()
                if self._now_s >= target_s and not num_woken:
                    return

    def _settle(self) -> None:
        done = self._changed.wait_for(
            lambda: self._num_awake == 0 and all(due > self._now_s for due in self._sleepers),
            _PATIENCE_S,
        )
        assert done, "a worker never ends"

    def end(self) -> None:
        """Wake everybody."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
