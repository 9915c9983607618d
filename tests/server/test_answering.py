"""Answer: what the engine tells between two looks of the event loop is not lost."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvchat.chat.events import AnswerEnded, AnswerText, ReadingPrompt
from kvchat.chat.reply import Decoding, Reply
from kvchat.chat.resent import Asked
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.events import PrefillProgress, RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import CachedTokens, FinishReason, Timing, Usage
from kvchat.server.answering import Answer
from kvchat.server.metrics import Metrics
from support.tokenizer_zoo import byte_level, text_files

READ = PrefillProgress(1, CachedTokens(), 5, 5)
ENDED = SampleFinished(1, 0, FinishReason.STOP, Usage(), Timing())


class _NoLedger:
    """Keeps nothing."""

    def begin_answer(self, sample: int) -> str | None:
        return None

    def extend_answer(self, sample: int, text: str, token_ids: list[int]) -> str | None:
        return None

    def end_answer(self, sample: int, event: SampleFinished) -> tuple[int, str | None]:
        return 0, None

    def abandon(self, error: RequestFailed) -> str | None:
        return None


class Engine:
    """What stands on the other side of one reply: it tells events when the test says so."""

    def __init__(self) -> None:
        self.tokenizer = ChatTokenizer(text_files(byte_level()))
        self.reply: Reply | None = None

    def begin(self, notify: Callable[[], None]) -> Asked:
        decoding = Decoding(self.tokenizer.new_stream([]), (), starts_thinking=False)
        self.reply = Reply(_NoLedger(), [decoding], notify)
        self.tell(READ)  # the answer begins with news: its start does not wait
        session: Any = SimpleNamespace(close=lambda: None)
        return Asked(session, self.reply)

    def tell(self, event: Any) -> None:
        assert self.reply is not None
        self.reply.listen(event)

    def say(self, text: str) -> None:
        self.tell(TokensGenerated(1, 0, tuple(self.tokenizer.encode_bare(text, is_first=False))))


async def started(engine: Engine) -> Answer:
    loop = asyncio.get_running_loop()

    def at_once(begin: Callable[[], Asked]) -> "asyncio.Future[Asked]":
        done = loop.create_future()
        done.set_result(begin())
        return done

    answer = Answer(engine.begin, lambda *_: None, Metrics(), at_once)
    await answer.start()
    return answer


async def turn() -> None:
    """Let the event loop run what other threads have asked for."""
    await asyncio.sleep(0)


@pytest.mark.parametrize("text", ["", "hello"])
def test_an_end_that_comes_after_the_first_look_is_heard(text: str) -> None:
    """The news was forgotten when the loop over the events began: an answer without text, whose
    last event came just then, waited for ever.
    """

    async def run() -> list[Any]:
        engine = Engine()
        answer = await started(engine)
        if text:
            engine.say(text)
        engine.tell(ENDED)
        await turn()
        heard = []
        async for event in answer.events():
            if not isinstance(event, ReadingPrompt):
                heard.append(event)
            if event is None:  # a look in vain: nothing more would ever come
                break
        answer.close()
        return heard

    *said, ended = asyncio.run(run())

    assert isinstance(ended, AnswerEnded)
    assert "".join(event.text for event in said) == text


def test_what_comes_while_an_event_is_written_is_heard() -> None:
    async def run() -> list[Any]:
        engine, heard = Engine(), []
        answer = await started(engine)
        engine.say("a")
        await turn()
        async for event in answer.events():
            if not isinstance(event, ReadingPrompt):
                heard.append(event)
            if isinstance(event, AnswerText) and event.text == "a":
                engine.say("b")
                await turn()
                engine.tell(ENDED)
                await turn()
        answer.close()
        return heard

    first, second, ended = asyncio.run(run())

    assert (first.text, second.text) == ("a", "b")
    assert isinstance(ended, AnswerEnded)
