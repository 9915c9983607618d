"""Delivers the engine thread's events on an event loop: an answer's in frames, and load events.

The first event after a pause is shown at once, later ones in frames. The frame interval grows with
the cost of drawing, so that drawing takes a small share of the time.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvchat.chat.events import ChatEvent
from kvchat.chat.reply import SAVE_INTERVAL_S, Reply
from kvchat.core.events import LoadEvent

# Drawing may take this share of the time; the frame interval stays within 40 to 250 ms.
_DRAWING_SHARE = 0.015
_MIN_FRAME_S = 0.04
_MAX_FRAME_S = 0.25
_MAX_FRAME_COST_S = 0.008


class FramePacer:
    """Computes when the next frame is due, from the cost of the last frames."""

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._last_s = float("-inf")

    def drawn(self, cost_s: float, now_s: float) -> None:
        """Record that a frame was drawn and took `cost_s` of CPU time."""
        # Capped: a cost that occurs once, such as an import, does not predict the next frame.
        self._cost_s += 0.2 * (min(cost_s, _MAX_FRAME_COST_S) - self._cost_s)
        self._last_s = now_s

    @property
    def interval_s(self) -> float:
        return min(_MAX_FRAME_S, max(_MIN_FRAME_S, self._cost_s / _DRAWING_SHARE))

    def delay_s(self, now_s: float) -> float:
        """Return the seconds to wait before the next frame."""
        return max(0.0, self._last_s + self.interval_s - now_s)


class ReplyStream:
    """Passes one reply's events to `show`, on the loop that awaits `run`.

    The engine's thread calls `notify`. `show` is called with the events since the last frame, at
    least once a second while the reply lasts. Its CPU time counts as the cost of drawing.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        show: Callable[[list[ChatEvent]], None],
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._loop = loop
        self._show = show
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._pacer = FramePacer()
        self._reply: Reply | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_announced = False
        self._is_urgent = False
        self._error: Exception | None = None
        self._finished: asyncio.Future[None] = loop.create_future()

    def notify(self) -> None:
        """Schedule a frame. Called on the engine's thread, for every event."""
        if not self._is_announced:
            self._is_announced = True
            with suppress(RuntimeError):  # the loop has ended: nothing is shown any more
                self._loop.call_soon_threadsafe(self._schedule)

    def hurry(self) -> None:
        """Show further events without delay, because the user waits for the answer to stop."""
        self._is_urgent = True
        self._schedule()

    async def run(self, reply: Reply) -> None:
        """Show the reply's events until it is finished."""
        self._reply = reply
        self._set_timer(0.0)
        try:
            await self._finished
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _schedule(self) -> None:
        if self._reply is not None and not self._finished.done():
            self._set_timer(0.0 if self._is_urgent else self._pacer.delay_s(self._clock()))

    def _set_timer(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._frame)

    def _frame(self) -> None:
        """Poll and draw; events that arrive from now on schedule another frame."""
        assert self._reply is not None
        self._is_announced = False
        try:
            events = self._reply.poll()
            self._draw(events)
        except Exception as error:
            self._fail(error)
            return
        if self._reply.is_finished:
            self._finish()
        elif not self._is_announced:
            self._set_timer(SAVE_INTERVAL_S)

    def _draw(self, events: list[ChatEvent]) -> None:
        if self._error is None:
            began_s = self._cpu_clock()
            self._show(events)
            self._pacer.drawn(self._cpu_clock() - began_s, self._clock())

    def _fail(self, error: Exception) -> None:
        """Cancel the reply, and poll on without drawing, so that its text so far is saved."""
        assert self._reply is not None
        if self._error is not None:
            self._finish()
            return
        self._error = error
        self._reply.cancel()
        self.hurry()

    def _finish(self) -> None:
        if self._finished.done():
            return
        if self._error is not None:
            self._finished.set_exception(self._error)
        else:
            self._finished.set_result(None)


class LoadRelay:
    """Passes a host's load events to a listener that may attach later.

    Give `hear` to the host as `on_load`, then call `attach` with the listener.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[LoadEvent] = []
        self._deliver: Callable[[LoadEvent], None] | None = None

    def hear(self, event: LoadEvent) -> None:
        """Pass on or store an event. Thread-safe."""
        with self._lock:
            if self._deliver is None:
                self._waiting.append(event)
            else:
                self._deliver(event)

    def attach(
        self, loop: asyncio.AbstractEventLoop, listener: Callable[[LoadEvent], None]
    ) -> None:
        """Call `listener` on the loop with every event, beginning with the stored ones."""

        def deliver(event: LoadEvent) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(listener, event)

        with self._lock:
            for event in self._waiting:
                deliver(event)
            self._waiting.clear()
            self._deliver = deliver
