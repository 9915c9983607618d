"""Answer: what the engine tells between two looks of the event loop is not lost."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvchat.chat.decoding import Decoding
from kvchat.chat.events import AnswerEnded, AnswerText, ReadingPrompt
from kvchat.chat.prefixes import Asked
from kvchat.chat.reply import AnswerLedger, Reply
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.events import PrefillProgress, SampleFinished, TokensGenerated
from kvchat.core.types import CachedTokens, FinishReason, Timing, Usage
from kvchat.server.answering import Answer, Answering, Wakeups
from kvchat.server.bodies import Worker
from kvchat.server.metrics import Metrics
from support.tokenizer_zoo import byte_level, text_files

READ = PrefillProgress(1, CachedTokens(), 5, 5)
ENDED = SampleFinished(1, 0, FinishReason.STOP, Usage(), Timing())


class Engine:
    """What stands on the other side of one reply: it tells events when the test says so.

    `news` is told as the answer begins, so that its start does not wait.
    """

    def __init__(self, *news: Any) -> None:
        self.news = news
        self.tokenizer = ChatTokenizer(text_files(byte_level()))
        self.reply: Reply | None = None

    def begin(self, notify: Callable[[], None]) -> Asked:
        decoding = Decoding(self.tokenizer.new_stream([]), (), starts_thinking=False)
        self.reply = Reply(AnswerLedger(), [decoding], notify)
        for event in self.news:
            self.tell(event)
        session: Any = SimpleNamespace(close=lambda: None)
        return Asked(session, self.reply)

    def tell(self, event: Any) -> None:
        assert self.reply is not None
        self.reply.listen(event)

    def say(self, text: str) -> None:
        self.tell(TokensGenerated(1, 0, tuple(self.tokenizer.encode_bare(text, is_first=False))))


@asynccontextmanager
async def told_by(engine: Engine) -> AsyncIterator[AsyncIterator[list[Any]]]:
    """Start an answer and give its events; it is closed at the end."""
    loop = asyncio.get_running_loop()

    def at_once(begin: Callable[[], Asked]) -> "asyncio.Future[Asked]":
        done = loop.create_future()
        done.set_result(begin())
        return done

    answer = Answer(engine.begin, lambda *_: None, Metrics(), at_once, Wakeups(), "")
    await answer.start()
    yield answer.events()
    answer.close()


async def turn() -> None:
    """Let the event loop run what other threads have asked for."""
    await asyncio.sleep(0)


@pytest.fixture
def long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat.server.answering.PAUSE_S", 3600.0)


@pytest.mark.parametrize("text", ["", "hello"])
def test_an_end_that_comes_after_the_first_look_is_heard(text: str) -> None:
    """The news was forgotten when the loop over the events began: an answer without text, whose
    last event came just then, waited for ever.
    """

    async def run() -> list[Any]:
        engine, heard = Engine(READ), []
        async with told_by(engine) as events:
            if text:
                engine.say(text)
            engine.tell(ENDED)
            await turn()
            async for told in events:
                heard += [event for event in told if not isinstance(event, ReadingPrompt)]
                if not told:  # silence: nothing more would ever come
                    break
        return heard

    *said, ended = asyncio.run(run())

    assert isinstance(ended, AnswerEnded)
    assert "".join(event.text for event in said) == text


def test_what_comes_while_an_event_is_written_is_heard() -> None:
    async def run() -> list[Any]:
        engine, heard = Engine(READ), []
        async with told_by(engine) as events:
            engine.say("a")
            await turn()
            async for told in events:
                heard += [event for event in told if not isinstance(event, ReadingPrompt)]
                if any(isinstance(event, AnswerText) and event.text == "a" for event in told):
                    engine.say("b")
                    await turn()
                    engine.tell(ENDED)
                    await turn()
        return heard

    first, second, ended = asyncio.run(run())

    assert (first.text, second.text) == ("a", "b")
    assert isinstance(ended, AnswerEnded)


@pytest.mark.usefixtures("long_pause")
def test_tokens_that_follow_each_other_are_told_together_and_the_end_at_once() -> None:
    """Each token was written apart, which took a core from the step of the next one."""

    async def run() -> list[Any]:
        engine = Engine(READ)
        async with told_by(engine) as events:
            await anext(events)
            engine.say("a")
            assert [event.text for event in await anext(events)] == ["a"]
            rest = asyncio.ensure_future(anext(events))
            for text in "bc":
                engine.say(text)
                await turn()
                await turn()
                assert not rest.done()
            engine.tell(ENDED)
            return await rest

    *said, ended = asyncio.run(run())

    assert "".join(event.text for event in said) == "bc"
    assert isinstance(ended, AnswerEnded)


@pytest.mark.usefixtures("long_pause")
def test_the_first_token_is_told_at_once_behind_the_progress_of_its_prompt() -> None:
    async def run() -> None:
        engine = Engine(READ)
        async with told_by(engine) as events:
            await anext(events)
            engine.tell(READ)
            await anext(events)
            first = asyncio.ensure_future(anext(events))
            engine.say("a")
            for _ in range(4):
                await turn()
            assert first.done()
            [told] = first.result()
            assert isinstance(told, AnswerText)
            assert told.text == "a"

    asyncio.run(run())


@pytest.mark.usefixtures("long_pause")
def test_an_end_that_comes_with_the_last_token_is_told_at_once() -> None:
    """The loop heard of both as one, and paused."""

    async def run() -> None:
        engine = Engine(READ)
        async with told_by(engine) as events:
            await anext(events)
            engine.say("a")
            await anext(events)
            last = asyncio.ensure_future(anext(events))
            await turn()
            engine.say("b")
            engine.tell(ENDED)
            for _ in range(4):
                await turn()
            assert last.done()
            assert isinstance(last.result()[-1], AnswerEnded)

    asyncio.run(run())


def test_the_loop_is_woken_once_for_all_that_have_news() -> None:
    """Each running answer woke it at every step, by a system call on the engine's thread."""

    class Loop:
        """A loop that runs what it was asked for when the test says so."""

        def __init__(self) -> None:
            self.asked: list[Callable[[], None]] = []

        def call_soon_threadsafe(self, function: Callable[[], None]) -> None:
            self.asked.append(function)

    wakeups, ended_loop, loop = Wakeups(), Loop(), Loop()
    answers = [asyncio.Event() for _ in range(4)]

    wakeups.wake(ended_loop, answers[0])  # type: ignore[arg-type]
    for answer in answers[1:3]:
        wakeups.wake(loop, answer)  # type: ignore[arg-type]
    [tell] = loop.asked  # a loop that has ended does not keep the next one asleep
    tell()
    assert [answer.is_set() for answer in answers] == [True, True, True, False]

    wakeups.wake(loop, answers[3])  # type: ignore[arg-type]
    assert len(loop.asked) == 2


def heard_of_a_silence(
    patch: pytest.MonkeyPatch, engine: Engine, place: int, *news: Any
) -> list[list[Any]]:
    """Return what is told at short intervals, where the engine tells the news at a place."""
    patch.setattr("kvchat.server.answering.PING_INTERVAL_S", 0.01)

    async def run() -> list[list[Any]]:
        told = []
        async with told_by(engine) as events:
            async for some in events:
                told.append(some)
                for event in news if len(told) == place else ():
                    engine.tell(event)
        return told

    return asyncio.run(run())


def test_silence_is_told_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    read, *silences, ended = heard_of_a_silence(monkeypatch, Engine(READ), 3, ENDED)

    assert read
    assert silences[:2] == [[], []]
    assert isinstance(ended[-1], AnswerEnded)


def test_silence_before_the_first_event_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    silence, *others = heard_of_a_silence(monkeypatch, Engine(), 1, READ, ENDED)

    assert silence == []
    read, ended = [event for events in others for event in events]
    assert isinstance(read, ReadingPrompt)
    assert isinstance(ended, AnswerEnded)


def test_the_server_ends_while_a_request_is_encoded(monkeypatch, caplog):
    """It waited for the encoder without a limit, and so did Python at its end."""
    monkeypatch.setattr("kvchat.server.answering.CLOSE_S", 0.0)
    begun, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    class Chats:
        def count(self, chat: Any, think: Any) -> int:
            begun.set()
            may_end.wait(60.0)
            return 7

        def close(self) -> None:
            closed.set()

    async def run() -> int:
        answering = Answering(Chats(), Metrics())  # type: ignore[arg-type]
        counting = asyncio.create_task(answering.count(None, None))  # type: ignore[arg-type]
        await asyncio.to_thread(begun.wait, 20.0)
        answering.close()
        assert not closed.is_set()
        may_end.set()
        return await counting

    assert asyncio.run(run()) == 7
    assert closed.wait(60.0), "the chats are closed after the last work, however late"
    assert "still encoded" in caplog.text


def test_the_encoder_does_all_work_before_it_ends() -> None:
    encoder, done = Worker("encoder"), []

    def fail() -> None:
        raise ValueError("no such thing")

    failed = encoder.submit(fail)
    dropped = encoder.submit(lambda: done.append("dropped"))
    dropped.cancel()
    for number in range(3):
        encoder.submit(lambda number=number: done.append(number))

    assert encoder.close(20.0)
    assert done in ([0, 1, 2], ["dropped", 0, 1, 2])
    assert isinstance(failed.exception(), ValueError)
