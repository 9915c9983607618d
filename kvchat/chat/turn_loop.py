"""ReplyStream and TurnLoop: an answer for an event loop, and the rounds of calls of one turn."""

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from kvchat.chat.conversation import ROOT
from kvchat.chat.events import AnswerEnded, ChatEvent
from kvchat.chat.reply import SAVE_INTERVAL_S, Reply
from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.core.errors import GenerationError
from kvchat.core.events import LoadEvent
from kvchat.core.types import FinishReason

# The first event after a pause is shown at once, later ones in frames. The frame interval grows
# with the cost of drawing, so that drawing takes a small share of the time.

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
        self._is_urgent = False
        self._error: Exception | None = None
        self._finished: asyncio.Future[None] = loop.create_future()

    def notify(self) -> None:
        """Schedule a frame. Called on the engine's thread, as `Reply` says."""
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
        try:
            events = self._reply.poll()
            self._draw(events)
        except Exception as error:
            self._fail(error)
            return
        if self._reply.is_finished:
            self._finish()
        else:
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


MOST_ROUNDS = 50
MOST_EQUAL_ROUNDS = 3  # small models repeat a call whose result they do not understand

Results = tuple[ToolResult, ...]
Notify = Callable[[], None]


class EndlessCalls(GenerationError):
    """A model calls tools without end."""


class TurnLoop:
    """The rounds of one turn: answer, calls, results, answer. Each message begins another.

    ask    asks the conversation with the results of its last answer's calls
    hold   keeps results that are not asked with for the next message; None drops them
    """

    def __init__(
        self,
        ask: Callable[[Results, Notify | None], Reply],
        hold: Callable[[Results], None] | None = None,
    ) -> None:
        self._ask = ask
        self._hold = hold
        self._calls: tuple[ToolCall, ...] = ()
        self._last: tuple[list[str], Results] | None = None
        self._num_equal = 0
        self._num_rounds = 0

    def calls(self, ended: Collection[AnswerEnded]) -> tuple[ToolCall, ...]:
        """Return the calls that the ended answers wait for; none if the turn is over.

        Only the calls of one whole answer that is part of the conversation are run.
        """
        self._calls = ()
        if len(ended) == 1:
            [answer] = ended
            if answer.reason is FinishReason.STOP and answer.turn_id != ROOT:
                self._calls = answer.calls
        return self._calls

    def answer(self, results: Results, notify: Notify | None = None) -> Reply:
        """Ask with the results of the last calls; `notify` is the reply's.

        Raises EndlessCalls after too many rounds, and holds the results.
        """
        this = ([call.key for call in self._calls], results)
        self._num_equal = self._num_equal + 1 if this == self._last else 1
        self._last = this
        self._num_rounds += 1
        problem = ""
        if self._num_equal >= MOST_EQUAL_ROUNDS:
            problem = "The model makes the same call again and again, to the same result."
        elif self._num_rounds >= MOST_ROUNDS:
            problem = f"The model has called tools {MOST_ROUNDS} times for one answer."
        if problem:
            self.hold(results)
            raise EndlessCalls(problem, "Ask in other words, or with another model.")
        return self._ask(results, notify)

    def hold(self, results: Results) -> None:
        """End the turn without an answer to the results: the next message has them."""
        if self._hold is not None:
            self._hold(results)
