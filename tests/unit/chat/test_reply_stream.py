"""Events reach the screen soon, in order, and not more often than the screen can afford."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvchat.chat.events import AnswerText, ChatEvent
from kvchat.chat.turn_loop import FramePacer, ReplyStream


class _FakeReply:
    """Hands out what a thread puts in; finished when told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[ChatEvent] = []
        self._ends = False
        self.is_finished = False
        self.num_polls = 0
        self.was_cancelled = False

    def put(self, *texts: str, ends: bool = False) -> None:
        with self._lock:
            self._events += [AnswerText(0, text) for text in texts]
            self._ends = self._ends or ends

    def poll(self) -> list[ChatEvent]:
        with self._lock:
            self.num_polls += 1
            events, self._events = self._events, []
            self.is_finished = self._ends
            return events

    def cancel(self) -> None:
        self.was_cancelled = True
        self.put("last words", ends=True)


def _run(feed: Callable[[_FakeReply, ReplyStream], None]) -> tuple[_FakeReply, list[str]]:
    """Stream a reply that another thread feeds; return it and the texts shown."""
    reply = _FakeReply()
    shown: list[str] = []

    async def main() -> None:
        stream = ReplyStream(
            asyncio.get_running_loop(),
            lambda events: shown.extend(e.text for e in events if isinstance(e, AnswerText)),
        )
        thread = threading.Thread(target=feed, args=(reply, stream))
        thread.start()
        async with asyncio.timeout(60):
            await stream.run(reply)  # type: ignore[arg-type]
        thread.join()

    asyncio.run(main())
    return reply, shown


def test_everything_is_shown_once_and_in_order() -> None:
    def feed(reply: _FakeReply, stream: ReplyStream) -> None:
        for number in range(2000):
            reply.put(str(number))
            stream.notify()
        reply.put(ends=True)
        stream.notify()

    reply, shown = _run(feed)

    assert shown == [str(number) for number in range(2000)]
    assert reply.num_polls < 200, "many tokens make one frame"


def test_a_reply_that_is_finished_already_ends_at_once() -> None:
    _, shown = _run(lambda reply, stream: reply.put("all of it", ends=True))

    assert shown == ["all of it"]


def test_an_error_while_drawing_still_lets_the_answer_be_saved() -> None:
    """The reply saves what is polled: polling must go on until it has ended."""
    reply = _FakeReply()

    def show(events: list[ChatEvent]) -> None:
        raise ValueError("a bug in drawing")

    async def main() -> None:
        stream = ReplyStream(asyncio.get_running_loop(), show)
        reply.put("first")
        async with asyncio.timeout(60):
            await stream.run(reply)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="a bug in drawing"):
        asyncio.run(main())
    assert reply.was_cancelled
    assert reply.is_finished


def test_notices_after_the_loop_has_ended_are_harmless() -> None:
    loop = asyncio.new_event_loop()
    stream = ReplyStream(loop, lambda events: None)
    loop.close()

    stream.notify()


def test_frames_keep_a_distance_that_follows_their_cost() -> None:
    pace = FramePacer()
    assert pace.delay_s(100.0) == 0.0, "the first frame is drawn at once"
    for _ in range(50):
        pace.drawn(cost_s=0.0015, now_s=100.0)

    assert pace.interval_s == pytest.approx(0.1, rel=0.05)
    assert pace.delay_s(100.03) == pytest.approx(0.07, rel=0.1)
    assert pace.delay_s(101.0) == 0.0


def test_one_slow_frame_does_not_slow_down_the_next() -> None:
    pace = FramePacer()
    for _ in range(20):
        pace.drawn(cost_s=0.0003, now_s=0.0)
    pace.drawn(cost_s=0.5, now_s=1.0)

    assert pace.interval_s < 0.2
