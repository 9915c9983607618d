"""The time that one answer of a script may take, with all its calls of tools, and what ends it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvchat.chat.host import ChatHost
from kvchat.chat.reply import Reply
from kvchat.cli.streams import Interrupted, Interruption
from kvchat.core.types import FinishReason


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
        timer = _started_timer(left_s, stop)
        try:
            yield
        finally:
            timer.cancel()

    def limit(self, reply: Reply, interruption: Interruption) -> threading.Timer | None:
        """Start the timer that ends a reply in time; None for any time.

        It ends a write of the reply that waits for its reader, too.
        """
        left_s = self.left_s
        if left_s is None:
            return None

        def end() -> None:
            if reply.is_finished:
                return
            reply.cancel(FinishReason.TIMEOUT)
            interruption.end_stalled_writes()

        return _started_timer(left_s, end)


@contextmanager
def limited(
    host: ChatHost, reply: Reply, answer_time: AnswerTime, interruption: Interruption
) -> Iterator[None]:
    """Within the block the time limit and signals end a reply; the model is loaded first.

    Raises TimedOut where that takes too long, and Interrupted: loading has nothing to save.
    """

    def cancel() -> None:
        if host.ready is None:  # loading cannot be cancelled
            assert interruption.code is not None
            raise Interrupted(interruption.code)
        reply.cancel()

    timer = None
    interruption.watch(cancel)
    try:
        if (left_s := answer_time.left_s) is not None:
            host.wait_until_loaded(left_s)
            timer = answer_time.limit(reply, interruption)
        yield
    finally:
        interruption.watch(None)
        if timer is not None:
            timer.cancel()
            interruption.allow_stalled_writes()


def _started_timer(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer
